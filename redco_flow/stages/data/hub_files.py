"""Find and download the CSV and JSON files of a hub dataset's splits, to be read like local files.

Which files are of which split is decided by the package `datasets`, from the names of the
repository's files and its README.md. Its readers are not used: they turn `NA` and `null` into
missing values, `007` into 7, and dates in JSON into numbers.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from redco_flow import hub
from redco_flow.stages.data.csv_rows import Dialect
from redco_flow.stages.data.row_files import TEXT_ENDINGS, ending_of

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
    """Return a file's path in the repository; another address as it is.

    Raises:
        HubError: it is a file of this machine.
    """
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
