"""Find the raw data that a pipeline's `data` section means, split by split.

Knows files, directories, hub ids and `python:module` sources. Light at the top: `data_files` is
asked on login nodes, to digest what will be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any

from redco_flow import hub
from redco_flow.errors import UsageError
from redco_flow.hub import Kind, is_commit, is_hub_name
from redco_flow.local_paths import exists, expanded, is_folder
from redco_flow.recipes.recipe import has_no_texts
from redco_flow.spec.data_files import as_list, names_of
from redco_flow.spec.missing_paths import missing_file
from redco_flow.spec.names import import_named
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.spec.stage_kind import StageConfig
from redco_flow.stages.data.image_folder import (
    ENDINGS,
    ImageFile,
    class_names,
    image_files,
    image_row,
)
from redco_flow.stages.data.rows import READERS, FileRow, Rows, read_file

SPLITS = ("train", "validation", "test")
_PYTHON = "python:"
_SPLIT_PREFIX = re.compile(r"(train|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)
_SPLIT_OF = {"valid": "validation", "val": "validation", "dev": "validation"}
_NOT_DATA = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
_HUB_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Source:
    """One place that rows of one split come from.

    Args:
        split: train, validation or test.
        name: names its rows in row ids; holds no folder, so that moved data stays the same.
        location: names its rows in errors.
        rows: opens it; each call reads from the start.
        class_names: by field, what the data call the classes whose numbers stand there.
        part: the name of its dataset in a mixture; empty where there is one dataset.
        image_folders: where image files that its rows name by path may be; None: anywhere, as
            where the user's own module makes the rows.
    """

    split: str
    name: str
    location: str
    rows: Callable[[], Rows]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    part: str = ""
    image_folders: tuple[Path, ...] | None = ()


def parts_of(data: DataSection) -> dict[str, DataSection]:
    """Return each dataset of a mixture as if it were the only one, by name."""
    return {
        name: data.model_copy(update={"mixture": {}, "dataset": part.dataset})
        for name, part in data.mixture.items()
    }


def problem_of(data: DataSection) -> str | None:
    """Say what is wrong with the section as a source of training data, or None."""
    files = [split for split in SPLITS if getattr(data, split)]
    if data.mixture:
        return _problem_of_mixture(data, files)
    if data.dataset and files:
        return (
            f"'data' names both a dataset ({data.dataset}) and files for {', '.join(files)}; "
            "give one or the other."
        )
    if not data.dataset and not data.train:
        return (
            "'data' names no training data; give data.train=PATH (and data.validation, data.test), "
            "or data.dataset=HUB_ID, a file, a directory, or python:MODULE."
        )
    if data.revision is not None and (not data.dataset or hub_dataset(data) is None):
        return "'data.revision' is of a dataset on the hub, and this data is not from there."
    if data.dataset and _is_missing_path(data.dataset):
        hint = "; patterns are for data.train, data.validation, data.test" * has_magic(data.dataset)
        return f"'data.dataset': {missing_file(data.dataset, 'file or directory')}{hint}"
    if data.dataset and data.dataset.startswith(_PYTHON):
        try:
            _python_module(data.dataset)
        except ValueError as error:
            return str(error)
    return None


def _problem_of_mixture(data: DataSection, files: Sequence[str]) -> str | None:
    others = [*(["dataset"] if data.dataset else []), *files]
    if others:
        return f"'data' names both a mixture and {', '.join(others)}; give one or the other."
    for name, part in parts_of(data).items():
        if hub_dataset(part) is not None:
            return (
                f"'data.mixture.{name}': there is no file or directory '{part.dataset}', and a "
                "mixture takes no datasets of the hub: download it first."
            )
        if problem := problem_of(part):
            return f"'data.mixture.{name}': {problem}"
    return None


def _is_missing_path(dataset: str) -> bool:
    """Whether a name that is no hub id names nothing on this machine."""
    path = expanded(dataset)
    looks_local = path.is_absolute() or dataset.startswith(".") or path.suffix.lower() in READERS
    return looks_local and not exists(path)


def data_files(data: DataSection) -> list[Path]:
    """Return every raw data file that will be read, in reading order; none for a hub dataset."""
    if data.mixture:
        found = (file for part in parts_of(data).values() for file in data_files(part))
        return list(dict.fromkeys(found))
    if data.dataset is None:
        return [file for files in files_by_split(data).values() for file in files]
    if data.dataset.startswith(_PYTHON):
        return list(_python_module(data.dataset).files())
    path = expanded(data.dataset)
    return [file for _, file in _files_by_split(path)] if exists(path) else []


def files_by_split(data: DataSection) -> dict[str, list[Path]]:
    """Return the data files of each split; none for the hub's and for a module's.

    Raises:
        ValueError: a directory without data files, or whose files do not all name their split.
    """
    if data.mixture:
        of_all: dict[str, list[Path]] = {}
        for part in parts_of(data).values():
            for split, paths in files_by_split(part).items():
                of_all.setdefault(split, []).extend(paths)
        return of_all
    if data.dataset is None:
        named = {split: as_list(getattr(data, split)) for split in SPLITS}
        return {split: list(map(Path, files)) for split, files in named.items() if files}
    path = expanded(data.dataset)
    files: dict[str, list[Path]] = {}
    for split, file in _files_by_split(path) if exists(path) else []:
        files.setdefault(split, []).append(file)
    return files


def data_identity(data: DataSection) -> dict[str, Any]:
    """Return what identifies data that is no file: what a module says of itself."""
    if data.mixture:
        of_parts = map(data_identity, parts_of(data).values())
        return {name: value for one in of_parts for name, value in one.items()}
    if data.dataset is None or not data.dataset.startswith(_PYTHON):
        return {}
    identity = getattr(_python_module(data.dataset), "identity", None)
    return {data.dataset: identity()} if identity else {}


def hub_dataset(data: DataSection) -> str | None:
    """Return the hub id of the dataset; None where the data is on this machine or a module's."""
    name = data.dataset
    if name is None or name.startswith(_PYTHON) or exists(expanded(name)):
        return None
    return name


