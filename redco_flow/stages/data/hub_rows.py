"""Read the rows of a dataset of the hub, from the hub or its cache, at one commit.

CSV and JSON are read like local files; Parquet and all other formats by the package `datasets`.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from redco_flow import hub
from redco_flow.stages.data.csv_rows import Dialect
from redco_flow.stages.data.row_files import TEXT_ENDINGS, ending_of, read_file
from redco_flow.stages.data.rows import FileRow, Rows

_CARD_FILES = ("README.md", ".huggingface.yaml", "dataset_infos.json")
# Options of `datasets`' readers that change nothing here: where files are, speed, missing values.
_IGNORED = frozenset(
    ("name", "version", "data_dir", "data_files", "description", "features", "chunksize", "engine")
)
_IGNORED |= {"memory_map", "keep_default_na", "na_filter", "use_threads", "block_size"}
_IGNORED |= {"on_mixed_types", "parse_agent_traces"}
_OF_DIALECT = frozenset(("sep", "delimiter", "names", "column_names", "skiprows", "quoting"))


@dataclass(frozen=True)
class HubFiles:
    """The files of one subset of a dataset, in the cache.

    Args:
        folder: the repository's files at the commit; those of the chosen splits are there.
        splits: paths below it, by the dataset's own name of the split.
        dialect: of CSV files, as far as the repository gives it.
        class_names: the names of classes by column, where the repository gives them.
    """

    folder: Path
    splits: Mapping[str, Sequence[str]]
    dialect: Dialect
    class_names: Mapping[str, Sequence[str]]


def text_files(
    name: str,
    subset: str | None,
    commit: str,
    choose: Callable[[Collection[str]], Collection[str]],
) -> HubFiles | None:
    """Return a dataset's files where all are CSV or JSON; None where `datasets` must read them.

    `datasets` must where the repository has files of other formats, or options that only it knows.

    Args:
        choose: from the names of the splits to those whose files are downloaded.

    Raises:
        HubUnreachable: neither the hub nor its cache says which files the commit has.
        HubError: a file cannot be downloaded.
    """
    paths, card = hub.dataset_listing(name, commit, _CARD_FILES)
    if not any(_is_text(path) for path in paths) and not _names_files(card):
        return None
    found = _layout(paths, card, subset)
    if found is None:
        return None
    wanted = [path for split in choose(found.splits) for path in found.splits[split]]
    folder = hub.download_dataset(name, commit, [glob.escape(path) for path in wanted])
    missing = [path for path in wanted if not (folder / path).is_file()]
    if missing:
        raise hub.HubUnreachable(f"{missing[0]} of {name} is not in the cache")
    return dataclasses.replace(found, folder=folder)


def _is_text(path: str) -> bool:
    return "://" not in path and path not in _CARD_FILES and ending_of(Path(path)) in TEXT_ENDINGS


def _names_files(card: Path) -> bool:
    """Whether a repository itself says which files are its data: they may be anywhere."""
    said = [card / name for name in _CARD_FILES if (card / name).is_file()]
    return any(b"data_files" in file.read_bytes() for file in said)


def _layout(paths: Sequence[str], card: Path, subset: str | None) -> HubFiles | None:
    """Let `datasets` look at a folder with empty files of the same names.

    Raises:
        HubError: the repository names files of this machine.
    """
    from datasets import load_dataset_builder

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary).resolve() / "dataset"
        try:
            _write_skeleton(root, paths, card)
            builder = load_dataset_builder(str(root), subset, cache_dir=f"{temporary}/cache")
            found = {str(name): list(files) for name, files in builder.config.data_files.items()}
        except Exception:  # noqa: BLE001 (it raises whatever it likes; asked for all, it says why)
            return None
        dialect = _dialect_of(builder.config)
        features = builder.info.features or getattr(builder.config, "features", None) or {}
    splits = {name: [_inside(file, root) for file in files] for name, files in found.items()}
    if dialect is None or not all(_is_text(path) for files in splits.values() for path in files):
        return None
    if any(type(kind).__name__ in ("Image", "Audio", "Video") for kind in features.values()):
        return None
    return HubFiles(card, splits, dialect, class_names_of(features))


def _write_skeleton(root: Path, paths: Sequence[str], card: Path) -> None:
    root.mkdir()
    for path in paths:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{path!r} lies outside of the repository")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    for name in _CARD_FILES:
        if (card / name).is_file():
            shutil.copyfile(card / name, root / name)


def _inside(file: str, root: Path) -> str:
    """Return a file's path in the repository; another address as it is."""
    if "://" in file:
        return file
    path = Path(os.path.normpath(file))
    if not path.is_relative_to(root):
        raise hub.HubError(
            f"the dataset's README.md names a file outside of its repository: {file}. Read it by "
            "data.train if it is meant."
        )
    return path.relative_to(root).as_posix()


