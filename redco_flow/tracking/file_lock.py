"""Locks on files, by flock or, where a file system has none that all nodes respect, by hard links.

Which of the two is recorded in a directory above the lock (`lock_mechanism.py`), so that all
processes agree. Link locks: `<lock>.holders/` has one file for each acquisition, named by its
fencing number. The next holder creates the next number with `link`, which is atomic on NFS, Lustre,
BeeGFS and GPFS and fails for all processes but one. A holder empties its file when it releases the
lock, and updates the file's time (a heartbeat) until then; a holder whose heartbeat stops is
superseded by the next number, and `check` then fails for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.records import create_beside, open_no_link, read_bytes
from redco_flow.tracking.lock_mechanism import FLOCK, IS_ABSENT, find_mechanism, switch_to_links
from redco_flow.tracking.process_identity import ProcessIdentity, pid_namespace

HOLDERS = ".holders"
"""Suffix of the directory of a link lock's holders."""

_BEATS_PER_STALENESS = 9.0
_DIGITS = 12
_MAX_SECONDS_OF_A_LOOK = 1.0  # a pause of the observer, or of the file server, is not staleness


class LockLost(RedcoFlowError):
    """Another process has taken the lock: this one's heartbeat had stopped for too long."""


class HeldLock(ABC):
    """A held lock; held until `release` or the end of the process.

    Args:
        path: the file that is locked.
        descriptor: of that file, open for reading and writing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self._is_open = True
        _held.add(self)

    def release(self) -> None:
        """Let the next process in; does nothing the second time."""
        if self._is_open:
            try:
                self._let_go()
            finally:
                self.forget()

    @abstractmethod
    def check(self) -> None:
        """Raise where another process has taken the lock; call it right before writing.

        Raises:
            LockLost: names the lock and what to do.
        """

    def forget(self) -> None:
        """Close the file: all that a forked child does, which must not keep or release the lock."""
        if self._is_open:
            self._is_open = False
            _held.discard(self)
            os.close(self.descriptor)

    @abstractmethod
    def _let_go(self) -> None: ...


_held: set[HeldLock] = set()


def release_all() -> None:
    """Release every lock of this process, before it ends by `os._exit`.

    The kernel drops flocks itself; on another host a link lock would be free once it is stale.
    """
    for lock in _held.copy():
        with contextlib.suppress(OSError):
            lock.release()


def _forget_all() -> None:
    for lock in _held.copy():
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


class _Flock(HeldLock):
    def check(self) -> None:
        """The kernel keeps it."""

    def _let_go(self) -> None:
        """Closing the file drops it."""


class LockRequest:
    """A request for one lock, which one process tries repeatedly.

    Keep it while waiting: it watches the heartbeat of a holder on another host.

    Args:
        path: the file to lock; made if missing. Its directory must exist.
        shared: hold it together with other processes that share it.
        on_lost: called in another thread if another process takes the lock from this one.
    """

    def __init__(
        self, path: Path, *, shared: bool = False, on_lost: Callable[[LockLost], None] | None = None
    ) -> None:
        self._path, self._shared, self._on_lost = path, shared, on_lost
        self._watch = _Watch()
        self._stale_seconds = 0.0

    def try_once(self, *, block: bool = False) -> HeldLock | None:
        """Return the lock, or None while another process holds it.

        Args:
            block: wait for a flock; a link lock is never waited for here.

        Raises:
            OSError: the file is a link, cannot be written, or can be locked in neither way; names
                it.
        """
        descriptor = open_no_link(self._path, os.O_RDWR | os.O_CREAT)
        held = None
        try:
            held = self._try(descriptor, block=block)
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise
        finally:
            if held is None:
                os.close(descriptor)
        return held

    def is_held(self) -> bool:
        """Whether another process holds the lock in a way that this request cannot share.

        A link lock is only read. A flock is taken for a moment: a shared one, so that several
        processes that ask do not take each other for the holder.

        Raises:
            OSError: as `try_once`.
        """
        record = find_mechanism(self._path)
        if record is None or record["mechanism"] == FLOCK:
            if (lock := self.try_once()) is not None:
                lock.release()
            return lock is None
        self._stale_seconds = record["stale_seconds"]
        try:
            present = _holders(self._folder)
        except FileNotFoundError:
            return False
        return self._is_excluded_by(self._live(present))

    def _try(self, descriptor: int, *, block: bool) -> HeldLock | None:
        record = find_mechanism(self._path)
        if record is None or record["mechanism"] == FLOCK:
            operation = fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
            try:
                fcntl.flock(descriptor, operation if block else operation | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in IS_ABSENT:
                    raise
                record = switch_to_links(self._path, error)
            else:
                return _Flock(self._path, descriptor)
        self._stale_seconds = record["stale_seconds"]
        return self._try_link(descriptor)

    def _try_link(self, descriptor: int) -> HeldLock | None:
        folder = self._folder
        folder.mkdir(exist_ok=True)
        present = _holders(folder)
        live = self._live(present)
        if self._is_excluded_by(live):
            return None
        number = max((one.number for one in present), default=0) + 1
        own = _write_holder(folder, number, shared=self._shared)
        if own is None:  # another process was faster
            return None
        # A process that was paused here may create a number that was removed long ago.
        if any(one.number > number for one in _holders(folder)):
            own.path.unlink(missing_ok=True)
            return None
        _clean(folder, own, [one for one in present if one not in live])
        return _LinkLock(self._path, descriptor, own, self._stale_seconds, self._on_lost)

    @property
    def _folder(self) -> Path:
        return self._path.with_name(f"{self._path.name}{HOLDERS}")

    def _live(self, present: Iterable[_Holder]) -> list[_Holder]:
        return [one for one in present if self._is_live(one, present)]

    def _is_excluded_by(self, live: Iterable[_Holder]) -> bool:
        return any(not (self._shared and one.shared) for one in live)

    def _is_live(self, one: _Holder, present: Iterable[_Holder]) -> bool:
        if one.is_released or one.is_superseded(present) or one.has_ended():
            return False
        return self._watch.seconds_unchanged(one) < self._stale_seconds


@dataclass(frozen=True)
class _Holder:
    """One file of `<lock>.holders/`: S (shared) or X (exclusive), and its process until release."""

    path: Path
    number: int
    content: bytes
    beat: int = 0

    @property
    def shared(self) -> bool:
        return self.content[:1] == _SHARED

    @property
    def is_released(self) -> bool:
        return len(self.content) <= 1

    def is_superseded(self, present: Iterable[_Holder]) -> bool:
        """Whether a later holder exists that it could not share the lock with."""
        later = (one for one in present if one.number > self.number)
        return any(not (self.shared and one.shared) for one in later)

    def has_ended(self) -> bool:
        """Whether its process is seen to have ended, which only its own host can see."""
        record = self._record()
        if record is None or record.get("pid_namespace") != pid_namespace():
            return False
        if record.get("user") != os.geteuid():  # hidepid hides processes of other users
            return False
        process = ProcessIdentity.from_json(record)
        # Two machines may have one name: of another boot, its heartbeat decides.
        return process.boot_id == ProcessIdentity.current().boot_id and not process.is_alive()

    def describe(self) -> str:
        record = self._record()
        return "another process" if record is None else str(ProcessIdentity.from_json(record))

    def _record(self) -> Mapping[str, Any] | None:
        try:
            record = json.loads(self.content[1:])
            ProcessIdentity.from_json(record)
        except ValueError:
            return None
        return dict(record)


_SHARED, _EXCLUSIVE = b"S", b"X"


class _Watch:
    """Measure how long each holder's heartbeat is unchanged, by this process's own clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[_Holder, float, float]] = {}

    def seconds_unchanged(self, one: _Holder) -> float:
        now = time.monotonic()
        before, unchanged, looked_at = self._seen.get(one.number, (None, 0.0, now))
        unchanged += min(now - looked_at, _MAX_SECONDS_OF_A_LOOK)
        if one != before:
            unchanged = 0.0
        self._seen[one.number] = (one, unchanged, now)
        return unchanged


