"""Identify a process by pid, start time and boot id, because a pid alone is reused.

The start time is counted from boot, so a jump of the wall clock changes nothing. Reads /proc
and sends no signal; psutil replaces it only where there is no /proc.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_ENDED_STATES = frozenset("ZX")  # a zombie has ended; only its exit status is still there


class ProcessRecord(TypedDict):
    """A process's identity in a record."""

    pid: int
    start_time: int
    boot_id: str
    host: str
    pid_namespace: NotRequired[str]


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, on one host, since one start.

    Args:
        pid: the process id.
        start_time: clock ticks from boot to its start.
        boot_id: the kernel's id of this boot.
        host: the host's name, for people and to tell a reboot from another machine.
        pid_namespace: in which the pid is the process's, as of a container; "" where that is not
            known, as in records of earlier versions.
    """

    pid: int
    start_time: int
    boot_id: str
    host: str
    pid_namespace: str = ""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the calling process's identity."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a process of this host.

        Raises:
            ProcessLookupError: no such process, or it has ended.
        """
        start_time = _start_time(pid)
        if start_time is None:
            raise ProcessLookupError(f"no process {pid} on {_host()}")
        return cls(pid, start_time, _boot_id(), _host(), pid_namespace())

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ProcessIdentity:
        """Rebuild an identity from `to_json`'s record; further keys are ignored.

        Raises:
            ValueError: a field is missing or has another type.
        """
        try:
            return cls(
                int(record["pid"]),
                int(record["start_time"]),
                str(record["boot_id"]),
                str(record["host"]),
                str(record.get("pid_namespace", "")),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a process identity: {record!r} ({error})") from error

    def to_json(self) -> dict[str, Any]:
        """Return the identity as a JSON record."""
        return {
            "pid": self.pid,
            "start_time": self.start_time,
            "boot_id": self.boot_id,
            "host": self.host,
            "pid_namespace": self.pid_namespace,
        }

    def is_alive(self) -> bool:
        """Say whether this very process still runs.

        A process of another host cannot be seen from here and counts as alive. One in another PID
        namespace of this host, as of a container, counts as ended.
        """
        return self.is_running_here() or self.host != _host()

    def is_running_here(self) -> bool:
        """Say whether its pid is this very process here: only then may it be signalled."""
        is_here = self.boot_id == _boot_id() and self._is_in_this_namespace
        return is_here and _start_time(self.pid) == self.start_time

    def may_be_alive(self) -> bool:
        """Say as `is_alive`, except that one in another PID namespace counts as alive too."""
        is_unseen = self.boot_id == _boot_id() and not self._is_in_this_namespace
        return is_unseen or self.is_alive()

    @property
    def is_visible(self) -> bool:
        """Whether a process of this host and PID namespace would see its end."""
        return self.host == _host() and self._is_in_this_namespace

    @property
    def _is_in_this_namespace(self) -> bool:
        return self.pid_namespace in ("", pid_namespace())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _host() -> str:
    return os.uname().nodename


def pid_namespace() -> str:
    """Return the id of this process's PID namespace; "" where there are none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


@functools.cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except FileNotFoundError:
        import psutil

        return f"boot-{int(psutil.boot_time())}"


def _start_time(pid: int) -> int | None:
    """The process's start in ticks since boot; None where it does not run."""
    if not _BOOT_ID.exists():
        return _start_time_without_proc(pid)
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command, field 2, is in parentheses and may itself hold spaces and parentheses.
    state, *fields = stat[stat.rindex(")") + 1 :].split()
    return None if state in _ENDED_STATES else int(fields[18])


def _start_time_without_proc(pid: int) -> int | None:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.create_time() * 100)
    except psutil.NoSuchProcess:
        return None


Clock = Callable[[], str]


def utc_now() -> str:
    """Return the present as ISO 8601 in UTC with milliseconds, `2026-01-31T12:00:00.000+00:00`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
