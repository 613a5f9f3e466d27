"""Query paths that users wrote, without the exceptions that `pathlib` raises for invalid ones.

For a name that is too long, one with a NUL, or the home of an unknown user there is no file;
the caller reports it, with the place where the path was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import overload


class PathIn:
    """An attribute of a directory's class: the path of this name in the directory.

    Args:
        name: of the file or the folder.
        of: the owner's attribute with the directory that the name is in.
    """

    def __init__(self, name: str, *, of: str = "path") -> None:
        self._name, self._of = name, of

    @overload
    def __get__(self, owner: None, kind: type) -> PathIn: ...

    @overload
    def __get__(self, owner: object, kind: type) -> Path: ...

    def __get__(self, owner: object, kind: type) -> Path | PathIn:
        if owner is None:  # the class's attribute
            return self
        path: Path = getattr(owner, self._of) / self._name
        return path


def expanded(text: str | os.PathLike[str]) -> Path:
    """Return the path with `~` and `~user` replaced; that of an unknown user as it stands."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file or a folder."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder."""
    return os.path.isdir(path)  # noqa: PTH112


def files_below(folder: str | os.PathLike[str]) -> list[Path]:
    """Return all files below a folder, those behind links to other folders too, sorted.

    Each real folder counts once: one below `folder` by its own path, not by links to it.
    """
    root = os.path.join(os.path.realpath(folder), "")
    return sorted(map(Path, _files_below(os.fspath(folder), root, set())))


def _files_below(folder: str, root: str, seen: set[str]) -> Iterator[str]:
    """Yield a folder's files, but for a folder that was seen or cannot be read.

    Args:
        root: the real path of the folder where the search began, ending in a slash.
        seen: the real paths of the folders until now.
    """
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError:
        return
    for entry in entries:
        if entry.is_file(follow_symlinks=False):
            yield entry.path
        elif is_folder(entry.path):
            is_inside = os.path.realpath(entry.path).startswith(root)
            if not (entry.is_symlink() and is_inside):
                yield from _files_below(entry.path, root, seen)
        elif is_file(entry.path):
            yield entry.path