def data_modules(data: DataSection) -> list[str]:
    """Return the modules whose code makes rows."""
    if data.mixture:
        of_parts = map(data_modules, parts_of(data).values())
        return list(dict.fromkeys(module for one in of_parts for module in one))
    is_python = data.dataset is not None and data.dataset.startswith(_PYTHON)
    return [str(data.dataset).removeprefix(_PYTHON)] if is_python else []


def open_sources(data: DataSection) -> list[Source]:
    """Return where the rows come from, train first, and a part's of a split one after the other.

    Raises:
        ValueError: a directory without data files, a module without files() and rows(), or a
            dataset that neither the hub nor its cache gives.
    """
    if data.mixture:
        of_parts = [
            replace(source, name=f"{name}/{source.name}", part=name)
            for name, part in parts_of(data).items()
            for source in open_sources(part)
        ]
        return sorted(of_parts, key=lambda source: SPLITS.index(source.split))
    if data.dataset is None:
        return [
            _file_source(split, path, name)
            for split, files in files_by_split(data).items()
            for path, name in zip(files, names_of(list(map(str, files))), strict=True)
        ]
    if data.dataset.startswith(_PYTHON):
        name = data.dataset.removeprefix(_PYTHON)
        rows = partial(_module_rows, data.dataset)
        return [Source("train", name.rpartition(".")[2], name, rows, image_folders=None)]
    path = expanded(data.dataset)
    if path.exists():
        root = path if path.is_dir() else path.parent
        if images := _images(path):
            classes = class_names(images)
            return [_image_source(image, root, classes) for image in images]
        return [
            _file_source(split, file, str(file.relative_to(root)), root)
            for split, file in _files_by_split(path)
        ]
    return _hub_sources(data)


def _file_source(split: str, path: Path, name: str, *folders: Path) -> Source:
    rows, image_folders = partial(read_file, path), (path.parent, *folders)
    return Source(split, name, str(path), rows, image_folders=image_folders)


def _images(path: Path) -> list[ImageFile]:
    """The images of a directory without data files."""
    if not path.is_dir() or _data_files(path):
        return []
    return image_files(path, _split_named)


def _image_source(image: ImageFile, root: Path, classes: list[str]) -> Source:
    name = str(image.path.relative_to(root))
    rows = partial(image_row, image, classes)
    return Source(image.split, name, str(image.path), rows, {"label": classes})


def _data_files(path: Path) -> list[Path]:
    return sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in READERS and file.name not in _NOT_DATA and file.is_file()
    )


