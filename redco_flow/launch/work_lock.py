"""One worker at a time in a stage's work directory, or some that share it, on whatever host.

The lock ends with its holder (`tracking.file_lock`). The lock's file names the holder for people;
it does not decide who holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redco_flow.tracking.file_lock import HeldLock, LockLost, LockRequest

_SECONDS_BETWEEN_TRIES = 0.2


def acquire(
    path: Path,
    holder: Mapping[str, Any],
    while_waiting: Callable[[str], None],
    *,
    shared: bool = False,
    on_lost: Callable[[LockLost], None] | None = None,
) -> HeldLock:
    """Take the lock, waiting while another process holds it.

    Args:
        path: the lock's file; made if missing.
        holder: what the file shall say: run, stage, attempt, pid, host, since.
        while_waiting: called about five times a second with words on who holds it; it may
            raise to give up.
        shared: hold it together with others who share it.
        on_lost: called in another thread if another process takes the lock from this one, which
            did not run, or could not write, for too long.

    Raises:
        OSError: the file is a link, cannot be written, or can be locked in no way; names it.
    """
    request = LockRequest(path, shared=shared, on_lost=on_lost)
    while (lock := _try(request, path)) is None:
        while_waiting(describe_holder(path))
        time.sleep(_SECONDS_BETWEEN_TRIES)
    try:
        text = json.dumps(dict(holder), ensure_ascii=False) + "\n"
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, text.encode(), 0)
    except BaseException:
        lock.release()
        raise
    return lock


def _try(request: LockRequest, path: Path) -> HeldLock | None:
    """Return the lock of the file at `path`, not of one whose directory was deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = request.try_once()
        if lock is None or _is_at_path(lock):
            return lock
        lock.release()
    return None


def _is_at_path(lock: HeldLock) -> bool:
    try:
        found = os.stat(lock.path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(lock.descriptor))


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