class _LinkLock(HeldLock):
    def __init__(
        self,
        path: Path,
        descriptor: int,
        own: _Holder,
        stale_seconds: float,
        on_lost: Callable[[LockLost], None] | None,
    ) -> None:
        super().__init__(path, descriptor)
        self._own, self._stale_seconds, self._on_lost = own, stale_seconds, on_lost
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name=f"heartbeat of {path.name}", daemon=True).start()

    def check(self) -> None:
        try:
            present = _holders(self._own.path.parent)
        except FileNotFoundError:
            present = []
        own = next((one for one in present if one.number == self._own.number), None)
        if own is not None and own.content == self._own.content and not own.is_superseded(present):
            return
        newest = present[-1].describe() if present else "no process; its directory was removed"
        raise LockLost(
            f"{self.path}: this process held the lock, but did not run or could not write for more "
            f"than {self._stale_seconds:g} s, and lost it to {newest}. Nothing more is written "
            f"here; the result of the present holder counts. If that happens often, nodes are "
            f"suspended or the file server does not answer: look at their logs."
        )

    def _beat(self) -> None:
        while not self._ended.wait(self._stale_seconds / _BEATS_PER_STALENESS):
            try:
                self.check()
                os.utime(self._own.path)
            except LockLost as error:
                if self._on_lost is not None and not self._ended.is_set():
                    self._on_lost(error)
                return
            except OSError:  # the file server does not answer now
                continue

    def _let_go(self) -> None:
        self._ended.set()
        with contextlib.suppress(LockLost, FileNotFoundError):
            self.check()
            os.truncate(self._own.path, 1)


def _holders(folder: Path) -> list[_Holder]:
    """All holders' files, by number."""
    found = []
    for name in sorted(name for name in os.listdir(folder) if name.isdigit()):
        path = folder / name
        with contextlib.suppress(FileNotFoundError):
            content = read_bytes(path)  # opening it has NFS ask for its times, too
            found.append(_Holder(path, int(name), content, path.stat().st_mtime_ns))
    return found


def _write_holder(folder: Path, number: int, *, shared: bool) -> _Holder | None:
    """Create the file of a number for this process; None where another process has."""
    record = {
        **ProcessIdentity.current().to_json(),
        "user": os.geteuid(),
        "token": secrets.token_hex(8),
    }
    content = (_SHARED if shared else _EXCLUSIVE) + json.dumps(record).encode()
    path = folder / f"{number:0{_DIGITS}d}"
    descriptor, temporary = create_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):
        # NFS says that the name exists, too, where its first answer was lost and it asks again.
        if not _is_linked(temporary):
            return None
    finally:
        temporary.unlink(missing_ok=True)
    return _Holder(path, number, content)


def _is_linked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_nlink > 1
    return False


def _clean(folder: Path, own: _Holder, gone: Iterable[_Holder]) -> None:
    """Remove the files of earlier holders, ascending, and what killed processes left half-made.

    In this order no process ever sees a superseded holder without the one that superseded it.
    """
    for one in gone:
        one.path.unlink(missing_ok=True)
    for path in folder.glob(".*.tmp"):
        if path.name[1 : 1 + _DIGITS] <= own.path.name:
            path.unlink(missing_ok=True)
