"""Expand glob patterns of data files (`logs/*.jsonl`), and name each matched file.

A pattern is replaced while the pipeline is read, so that all that comes after, the record of the
run and its fingerprints included, knows files and never a pattern.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from redco_flow.errors import Problem
from redco_flow.local_paths import exists, expanded, is_file, is_folder
from redco_flow.spec.document import Document, KeyPath, written_at
from redco_flow.spec.model import ContentOf, marked
from redco_flow.spec.names import dotted, shown_path
from redco_flow.spec.pipeline import DataSection

_SPLITS = tuple(path[0] for path, _ in marked(DataSection(), ContentOf))

_MAX_NAMES = 5000


@dataclass(frozen=True)
class Expanded:
    """A document whose data paths are files.

    Args:
        problems: patterns that match a file of another split; one that matches none stays.
        notes: which files each pattern stands for, for people.
    """

    document: Document
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def expand_patterns(document: Document) -> Expanded:
    """Replace each pattern in `data` by the files that match it now, in the order of their paths.

    Of a pattern `**` stands for any folders; a name that is a file's own is no pattern.
    """
    expanded = Expanded(document)
    for section in _data_sections(document):
        expanded = _expand_section(expanded, section)
    return expanded


def names_of(files: Sequence[str]) -> list[str]:
    """Return what the files are called below the folder that all are in: their own names mostly."""
    if not files:
        return []
    folder = os.path.commonpath([Path(file).parent for file in files])
    return [os.path.relpath(file, folder) for file in files]


def as_list(files: str | Sequence[str] | None) -> list[str]:
    """Return the files of a data path: none, the one, or those of the list."""
    if files is None:
        return []
    return [files] if isinstance(files, str) else list(files)


def _data_sections(document: Document) -> Iterator[KeyPath]:
    yield ("data",)
    stages = document.get(("stages",))
    for name in stages if isinstance(stages, dict) else ():
        yield ("stages", name, "data")


def _expand_section(expanded: Expanded, section: KeyPath) -> Expanded:
    document = expanded.document
    problems, notes = list(expanded.problems), list(expanded.notes)
    written = {split: document.get((*section, split)) for split in _SPLITS}
    found = {split: _files(value) for split, value in written.items()}
    for split, value in written.items():
        if not any(map(_is_pattern, _texts(value))):
            continue
        path = (*section, split)
        others = {file: other for other in _SPLITS if other != split for file in found[other]}
        said = ", ".join(map(str, _texts(value)))
        files = found[split]
        shared = [file for file in files if file in others]
        if shared:
            message = f"{said} matches {shared[0]}, which is of 'data.{others[shared[0]]}' too"
            message += "; write a pattern that leaves it out"
            problems.append(document.origin(path).problem(f"'{dotted(path)}': {message}"))
        if shared or not all(map(_matches, _texts(value))):
            continue
        # One file is the same data whether a pattern or its name led to it.
        value = files[0] if len(files) == 1 else files
        document = document.with_part(path, written_at(value, document.origin(path)))
        notes.append(f"'{dotted(path)}': {said} is {_listed(files)}")
    return Expanded(document, problems, notes)


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, str)]


def _files(value: Any) -> list[str]:
    """The absolute paths that a data path stands for, each once."""
    return list(dict.fromkeys(file for text in _texts(value) for file in _matches(text)))


def _is_pattern(text: str) -> bool:
    return glob.has_magic(text) and not os.path.lexists(_absolute(text))


def _matches(text: str) -> list[str]:
    """The files that match a pattern; of a name, that one, whether it is there or not."""
    path = _absolute(text)
    if not _is_pattern(text):
        return [path]
    # Path.glob takes no absolute pattern.
    found = glob.glob(path, recursive=True)  # noqa: PTH207
    return sorted(file for file in found if is_file(file))


def _absolute(text: str) -> str:
    return str(expanded(text).absolute())


def _listed(files: Sequence[str]) -> str:
    if len(files) == 1:
        return files[0]
    names = names_of(files)
    listed = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, … {names[-1]}"
    return f"{len(files)} files: {listed}"


def missing_file(file: str, what: str = "file") -> str:
    """Return that there is no such file, or none that a pattern matches, and what is near.

    Args:
        file: as the user wrote it; relative to the current directory.
        what: the noun: "file", "folder", "file or directory".
    """
    path = expanded(file).absolute()
    if is_folder(path):
        return f"{shown_path(file)} is a folder, not a {what}"
    if exists(path):
        return f"{shown_path(file)} is not a {what}"
    if glob.has_magic(file):
        return f"no file matches {shown_path(file)}"
    if variable := re.search(r"\$\{?([A-Za-z_]\w*)", file):
        hint = f"an environment variable is written ${{env:{variable[1]}}}"
        return f"there is no {what} {shown_path(file)}; {hint}"
    return f"there is no {what} {shown_path(file)}{_where(path)}"


def _where(path: Path) -> str:
    """Return the folder that was searched, and the name there that is nearest."""
    folder = next((one for one in path.parents if is_folder(one)), None)
    if folder is None or "\0" in str(path):
        return ""
    name = path.relative_to(folder).parts[0]
    searched = f" (searched in {shown_path(str(folder))})"
    if folder != path.parent:
        searched = f" ({shown_path(str(folder))} has no folder {shown_path(name)})"
    near = difflib.get_close_matches(name, _names_in(folder), n=1)
    return f"{searched}; did you mean {shown_path(near[0])}?" if near else searched


def _names_in(folder: Path) -> list[str]:
    """Return names in a folder: all, or the first thousands of them; none where it is locked."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _MAX_NAMES)]
    except OSError:
        return []