def _files_by_split(path: Path) -> list[tuple[str, Path]]:
    """A directory's data files with their splits: by the file's name, else its folder's."""
    if path.is_file():
        return [("train", path)]
    files = _data_files(path)
    if not files:
        if images := _images(path):
            return [(image.split, image.path) for image in images]
        known = ", ".join((*READERS, *sorted(ENDINGS)))
        raise ValueError(f"{path}: no data files and no images in it; known endings: {known}.")
    named = [(_split_of(file), file) for file in files]
    if not any(split for split, _ in named):
        return [("train", file) for file in files]
    nameless = [str(file) for split, file in named if split is None]
    if nameless:
        raise ValueError(
            f"{path}: some files name their split (train…, validation…, test…) and these do not: "
            f"{', '.join(nameless)}. Name them so too, or move them away."
        )
    return sorted(((str(split), file) for split, file in named), key=lambda p: SPLITS.index(p[0]))


def _split_of(file: Path) -> str | None:
    return _split_named(file.name) or _split_named(file.parent.name)


def _split_named(name: str) -> str | None:
    match = _SPLIT_PREFIX.match(name)
    if match is None:
        return None
    split = match[1].lower()
    return _SPLIT_OF.get(split, split)


def _python_module(dataset: str) -> Any:
    name = dataset.removeprefix(_PYTHON)
    try:
        module = import_named(name)
    except ValueError as error:
        raise ValueError(f"data.dataset '{dataset}': {error}") from error
    missing = [function for function in ("files", "rows") if not hasattr(module, function)]
    if missing:
        raise ValueError(
            f"data.dataset '{dataset}': {name} lacks {' and '.join(missing)}; a data module has "
            "files() -> list[Path] and rows(files) -> Iterator[dict]."
        )
    return module


def _module_rows(dataset: str) -> Rows:
    module = _python_module(dataset)
    for index, fields in enumerate(module.rows(module.files()), start=1):
        yield FileRow(index, fields)


def _hub_sources(data: DataSection) -> list[Source]:

    loaded = open_hub_dataset(str(data.dataset), data.subset, data.revision)
    known = [split for split in SPLITS if split in loaded]
    if not known:
        raise ValueError(
            f"{data.dataset}: its splits are {', '.join(map(str, loaded))}; need at least 'train'."
        )
    return [
        Source(
            split,
            split,
            f"{data.dataset}/{split}",
            partial(hub_rows, loaded[split]),
            hub_class_names(loaded[split]),
            image_folders=_hub_image_folders(str(data.dataset)),
        )
        for split in known
    ]


def _hub_image_folders(name: str) -> tuple[Path, ...]:
    """Where a dataset's image files are: in its repository's copy, or unpacked by `datasets`."""
    import datasets

    copy = hub.cache_directory() / f"datasets--{name.replace('/', '--')}"
    return copy, Path(datasets.config.EXTRACTED_DATASETS_PATH)


def hub_class_names(split: Any) -> dict[str, list[str]]:
    """Return the names of the classes of a split's columns that `datasets` calls ClassLabel."""
    from datasets import ClassLabel

    features = split.features.items()
    return {name: list(kind.names) for name, kind in features if isinstance(kind, ClassLabel)}


