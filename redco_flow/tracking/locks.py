"""Locks on files, and the lease that says which process drives a run.

A lease, lease.json in the run's directory, ends when it is released or when its holder's process is
gone. That is decided by the process's start counted from boot (`process_identity.py`), never by the
time of day. Of a process in a cluster's job, which may be on any host, the lock on .launcher.lock
decides: the process holds it for as long as the lease.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from redco_flow.errors import UsageError
from redco_flow.records import list_directory, write_json
from redco_flow.tracking.file_lock import HeldLock, LockLost, LockRequest
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
    return (request or LockRequest(path)).is_held()


_SECONDS_BETWEEN_TRIES = 0.05
_SECONDS_BETWEEN_TRIES_OF_JOB = 0.5
_REMEDY = "If no process drives this run, delete the file."


class LeaseRecord(ProcessRecord, total=False):
    """lease.json."""

    acquired_at: str
    job: str


@dataclass(frozen=True)
class Lease:
    """A lease that is held; release it, or use it in a `with`.

    Args:
        path: lease.json.
        holder: the process that holds it.
        acquired_at: when, for people.
        taken_over_from: the dead holder before it, if there was one.
        job: the cluster's job that the process is in; "" for none.
        held: the lock of a process in a job.
    """

    path: Path
    holder: ProcessIdentity
    acquired_at: str
    taken_over_from: ProcessIdentity | None = None
    job: str = ""
    held: HeldLock | None = field(default=None, compare=False)

    @property
    def is_alive(self) -> bool:
        """Whether the holder runs; one in no job that cannot be seen from here counts as alive."""
        if not self.job:
            return self.holder.may_be_alive()
        try:
            return is_locked(_job_lock(self.path), _job_lock_request(_job_lock(self.path)))
        except OSError:  # of another user's run, where a reader can take no lock
            return True

    @property
    def unseen(self) -> str:
        """A sentence on what to do where the holder's end cannot be seen from here; else ""."""
        if self.job or self.holder.is_visible:
            return ""
        return f"It cannot be seen from here; if it is gone for good, delete {self.path}."

    def release(self) -> None:
        """Give the lease back; nothing happens if it is no longer ours."""
        with exclusive(_lock(self.path)):
            present = _read(self.path)
            if present is not None and present.holder == self.holder:
                self.path.unlink()
        if self.held is not None:
            self.held.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(
    run_directory: str | os.PathLike[str],
    holder: ProcessIdentity | None = None,
    *,
    job: str = "",
    on_lost: Callable[[LockLost], None] | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
    clock: Clock = utc_now,
) -> Lease:
    """Take the run's lease; take it over from a holder that runs no more.

    Args:
        run_directory: a `RunDirectory` or its path.
        holder: whose lease it will be; the calling process.
        job: the cluster's job that this process is in. An earlier start of this job, which the
            cluster has ended, is waited for.
        on_lost: of a process in a job: called in another thread if another process takes the lease.
        on_wait: called once if an earlier start of the job is waited for; says so.
        clock: the time of day, for people.

    Raises:
        UsageError: it is held (names pid, host and time).
        DamagedRecord: lease.json is damaged.
        OSError: the directory cannot be written; names the path.
    """
    path = Path(run_directory) / "lease.json"
    held = _hold_job_lock(path, job, on_lost, on_wait) if job else None
    lease = Lease(path, holder or ProcessIdentity.current(), clock(), job=job, held=held)
    try:
        with exclusive(_lock(path)) as lock:
            list_directory(path.parent)  # NFS may remember that there was no lease
            present = _read(path)
            if present is not None:
                if held is None or not present.job:  # else it is dead, as the lock is ours
                    _refuse_if_alive(present)
                lease = replace(lease, taken_over_from=present.holder)
            lock.check()
            record = {**lease.holder.to_json(), "acquired_at": lease.acquired_at}
            write_json(path, record | ({"job": job} if job else {}))
    except BaseException:
        if held is not None:
            held.release()
        raise
    return lease


def _hold_job_lock(
    path: Path,
    job: str,
    on_lost: Callable[[LockLost], None] | None,
    on_wait: Callable[[str], None],
) -> HeldLock:
    """Take the lock of a process in a job, once an earlier start of the job has let go of it."""
    request = LockRequest(_job_lock(path), on_lost=on_lost)
    is_waiting = False
    while (held := request.try_once()) is None:
        present = _read(path)
        if present is not None and present.job != job:
            _refuse_if_alive(present)
        if not is_waiting:
            is_waiting = True
            on_wait(f"job {job} waits until its earlier start has released {_job_lock(path)}")
        time.sleep(_SECONDS_BETWEEN_TRIES_OF_JOB)
    return held


def find_holder(run_directory: str | os.PathLike[str]) -> Lease | None:
    """Return the lease that a living process holds, or None: the run has no orchestrator.

    Raises:
        DamagedRecord: lease.json is damaged.
    """
    present = _read(Path(run_directory) / "lease.json")
    return present if present is not None and present.is_alive else None


def _lock(path: Path) -> Path:
    return path.with_name(".lease.lock")


def _job_lock(path: Path) -> Path:
    return path.with_name(".launcher.lock")


@functools.lru_cache
def _job_lock_request(path: Path) -> LockRequest:
    """One request for each lock: it notices in time that the holder's host is gone.

    Shared: the process that drives the run holds the lock alone, and readers hold it together.
    """
    return LockRequest(path, shared=True)


def _read(path: Path) -> Lease | None:
    record = find_record(path, LeaseRecord, remedy=_REMEDY)
    if record is None:
        return None
    holder, acquired_at = ProcessIdentity.from_json(record), record.get("acquired_at", "?")
    return Lease(path, holder, acquired_at, job=record.get("job", ""))


def _refuse_if_alive(present: Lease) -> None:
    holder = present.holder
    if not present.is_alive:
        return
    job = f"job {present.job}, " if present.job else ""
    raise UsageError(
        f"run {present.path.parent.name} is driven by {job}process {holder.pid} on {holder.host} "
        f"since {present.acquired_at}. Follow it with `redco-flow attach "
        f"{present.path.parent.name}` or stop it with `redco-flow cancel "
        f"{present.path.parent.name}`. {present.unseen}".rstrip()
    )
