"""One worker at a time in a stage's work directory, or some that share it, on whatever host.

The kernel drops the lock (flock) when its holder dies, so none is ever left behind. The lock's
file names the holder for people; only the kernel decides who holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.records import open_no_link

_SECONDS_BETWEEN_TRIES = 0.2


@dataclass
class WorkLock:
    """A held lock; held until `release` or the end of the process.

    Args:
        path: its file.
        descriptor: of the open file that the kernel's lock is on; None once it is released.
    """

    path: Path
    descriptor: int | None

    def release(self) -> None:
        """Let the next one in."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def acquire(
    path: Path,
    holder: Mapping[str, Any],
    while_waiting: Callable[[str], None],
    *,
    shared: bool = False,
) -> WorkLock:
    """Take the lock, waiting while another process holds it.

    Args:
        path: the lock's file; made if missing.
        holder: what the file shall say: run, stage, attempt, pid, host, since.
        while_waiting: called about five times a second with words on who holds it; it may
            raise to give up.
        shared: hold it together with others who share it.

    Raises:
        OSError: the file is a link, cannot be written, or its file system has no locks; names it.
    """
    descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT)
    try:
        while not _try_lock(descriptor, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            while_waiting(describe_holder(path))
            time.sleep(_SECONDS_BETWEEN_TRIES)
        text = json.dumps(dict(holder), ensure_ascii=False) + "\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    lock = WorkLock(path, descriptor)
    # A forked child (a data loader) shares the lock; it must not outlive its holder in there. Once
    # released here, the number may be another file's: the lock itself knows.
    os.register_at_fork(after_in_child=lock.release)
    return lock


def describe_holder(path: Path) -> str:
    """Say who wrote the lock's file last: "run x (stage y, attempt 1), process 5 on host z"."""
    try:
        holder = json.loads(path.read_bytes())
        return (
            f"run {holder['run']} (stage {holder['stage']}, attempt {holder['attempt']}), "
            f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        )
    except (OSError, ValueError, KeyError, TypeError):  # the holder is just writing it
        return f"another worker (see {path})"


def _try_lock(descriptor: int, path: Path, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        error.filename = str(path)
        raise
    return True
