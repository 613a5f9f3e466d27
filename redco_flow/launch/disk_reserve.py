"""Keep a little room on the attempt's disk, so that "disk full" can still be written down.

One reserve for each of the two last records: the worker's error.json, the supervisor's exit.json.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from redco_flow.records import open_no_link

ERROR = ".reserve-for-error.tmp"
EXIT = ".reserve-for-exit.tmp"
_BYTES = 1 << 16


def take(directory: Path) -> None:
    """Reserve the room, if there is any."""
    for name in (ERROR, EXIT):
        with (
            contextlib.suppress(OSError),
            open(directory / name, "wb", opener=open_no_link) as file,
        ):
            os.posix_fallocate(file.fileno(), 0, _BYTES)


def give_back(directory: Path, name: str) -> None:
    """Free one reserve, right before the record that it was for."""
    with contextlib.suppress(OSError):
        (directory / name).unlink()


def full_disks(*directories: Path) -> list[Path]:
    """Return those directories, and the directory for temporary files, whose disks are full."""
    full = []
    for directory in (*directories, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            usage = os.statvfs(directory)
            if usage.f_bavail * usage.f_frsize < _BYTES:
                full.append(directory)
    return full
