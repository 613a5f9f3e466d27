"""Query paths that users wrote, without the exceptions that `pathlib` raises for invalid ones.

For a name that is too long, one with a NUL, or the home of an unknown user there is no file;
the caller reports it, with the place where the path was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


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
    """Return all files below a folder, those behind links to other folders too, sorted."""
    return sorted(map(Path, _files_below(os.fspath(folder), frozenset())))


def _files_below(folder: str, above: frozenset[str]) -> Iterator[str]:
    """Yield files, but not again those of a folder that a link leads back to, or of a locked one.

    Args:
        above: the real paths of the folders on the way.
    """
    real = os.path.realpath(folder)
    try:
        entries = list(os.scandir(folder)) if real not in above else []
    except PermissionError:
        return
    for entry in entries:
        if entry.is_dir():
            yield from _files_below(entry.path, above | {real})
        elif entry.is_file():
            yield entry.path
