"""Locks on files, and the lease that says which process drives a run.

A lease, lease.json in the run's directory, ends when it is released or when its holder's process is
gone. That is decided by the process's start counted from boot (`process_identity.py`), never by the
time of day.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from redco_flow.errors import UsageError
from redco_flow.records import write_json
from redco_flow.tracking.file_lock import HeldLock, LockRequest
from redco_flow.tracking.process_identity import Clock, ProcessIdentity, ProcessRecord, utc_now
from redco_flow.tracking.typed_records import find_record


@contextmanager
def exclusive(path: Path) -> Iterator[HeldLock]:
    """Hold the lock on `path` (made if missing) inside the `with`.

    Raises:
        OSError: `path` is a link, cannot be written, or can be locked in no way; names it.
    """
    request = LockRequest(path)
    while (held := request.try_once(block=True)) is None:
        time.sleep(_SECONDS_BETWEEN_TRIES)
    try:
        yield held
    finally:
        held.release()


def is_locked(path: Path, request: LockRequest | None = None) -> bool:
    """Say whether a process holds the lock on `path` now.

    Args:
        request: of this lock; one that is kept notices a holder whose host is gone.
    """
    if not os.path.lexists(path):
        return False
    lock = (request or LockRequest(path)).try_once()
    if lock is not None:
        lock.release()
    return lock is None


_SECONDS_BETWEEN_TRIES = 0.05
_REMEDY = "If no process drives this run, delete the file."


class LeaseRecord(ProcessRecord, total=False):
    """lease.json."""

    acquired_at: str


@dataclass(frozen=True)
class Lease:
    """A lease that is held; release it, or use it in a `with`.

    Args:
        path: lease.json.
        holder: the process that holds it.
        acquired_at: when, for people.
        taken_over_from: the dead holder before it, if there was one.
    """

    path: Path
    holder: ProcessIdentity
    acquired_at: str
    taken_over_from: ProcessIdentity | None = None

    def release(self) -> None:
        """Give the lease back; nothing happens if it is no longer ours."""
        with exclusive(_lock(self.path)):
            present = _read(self.path)
            if present is not None and present.holder == self.holder:
                self.path.unlink()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def acquire(
    run_directory: str | os.PathLike[str],
    holder: ProcessIdentity | None = None,
    *,
    clock: Clock = utc_now,
) -> Lease:
    """Take the run's lease; take it over from a holder that runs no more.

    Args:
        run_directory: a `RunDirectory` or its path.
        holder: whose lease it will be; the calling process.
        clock: the time of day, for people.

    Raises:
        UsageError: it is held (names pid, host and time).
        DamagedRecord: lease.json is damaged.
        OSError: the directory cannot be written; names the path.
    """
    path = Path(run_directory) / "lease.json"
    lease = Lease(path, holder or ProcessIdentity.current(), clock())
    with exclusive(_lock(path)) as held:
        present = _read(path)
        if present is not None:
            _refuse_if_alive(present)
            lease = Lease(path, lease.holder, lease.acquired_at, present.holder)
        held.check()
        write_json(path, {**lease.holder.to_json(), "acquired_at": lease.acquired_at})
    return lease


def find_holder(run_directory: str | os.PathLike[str]) -> Lease | None:
    """Return the lease that a living process holds, or None: the run has no orchestrator.

    Raises:
        DamagedRecord: lease.json is damaged.
    """
    present = _read(Path(run_directory) / "lease.json")
    return present if present is not None and present.holder.is_alive() else None


def _lock(path: Path) -> Path:
    return path.with_name(".lease.lock")


def _read(path: Path) -> Lease | None:
    record = find_record(path, LeaseRecord, remedy=_REMEDY)
    if record is None:
        return None
    return Lease(path, ProcessIdentity.from_json(record), record.get("acquired_at", "?"))


def _refuse_if_alive(present: Lease) -> None:
    holder = present.holder
    if not holder.is_alive():
        return
    elsewhere = (
        ""
        if holder.host == os.uname().nodename
        else f" It cannot be seen from this host; if it is gone for good, delete {present.path}."
    )
    raise UsageError(
        f"run {present.path.parent.name} is driven by process {holder.pid} on {holder.host} since "
        f"{present.acquired_at}. Follow it with `redco-flow attach {present.path.parent.name}` or "
        f"stop it with `redco-flow cancel {present.path.parent.name}`.{elsewhere}"
    )
