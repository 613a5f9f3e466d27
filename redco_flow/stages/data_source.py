"""Find the raw data that a pipeline's `data` section means, split by split.

Knows files, directories, hub ids and `python:module` sources. Light at the top: `data_files` is
asked on login nodes, to digest what will be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redco_flow.spec.modules import import_named
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.row_files import READERS, FileRow, Rows, read_file

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
        place: names its rows in errors.
        rows: opens it; each call reads from the start.
    """

    split: str
    name: str
    place: str
    rows: Callable[[], Rows]


def problem_of(data: DataSection) -> str | None:
    """Say what is wrong with the section as a source of training data, or None."""
    files = [split for split in SPLITS if getattr(data, split)]
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
        return f"'data.dataset': there is no file or directory '{data.dataset}'."
    if data.dataset and data.dataset.startswith(_PYTHON):
        try:
            _python_module(data.dataset)
        except ValueError as error:
            return str(error)
    return None


def _is_missing_path(dataset: str) -> bool:
    """Whether a name that is no hub id names nothing on this machine."""
    path = Path(dataset).expanduser()
    looks_local = path.is_absolute() or dataset.startswith(".") or path.suffix.lower() in READERS
    return looks_local and not path.exists()


def data_files(data: DataSection) -> list[Path]:
    """Return every raw data file that will be read, in reading order; none for a hub dataset."""
    if data.dataset is None:
        return [Path(path) for split in SPLITS if (path := getattr(data, split))]
    if data.dataset.startswith(_PYTHON):
        return list(_python_module(data.dataset).files())
    path = Path(data.dataset).expanduser()
    return [file for _, file in _files_by_split(path)] if path.exists() else []


def files_by_split(data: DataSection) -> dict[str, list[Path]]:
    """Return the data files of each split; none for the hub's and for a module's.

    Raises:
        ValueError: a directory without data files, or whose files do not all name their split.
    """
    if data.dataset is None:
        return {split: [Path(path)] for split in SPLITS if (path := getattr(data, split))}
    path = Path(data.dataset).expanduser()
    files: dict[str, list[Path]] = {}
    for split, file in _files_by_split(path) if path.exists() else []:
        files.setdefault(split, []).append(file)
    return files


def data_identity(data: DataSection) -> dict[str, Any]:
    """Return what identifies data that is no file: what a module says of itself."""
    if data.dataset is None or not data.dataset.startswith(_PYTHON):
        return {}
    identity = getattr(_python_module(data.dataset), "identity", None)
    return {data.dataset: identity()} if identity else {}


def hub_dataset(data: DataSection) -> str | None:
    """Return the hub id of the dataset; None where the data is on this machine or a module's."""
    name = data.dataset
    if name is None or name.startswith(_PYTHON) or Path(name).expanduser().exists():
        return None
    return name


def data_modules(data: DataSection) -> list[str]:
    """Return the modules whose code makes rows."""
    is_python = data.dataset is not None and data.dataset.startswith(_PYTHON)
    return [str(data.dataset).removeprefix(_PYTHON)] if is_python else []


def open_sources(data: DataSection) -> list[Source]:
    """Return where the rows come from, train first.

    Raises:
        ValueError: a directory without data files, a module without files() and rows(), or a
            dataset that neither the hub nor its cache gives.
    """
    if data.dataset is None:
        named = [(split, Path(path)) for split in SPLITS if (path := getattr(data, split))]
        return [_file_source(split, path, path.name) for split, path in named]
    if data.dataset.startswith(_PYTHON):
        name = data.dataset.removeprefix(_PYTHON)
        return [Source("train", name.rpartition(".")[2], name, partial(_module_rows, data.dataset))]
    path = Path(data.dataset).expanduser()
    if path.exists():
        root = path if path.is_dir() else path.parent
        return [
            _file_source(split, file, str(file.relative_to(root)))
            for split, file in _files_by_split(path)
        ]
    return _hub_sources(data)


def _file_source(split: str, path: Path, name: str) -> Source:
    return Source(split, name, str(path), partial(read_file, path))


def _files_by_split(path: Path) -> list[tuple[str, Path]]:
    """A directory's data files with their splits: by the file's name, else its folder's."""
    if path.is_file():
        return [("train", path)]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in READERS and file.name not in _NOT_DATA and file.is_file()
    )
    if not files:
        raise ValueError(f"{path}: no data files in it; known endings: {', '.join(READERS)}.")
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
    for name in (file.name, file.parent.name):
        match = _SPLIT_PREFIX.match(name)
        if match:
            split = match[1].lower()
            return _SPLIT_OF.get(split, split)
    return None


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
    from redco_flow.stages.hub_dataset import open_hub_dataset

    loaded = open_hub_dataset(str(data.dataset), data.subset, data.revision)
    known = [split for split in SPLITS if split in loaded]
    if not known:
        raise ValueError(
            f"{data.dataset}: its splits are {', '.join(map(str, loaded))}; need at least 'train'."
        )
    return [
        Source(split, split, f"{data.dataset}/{split}", partial(_hub_rows, loaded[split]))
        for split in known
    ]


def _hub_rows(split: Any) -> Iterator[FileRow]:
    line = 0
    for batch in split.iter(batch_size=_HUB_BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            line += 1
            yield FileRow(line, dict(zip(batch, values, strict=True)))
