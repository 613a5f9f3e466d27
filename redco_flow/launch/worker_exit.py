"""Classify a worker's exit as an exit record: cause, message, and advice for the user.

Exit codes of a worker: 0 with result.json, 1 failed with error.json, 75 stopped as asked.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from redco_flow.tracking.attempt import AttemptDirectory, Cause, ErrorRecord, ExitRecord

_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)

KillScope = Literal["none", "cgroup", "host"]
"""Where the killer is known to have struck: in the process's own cgroup, or on its host."""


@dataclass(frozen=True)
class OomCounters:
    """The files that count kills, with their counts when the job began.

    Args:
        scope: whose kills they count.
    """

    scope: KillScope
    counts: dict[Path, int]

    @classmethod
    def of_process(cls, pid: int, root: Path = Path("/")) -> OomCounters:
        """Read the counters that a kill of process `pid` would raise, the nearest there are.

        Args:
            root: of the file system that has proc/ and sys/.
        """
        if own := _read(_cgroup_counters(pid, root)):
            return cls("cgroup", own)
        return cls("host", _read([root / "proc/vmstat"]))

    def growth(self) -> KillScope:
        """Say where the killer struck since."""
        now = _read(self.counts)
        has_grown = any(now.get(file, 0) > count for file, count in self.counts.items())
        return self.scope if has_grown else "none"


def host_memory_bytes() -> int:
    """Return the memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_counters(pid: int, root: Path) -> Iterator[Path]:
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return
    groups = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"


def _read(files: Iterable[Path]) -> dict[Path, int]:
    """The counts of those files that can be read and have one."""
    counts: dict[Path, int] = {}
    for file in files:
        try:
            match = _OOM_KILLS.search(file.read_bytes())
        except OSError:
            continue
        if match is not None:
            counts[file] = int(match.group(1))
    return counts


STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL: try again, it will go on where it stopped

_MEMORY_ADVICE = (
    "Use a smaller per-device batch or shorter sequences, split the model over more devices "
    "(num_model_shards), or take a machine with more memory."
)
_DEVICE_MEMORY_ADVICE = (
    "A training takes less of a device's memory with a lower per_device_batch_size (its steps stay "
    "the same), model.config.remat: full or auto, num_mlp_chunks, num_loss_chunks, offloaded "
    "activations, lora, or the model split over more devices (num_model_shards)."
)
_DEVICE_MEMORY_MARKS = ("RESOURCE_EXHAUSTED", "Out of memory allocating", "CUDA out of memory")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# In the system's words too: not every library passes the number on.
_DISK_MARKS = tuple(
    mark for number in _NO_SPACE for mark in (f"[Errno {number}]", os.strerror(number))
)


@dataclass(frozen=True)
class WorkerExit:
    """The observations of a supervisor at its worker's end.

    Args:
        wait_status: as `os.wait4` returned it.
        stop_cause: why the supervisor stopped the worker, if it did.
        stop_reason: why, in words.
        oom_kill: where the kernel's out-of-memory killer struck during the job.
        peak_memory_bytes: the worker's largest resident size.
        host_memory_bytes: of the machine; 0 where it was not asked for.
        last_output: the end of its output.
    """

    wait_status: int
    stop_cause: Cause | None = None
    stop_reason: str = ""
    oom_kill: KillScope = "none"
    peak_memory_bytes: int = 0
    host_memory_bytes: int = 0
    last_output: bytes = b""

    @property
    def signal(self) -> int | None:
        """The signal that killed the worker."""
        return os.WTERMSIG(self.wait_status) if os.WIFSIGNALED(self.wait_status) else None

    @property
    def exit_code(self) -> int | None:
        """The code it exited with."""
        return os.WEXITSTATUS(self.wait_status) if os.WIFEXITED(self.wait_status) else None


def exit_record(seen: WorkerExit, attempt: AttemptDirectory, ended_at: str) -> ExitRecord:
    """Return what exit.json holds of a job with this one worker."""
    cause, message = explain_exit(seen, attempt)
    return ExitRecord(
        exit_code=seen.exit_code,
        signal=seen.signal,
        cause=cause,
        message=message,
        peak_memory_bytes=seen.peak_memory_bytes,
        ended_at=ended_at,
    )


def explain_exit(seen: WorkerExit, attempt: AttemptDirectory) -> tuple[Cause, str]:
    """Return the cause and a message for people."""
    if seen.exit_code == 0 and attempt.result_path.exists():
        return Cause.COMPLETED, "the result is published."
    if seen.stop_cause is not None:
        return seen.stop_cause, seen.stop_reason
    if seen.signal is not None:
        return _explain_signal(seen)
    if seen.exit_code == 0:
        return Cause.FAILED, "the worker ended with code 0 but wrote no result; see the log."
    error = attempt.read_error()
    if seen.exit_code == STOPPED_EXIT_CODE:
        reason = error["message"] if error else "it was asked to"
        return Cause.CANCELLED, f"the worker stopped early: {reason}"
    if not error:
        words = map(os.strerror, _NO_SPACE)
        said = next((one for one in words if one.encode() in seen.last_output), "")
        why = f", and its output says '{said}'" if said else ""
        return Cause.FAILED, (
            f"the worker exited with code {seen.exit_code} and left no error record{why}; see the "
            f"end of the log. {_advise('', said)[1]}"
        ).rstrip()
    return explain_error(error)


def explain_error(error: ErrorRecord) -> tuple[Cause, str]:
    """Return the cause and a message, with advice where there is some, of a stage's error."""
    cause, advice = _advise(error["type"], error["message"])
    return cause, f"{error['type']}: {error['message']} {advice}".rstrip()