def _dialect_of(config: Any) -> Dialect | None:
    """Return how a repository's files are written; None where that is not known here."""
    if type(config).__name__ not in ("CsvConfig", "JsonConfig"):
        return None
    defaults = type(config)()
    changed = {
        field.name
        for field in dataclasses.fields(config)
        if field.name not in _IGNORED
        and getattr(config, field.name) != getattr(defaults, field.name)
    }
    if changed - _OF_DIALECT:
        return None
    if not changed:
        return Dialect()
    quoting = {0: None, 3: "none"}.get(config.quoting, "")
    if len(config.sep) != 1 or quoting == "" or not isinstance(config.skiprows or 0, int):
        return None
    delimiter = config.sep if "sep" in changed else None
    names = tuple(config.names or ())
    return Dialect(delimiter, quoting, names, config.skiprows or 0)  # type: ignore[arg-type]


def class_names_of(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the classes of the columns that `datasets` calls ClassLabel."""
    from datasets import ClassLabel

    return {
        name: list(kind.names) for name, kind in features.items() if isinstance(kind, ClassLabel)
    }


logger = logging.getLogger(__name__)

_HUB_BATCH_ROWS = 1000
_TEXT_BUILDERS = ("csv", "json")


@dataclass(frozen=True)
class HubPart:
    """Rows of one split: those of one file, or all.

    Args:
        name: of the file in its repository; of a whole split the split's.
        rows: opens it.
        class_names: by field, the names of classes.
    """

    name: str
    rows: Callable[[], Rows]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)


def hub_splits(
    name: str,
    subset: str | None,
    revision: str | None,
    dialect: Dialect,
    choose: Callable[[Collection[str]], Collection[str]] = lambda splits: splits,
) -> dict[str, list[HubPart]]:
    """Return a dataset's rows by its own names of the splits.

    Args:
        revision: of a run's stages the commit that the run is pinned to.
        dialect: of CSV files, where it is not the repository's.
        choose: from the dataset's names of its splits to those that will be read; CSV and JSON
            files of the others are not downloaded.

    Raises:
        HubError: neither the hub nor its cache gives that commit; says what to do.
    """
    try:
        is_pinned = hub.is_commit(revision)
        commit = str(revision) if is_pinned else hub.look_up("dataset", name, revision).commit
        files = text_files(name, subset, commit, choose)
    except hub.HubUnreachable as error:
        prepared = hub.is_commit(revision) and _open_prepared(
            name, subset, str(revision), has_texts=False
        )
        if not prepared:
            raise hub.HubUnreachable(hub.not_cached("dataset", name, revision, error)) from error
        return _parts_of(name, prepared)
    if files is not None:
        return {
            split: [_file_part(files, path, dialect) for path in paths]
            for split, paths in files.splits.items()
        }
    cached = _open_prepared(name, subset, commit) or _open_downloaded(name, subset, commit)
    return _parts_of(name, cached if cached is not None else _download(name, subset, commit))


def _file_part(files: HubFiles, path: str, dialect: Dialect) -> HubPart:
    rows = partial(_file_rows, files.folder / path, dialect.over(files.dialect), files.class_names)
    return HubPart(path, rows, files.class_names)


def _file_rows(path: Path, dialect: Dialect, class_names: Mapping[str, Sequence[str]]) -> Rows:
    """Yield a file's rows; classes that are written as numbers in a text are numbers."""
    for row in read_file(path, dialect):
        if isinstance(row, FileRow) and class_names:
            numbers = {
                key: int(value)
                for key, names in class_names.items()
                if isinstance(value := row.fields.get(key), str)
                and value not in names
                and value.removeprefix("-").isdecimal()
            }
            row = FileRow(row.line, {**row.fields, **numbers}) if numbers else row
        yield row


def _parts_of(name: str, loaded: Any) -> dict[str, list[HubPart]]:
    if any(split.info.builder_name in _TEXT_BUILDERS for split in loaded.values()):
        logger.warning(
            "%s is in archives, or its README.md has options that redco-flow does not read: the "
            "package `datasets` reads it, which makes NA and null in CSV missing values, and "
            "digits numbers. To read texts, download its files and name them by data.train",
            name,
        )
    return {
        str(own): [HubPart(str(own), partial(hub_rows, split), class_names_of(split.features))]
        for own, split in loaded.items()
    }


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


def hub_image_folders(name: str) -> tuple[Path, ...]:
    """Return the folders of a dataset's image files: the hub's cache, and unpacked archives."""
    import datasets

    return *hub.cached_files("dataset", name), Path(datasets.config.EXTRACTED_DATASETS_PATH)


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
        raise hub.broken_off("dataset", name, commit, error) from error
    return builder.as_dataset()


def _is_of_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError)


def _open_prepared(name: str, subset: str | None, commit: str, *, has_texts: bool = True) -> Any:
    """The Arrow files that `datasets` made of the subset before; None where it has not.

    Args:
        has_texts: also what it has made of CSV and JSON.
    """
    wanted = subset or _default_subset(name, commit)
    for folder in hub.prepared_datasets(commit):
        subset_found, version, _ = folder.parts[-3:]
        if subset_found == wanted and (has_texts or not _is_of_texts(folder)):
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


def _is_of_texts(folder: Path) -> bool:
    """Whether prepared files were made of CSV or JSON."""
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    return info.get("builder_name") in _TEXT_BUILDERS


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
