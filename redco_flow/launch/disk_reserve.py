"""Keep a little room on the attempt's disk, so that "disk full" can still be written down.

One reserve for each of the two last records: the worker's error.json, the supervisor's exit.json.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from redco_flow.errors import WorkspaceError
from redco_flow.records import existing_parent, mount_of, open_no_link

ERROR = ".reserve-for-error.tmp"
EXIT = ".reserve-for-exit.tmp"
_BYTES = 1 << 16
_BYTES_OF_A_RUN = 1 << 18  # its records, before a stage has written anything


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


def free(directory: Path) -> None:
    """Free both, of an ended job: a supervisor that was killed did not."""
    for name in (ERROR, EXIT):
        give_back(directory, name)


def full_disks(*directories: Path) -> list[Path]:
    """Return those directories, and the directory for temporary files, whose disks are full."""
    full = []
    for directory in (*directories, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            usage = os.statvfs(directory)
            if usage.f_blocks and usage.f_bavail * usage.f_frsize < _BYTES:
                full.append(directory)
    return full


def refuse_full_disk(directory: Path) -> None:
    """Raise where the records of a run do not fit: started there, it ends without a word.

    Raises:
        WorkspaceError: names the directory, what is free and what is needed.
    """
    if problem := full_disk(directory):
        raise WorkspaceError(f"{problem}. Free some space, and try again.")


def full_disk(directory: Path) -> str:
    """Return that the disk of a directory is full, and how many bytes are free; else nothing."""
    existing = existing_parent(directory)
    try:
        usage = os.statvfs(existing)
    except OSError:
        return ""  # what is then written there fails with a better reason
    if not usage.f_blocks:
        return ""  # a file system that does not report its size, as some in user space
    free = usage.f_bavail * usage.f_frsize
    if usage.f_files and not usage.f_favail:
        return f"the disk of {directory}, mounted at {mount_of(existing)}, has no inode left"
    if free >= _BYTES_OF_A_RUN:
        return ""
    return (
        f"the disk of {directory} is full: {free:,} bytes are free, and the records of a run need "
        f"{_BYTES_OF_A_RUN:,} (mounted at {mount_of(existing)})"
    )