def _advise(error_type: str, message: str) -> tuple[Cause, str]:
    # First: a checkpoint's store says RESOURCE_EXHAUSTED of a full disk.
    if any(mark in message for mark in _DISK_MARKS):
        return Cause.FAILED, "Free space on that disk, or choose another workspace."
    if any(mark in message for mark in _DEVICE_MEMORY_MARKS):
        return Cause.OUT_OF_MEMORY, _DEVICE_MEMORY_ADVICE
    if error_type.endswith("MemoryError") or f"[Errno {errno.ENOMEM}]" in message:
        return Cause.OUT_OF_MEMORY, _MEMORY_ADVICE
    if f"[Errno {errno.EMFILE}]" in message:
        return Cause.FAILED, "Raise the limit of open files: ulimit -n 65536."
    return Cause.FAILED, ""


def _explain_signal(seen: WorkerExit) -> tuple[Cause, str]:
    assert seen.signal is not None
    killed = f"the worker was killed by {_signal_name(seen.signal)} (signal {seen.signal})"
    if seen.signal == signal.SIGKILL:
        return _explain_kill(killed, seen)
    if seen.signal == signal.SIGABRT and b"bad_alloc" in seen.last_output:
        peak = f"its peak memory was {_gib(seen.peak_memory_bytes)}"
        return Cause.OUT_OF_MEMORY, f"{killed}: an allocation failed; {peak}. {_MEMORY_ADVICE}"
    if seen.signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return Cause.CANCELLED, f"{killed}, not sent by redco-flow."
    return Cause.FAILED, f"{killed}; see the end of the log."


def _explain_kill(killed: str, seen: WorkerExit) -> tuple[Cause, str]:
    """Say who sent a SIGKILL that was not ours: only what can be known counts as memory."""
    peak = f"its peak memory was {_gib(seen.peak_memory_bytes)}"
    if seen.oom_kill == "cgroup":
        return Cause.OUT_OF_MEMORY, (
            f"{killed} by the kernel's out-of-memory killer; {peak}. {_MEMORY_ADVICE}"
        )
    if seen.oom_kill == "host" and 0 < seen.host_memory_bytes < 2 * seen.peak_memory_bytes:
        # The killer takes the largest process, and beside this one there was room for none larger.
        return Cause.OUT_OF_MEMORY, (
            f"{killed} by the kernel's out-of-memory killer, which struck on this host meanwhile; "
            f"{peak} of the host's {_gib(seen.host_memory_bytes)}. {_MEMORY_ADVICE}"
        )
    if seen.oom_kill == "host":
        return Cause.FAILED, (
            f"{killed}, not by redco-flow: it may have run out of memory. The kernel's "
            f"out-of-memory killer struck on this host meanwhile; which process it took cannot be "
            f"told from here (see `dmesg`); {peak} of the host's "
            f"{_gib(seen.host_memory_bytes)}. If it was memory: {_MEMORY_ADVICE}"
        )
    return Cause.FAILED, (
        f"{killed}, not by redco-flow: by a kill -9 or by an out-of-memory killer "
        f"that left no trace here (see `dmesg`); {peak}. If it was memory: {_MEMORY_ADVICE}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return "a signal"
