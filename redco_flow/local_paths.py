"""Query paths that users wrote, without the exceptions that `pathlib` raises for invalid ones.

For a name that is too long, one with a NUL, or the home of an unknown user there is no file;
the caller reports it, with the place where the path was written.
"""

from __future__ import annotations

import os
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
