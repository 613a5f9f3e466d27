"""Find the raw data that a pipeline's `data` section means, split by split.

Knows files, directories, hub ids and `python:module` sources. Light at the top: `data_files` is
asked on login nodes, to digest what will be read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any

from redco_flow.local_paths import exists, expanded, is_folder
from redco_flow.spec.data_files import as_list, missing_file, names_of
from redco_flow.spec.names import import_named
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.data.csv_rows import Dialect
from redco_flow.stages.data.hub_rows import hub_image_folders, hub_splits
from redco_flow.stages.data.image_files import (
    ENDINGS,
    ImageFile,
    class_names,
    image_files,
    image_row,
)
from redco_flow.stages.data.row_files import DIALECTS, KNOWN_ENDINGS, ending_of, read_file
from redco_flow.stages.data.rows import BadRow, FileRow, Rows
from redco_flow.stages.data.splits import SPLITS, chosen, split_choice, unread_splits

logger = logging.getLogger(__name__)

_PYTHON = "python:"
_SPLIT_PREFIX = re.compile(r"(train|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)
_SPLIT_OF = {"valid": "validation", "val": "validation", "dev": "validation"}
_NOT_DATA = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)


@dataclass(frozen=True)
class Source:
    """One place that rows of one split come from.

    Args:
        split: train, validation or test.
        name: names its rows in row ids; holds no folder, so that moved data stays the same.
        location: names its rows in errors.
        rows: opens it; each call reads from the start.
        class_names: by field, the data's names of numbered classes.
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
    if problem := _problem_of_reading(data, files):
        return problem
    if data.revision is not None and (not data.dataset or hub_dataset(data) is None):
        return "'data.revision' is of a dataset on the hub, and this data is not from there."
    if data.dataset and _is_missing_path(data.dataset):
        hint = "; patterns are for data.train, data.validation, data.test" * has_magic(data.dataset)
        return f"'data.dataset': {missing_file(data.dataset, 'file or directory')}{hint}"
    if data.dataset and (what := _no_dataset(expanded(data.dataset))):
        return (
            f"'data.dataset': '{data.dataset}' is {what}, all of whose files would be read: name "
            "the directory that has the data files."
        )
    if data.dataset and data.dataset.startswith(_PYTHON):
        try:
            _python_module(data.dataset)
        except ValueError as error:
            return str(error)
    return None


def _problem_of_reading(data: DataSection, files: Sequence[str]) -> str | None:
    """Say that `splits` or `csv` would change nothing, or None."""
    is_module = data.dataset is not None and data.dataset.startswith(_PYTHON)
    if data.splits and (files or is_module):
        what = "files for each split" if files else "a module, which has one split"
        return f"'data.splits' would change nothing: 'data' names {what}."
    return _USELESS_DIALECT if data.csv is not None and _has_no_csv(data) else None


_USELESS_DIALECT = "'data.csv' would change nothing: no file of 'data' is a csv or tsv file."


def _has_no_csv(data: DataSection) -> bool:
    """Tell whether no file is a csv or tsv file; False of what may have some."""
    if data.dataset is not None and data.dataset.startswith(_PYTHON):
        return True
    named = [data.dataset] if data.dataset else []
    named += [file for split in SPLITS for file in as_list(getattr(data, split))]
    endings = {ending_of(Path(file)) for file in named}
    return None not in endings and not endings & set(DIALECTS)


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
        # How files are read, and splits, may be of other parts.
        if problem := problem_of(part.model_copy(update={"csv": None, "splits": {}})):
            return f"'data.mixture.{name}': {problem}"
    if data.splits and all(map(data_modules, parts_of(data).values())):
        return "'data.splits' would change nothing: 'data' names modules, which have one split."
    if data.csv is not None and all(map(_has_no_csv, parts_of(data).values())):
        return _USELESS_DIALECT
    return None


def _is_missing_path(dataset: str) -> bool:
    """Whether a name that is no hub id names nothing on this machine."""
    path = expanded(dataset)
    looks_local = path.is_absolute() or dataset.startswith(".") or ending_of(path) is not None
    return looks_local and not exists(path)


def _no_dataset(path: Path) -> str | None:
    """Say which directory a path is, where it is too wide to be meant as a dataset."""
    others = {
        "/": "the root of the file system",
        os.path.realpath(expanded("~")): "your home directory",
    }
    return others.get(os.path.realpath(path)) if is_folder(path) else None


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
    return [file for _, file in _files_by_split(data, path)] if exists(path) else []


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
    for split, file in _files_by_split(data, path) if exists(path) else []:
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
            _file_source(split, path, name, data)
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
            wanted = chosen(data, [(one.split, one) for one in images])
            classes = class_names([image for _, image in wanted])
            return [_image_source(split, image, root, classes) for split, image in wanted]
        return _labelled(
            data,
            [
                _file_source(split, file, str(file.relative_to(root)), data)
                for split, file in _files_by_split(data, path)
            ],
        )
    return _labelled(data, _hub_sources(data))


def _file_source(split: str, path: Path, name: str, data: DataSection) -> Source:
    rows = partial(read_file, path, Dialect.of(data.csv))
    return Source(split, name, str(path), rows, image_folders=image_folders(path, data))


