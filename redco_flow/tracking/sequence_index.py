"""Sequence numbers of many records, remembered, so that the newest are found without reading all.

The records stay the truth: a number counts as long as its file has the same time of change, size
and inode. The index, `cache/sequences/<folder>.json`, can be deleted at any time; a damaged one is
forgotten, one that cannot be written costs reading the records again. Writers replace it whole by
what they found, so that several processes need no lock.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from redco_flow.records import write_text
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace

# A file changed twice within one tick of its file system's clock (2 s on some) looks unchanged.
_MIN_AGE_NANOSECONDS = 2_000_000_000
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# Reading so few records takes less time than writing an index of many.
_NUM_WORTH_WRITING = 64

# Time of change in nanoseconds, size, inode, sequence number.
_Entry = tuple[int, int, int, int]


def read_sequences(
    workspace: Workspace,
    folder: Path,
    record: str,
    read: Callable[[str], int | None],
    *,
    now: Callable[[], int] = time.time_ns,
) -> dict[str, int]:
    """Return the sequence number of each record `<folder>/<name>/<record>` by name.

    Args:
        workspace: whose cache/ remembers.
        folder: below the workspace's root; names with a leading dot are still being made.
        record: the file's name.
        read: the number in the record of this name; -1 where it cannot be known, None where there
            is no record.
        now: nanoseconds since 1970, by the file system's clock.
    """
    path = workspace.cache / "sequences" / f"{folder.relative_to(workspace.root)}.json"
    known = unless_damaged(lambda: find_record(path, dict[str, _Entry])) or {}
    entries: dict[str, _Entry] = {}
    found: dict[str, int] = {}
    num_read = 0
    newest = now() - _MIN_AGE_NANOSECONDS
    for name, identity in _identities(folder, record):
        entry = known.get(name)
        if entry is None or entry[:3] != identity:
            num_read += 1
            sequence = read(name)
            if sequence is None:
                continue
            found[name] = sequence
            if identity is None or sequence < 0 or identity[0] > newest:
                continue
            entry = (*identity, sequence)
        entries[name] = entry
        found[name] = entry[3]
    if num_read > _NUM_WORTH_WRITING and len(entries) > _NUM_WORTH_WRITING:
        _remember(path, entries)
    return found


def _identities(folder: Path, record: str) -> Iterator[tuple[str, tuple[int, int, int] | None]]:
    """Each name in the folder with its record's time of change, size and inode."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        for name in os.listdir(opened):
            if name[0] == ".":
                continue
            try:
                # Of tens of thousands, a path below an open folder is looked up faster.
                status = os.stat(f"{name}/{record}", dir_fd=opened)
            except OSError:
                yield name, None
            else:
                yield name, (status.st_mtime_ns, status.st_size, status.st_ino)
    finally:
        os.close(opened)


def _remember(path: Path, entries: dict[str, _Entry]) -> None:
    """Replace the index, if this user may; a user who may not, or has no space, reads again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(entries, separators=(",", ":")))
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
