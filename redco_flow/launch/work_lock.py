"""One worker at a time in a stage's work directory, on whatever host.

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

_SECONDS_BETWEEN_TRIES = 0.2


@dataclass(frozen=True)
class WorkLock:
    """A held lock; held until `release` or the end of the process."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Let the next one in."""
        os.close(self.descriptor)


def acquire(
    path: Path, holder: Mapping[str, Any], while_waiting: Callable[[str], None]
) -> WorkLock:
    """Take the lock, waiting for whoever holds it.

    Args:
        path: the lock's file; made if missing.
        holder: what the file shall say: run, stage, attempt, pid, host, since.
        while_waiting: called about five times a second with words on who holds it; it may
            raise to give up.

    Raises:
        OSError: the file cannot be written or its file system has no locks; names the path.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(descriptor, path):
            while_waiting(describe_holder(path))
            time.sleep(_SECONDS_BETWEEN_TRIES)
        text = json.dumps(dict(holder), ensure_ascii=False) + "\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    # A forked child (a data loader) shares the lock; it must not outlive its holder in there.
    os.register_at_fork(after_in_child=lambda: _close_quietly(descriptor))
    return WorkLock(path, descriptor)


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


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        error.filename = str(path)
        raise
    return True


def _close_quietly(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return  # the child, or the lock's holder before the fork, closed it already
