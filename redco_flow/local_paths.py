"""Questions about paths that people wrote, for which `pathlib` raises where the answer is no.

A name that is longer than a file's may be, a NUL in it, a home directory of nobody: there is no
such file, and whoever asked says so in words, with the place where it was written.
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