def image_folders(file: Path, data: DataSection) -> tuple[Path, ...]:
    """Return the folders that images named by a data file's rows may be in."""
    folder = expanded(data.dataset) if data.dataset else file.parent
    return (file.parent, folder) if is_folder(folder) else (file.parent,)


def _images(path: Path) -> list[ImageFile]:
    """The images of a directory without data files."""
    if not path.is_dir() or _data_files(path):
        return []
    return image_files(path, _split_named)


def _image_source(split: str, image: ImageFile, root: Path, classes: list[str]) -> Source:
    name = str(image.path.relative_to(root))
    rows = partial(image_row, image, classes)
    return Source(split, name, str(image.path), rows, {"label": classes})


def _refuse_linked_folders(path: Path, *, has_data_files: bool) -> None:
    """Raise where a link below a directory leads to data outside of it, which is not read.

    Args:
        has_data_files: the directory has some, so that its images are no data.
    """
    inside = f"{os.path.realpath(path)}{os.sep}"
    for folder, names, _ in os.walk(path):
        for linked in (Path(folder, name) for name in names if not name.startswith(".")):
            if not linked.is_symlink() or f"{os.path.realpath(linked)}{os.sep}".startswith(inside):
                continue
            if _data_files(linked) or (not has_data_files and _images(linked)):
                raise ValueError(
                    f"{linked} is a link to a folder outside of {path}, whose files are not read: "
                    "put the folder itself there, or name the files by data.train, "
                    "data.validation, data.test."
                )


def _data_files(path: Path) -> list[Path]:
    return sorted(
        file
        for file in path.rglob("*")
        if ending_of(file) and file.name not in _NOT_DATA and file.is_file()
    )


def _files_by_split(data: DataSection, path: Path) -> list[tuple[str, Path]]:
    """A file, or a directory's data files, with their splits, as far as the pipeline wants them."""
    return chosen(data, _named_by_split(path))


def _named_by_split(path: Path) -> list[tuple[str, Path]]:
    """A directory's data files with their splits: by the file's name, else its folder's."""
    if path.is_file():
        return [("train", path)]
    files = _data_files(path)
    _refuse_linked_folders(path, has_data_files=bool(files))
    if not files:
        if images := _images(path):
            return [(image.split, image.path) for image in images]
        known = f"{KNOWN_ENDINGS}; of images {', '.join(sorted(ENDINGS))}"
        raise ValueError(f"{path}: no data files and no images in it; known endings: {known}.")
    named = [(_split_named(file.name) or _split_named(file.parent.name), file) for file in files]
    if not any(split for split, _ in named):
        return [("train", file) for file in files]
    nameless = [str(file) for split, file in named if split is None]
    if nameless:
        raise ValueError(
            f"{path}: some files name their split (train…, validation…, test…) and these do not: "
            f"{', '.join(nameless)}. Name them so too, or move them away."
        )
    return sorted(((str(split), file) for split, file in named), key=lambda p: SPLITS.index(p[0]))


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
    name = str(data.dataset)
    found = hub_splits(
        name,
        data.subset,
        data.revision,
        Dialect.of(data.csv),
        lambda splits: split_choice(data, splits).values(),
    )
    choice = split_choice(data, found)
    if not choice:
        raise ValueError(
            f"{name}: its splits are {', '.join(found)}, and none is named train, validation or "
            "test: name them by data.splits: {train: NAME}."
        )
    if problem := unread_splits(data, found):
        logger.log(logging.INFO if data.splits else logging.WARNING, "%s", problem)
    return [
        Source(
            split,
            part.name,
            f"{name}/{part.name}",
            part.rows,
            part.class_names,
            image_folders=hub_image_folders(name),
        )
        for split, theirs in choice.items()
        for part in found[theirs]
    ]


def _labelled(data: DataSection, sources: list[Source]) -> list[Source]:
    """Leave out evaluation splits whose labels are all -1 or null, as the hub's hidden ones are."""
    names = label_columns(data)
    kept = []
    for split in dict.fromkeys(source.split for source in sources):
        of_split = [source for source in sources if source.split == split]
        if split != "train" and all(_has_no_label(one, names) for one in of_split):
            logger.warning(
                "%s: split '%s' is left out: all its labels are -1 or null, so there is "
                "nothing to compare with; data.splits: {%s: none} removes this warning",
                data.dataset,
                split,
                split,
            )
            continue
        kept += of_split
    return kept


def label_columns(data: DataSection) -> set[str]:
    """Return the columns that may hold a row's label, or the text to learn; none of plain texts."""
    if data.text_key is not None:
        return set()
    if data.target_key != DataSection.model_fields["target_key"].default:
        return {data.target_key}
    return {data.target_key, data.columns.get("label", "label")}


def is_hidden_label(value: Any) -> bool:
    """Tell whether a label is one that the authors of a dataset keep to themselves."""
    return value is None or str(value) in ("-1", "-1.0")  # texts as well: CSV has no numbers


def _has_no_label(source: Source, names: Collection[str]) -> bool:
    """Whether no row has a label; reads no further than the first that has one."""
    is_empty = True
    for row in source.rows():
        is_empty = False
        if isinstance(row, BadRow):
            return False
        labels = [row.fields[name] for name in names if name in row.fields]
        if not labels or not all(map(is_hidden_label, labels)):
            return False
    return not is_empty