def hub_rows(split: Any) -> Iterator[FileRow]:
    """Yield the rows of a split that `datasets` has loaded, images as their files."""
    split, line = _with_images_as_files(split), 0
    for batch in split.iter(batch_size=_HUB_BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            line += 1
            yield FileRow(line, dict(zip(batch, values, strict=True)))


def _with_images_as_files(split: Any) -> Any:
    """Leave images as the bytes of their files."""
    from datasets import Image

    features = split.features.items()
    for name in [name for name, kind in features if isinstance(kind, Image)]:
        split = split.cast_column(name, Image(decode=False))
    return split


def open_hub_dataset(name: str, subset: str | None, revision: str | None) -> Any:
    """Return the splits of a dataset, by name, ready to be read.

    Args:
        revision: of a run's stages the commit that the run is pinned to.

    Raises:
        HubError: neither the hub nor its cache gives that commit; says what to do.
    """
    if hub.is_commit(revision):
        commit = str(revision)
        cached = _open_prepared(name, subset, commit) or _open_downloaded(name, subset, commit)
        if cached is not None:
            return cached
    try:
        commit = hub.look_up("dataset", name, revision).commit
    except hub.HubUnreachable as error:
        raise hub.HubUnreachable(hub.not_cached("dataset", name, revision, error)) from error
    return _download(name, subset, commit)


def _download(name: str, subset: str | None, commit: str) -> Any:
    import datasets
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    hub.guard()
    try:
        builder = datasets.load_dataset_builder(name, subset, revision=commit)
        if builder.hash != commit:
            raise OSError("the hub no longer answers, and the cache has another commit")
        builder.download_and_prepare()
    except (httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and not _is_of_network(error):
            raise
        raise hub.HubError(
            f"the download of dataset '{name}' at {commit} broke off: {type(error).__name__}: "
            f"{error}. A new attempt (`redco-flow retry`) fetches the files that are not whole."
        ) from error
    return builder.as_dataset()


def _is_of_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError)


def _open_prepared(name: str, subset: str | None, commit: str) -> Any:
    """The Arrow files that `datasets` made of the subset before; None where it has not."""
    wanted = subset or _default_subset(name, commit)
    for folder in hub.prepared_datasets(commit):
        subset_found, version, _ = folder.parts[-3:]
        if subset_found == wanted:
            from datasets.packaged_modules.cache.cache import Cache

            builder = Cache(
                dataset_name=name.rpartition("/")[2],
                config_name=subset_found,
                version=version,
                hash=commit,
                repo_id=name,
            )
            if Path(builder.cache_dir).is_dir():  # a copy of a repository has the same commits
                return builder.as_dataset()
    return None


def _default_subset(name: str, commit: str) -> str:
    """The subset that a dataset's card makes the default, as `datasets` reads it."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, try_to_load_from_cache

    path = try_to_load_from_cache(name, "README.md", repo_type="dataset", revision=commit)
    if not isinstance(path, str):
        return "default"
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(Path(path)).data)
    return str(configs.get_default_config_name() or "default")


def _open_downloaded(name: str, subset: str | None, commit: str) -> Any:
    """The dataset from a whole download of its repository (`hf download`); None without one."""
    folder = hub.whole_download("dataset", name, commit)
    if folder is None:
        return None
    import datasets

    return datasets.load_dataset(str(folder), subset)


@dataclass(frozen=True)
class HubReference:
    """One name in a Config that the hub, or a local directory, answers to.

    Args:
        section: the path of the mapping that has the name and its `revision`.
        key: the name's own key there.
        is_local: the name is a path on this machine; nothing is asked of the hub.
        reads_weights: the stage loads a model's parameters.
        reads_tokenizer: the stage loads its tokenizer.
        recipe: whose model it is, where config.json is to say its family; else empty.
        subset: of a dataset.
    """

    section: tuple[str, ...]
    key: str
    kind: Kind
    name: str
    revision: str | None
    is_local: bool = False
    reads_weights: bool = False
    reads_tokenizer: bool = False
    recipe: str = ""
    subset: str | None = None


def hub_references(config: StageConfig) -> Iterator[HubReference]:
    """Yield what a stage's `model` and `data` sections name, local directories of models too."""
    model, data = getattr(config, "model", None), getattr(config, "data", None)
    own_tokenizer = data.tokenizer if isinstance(data, DataSection) else None
    recipe = getattr(config, "recipe", "")
    if isinstance(model, ModelSection) and model.name_or_path is not None:
        yield HubReference(
            ("model",),
            "name_or_path",
            "model",
            model.name_or_path,
            model.revision,
            is_local=_is_local(model.name_or_path),
            reads_weights=model.reads_weights and not model.from_scratch,
            reads_tokenizer=not model.reads_weights
            and own_tokenizer is None
            and not has_no_texts(recipe),
            recipe=recipe if model.reads_weights and model.family is None else "",
        )
    if own_tokenizer is not None and (name := own_tokenizer.name_or_path) is not None:
        yield HubReference(
            ("data", "tokenizer"),
            "name_or_path",
            "model",
            name,
            own_tokenizer.revision,
            is_local=_is_local(name),
            reads_tokenizer=True,
        )
    if isinstance(data, DataSection) and (dataset := hub_dataset(data)) is not None:
        yield HubReference(
            ("data",), "dataset", "dataset", dataset, data.revision, subset=data.subset
        )


def hub_identities(config: StageConfig) -> dict[str, Any]:
    """Return, by a name for people, what identifies the repositories that a stage reads.

    Raises:
        UsageError: one of them is at no commit yet, so that it could change from stage to stage.
    """
    identities: dict[str, Any] = {}
    for one in hub_references(config):
        if one.is_local:
            continue
        if not is_commit(one.revision):
            raise UsageError(
                f"{one.kind} '{one.name}' of the hub is at no commit: pin the pipeline first "
                "(redco_flow.orchestrate.hub_pins.HubPins), or give its revision as a commit."
            )
        subset = {"subset": one.subset} if one.subset is not None else {}
        identities[f"hub:{one.kind}s/{one.name}"] = {"commit": one.revision, **subset}
    return identities


def _is_local(name: str) -> bool:
    """Whether the name of a model is a path: what exists, or looks like one."""
    return not is_hub_name(name) or is_folder(expanded(name))
