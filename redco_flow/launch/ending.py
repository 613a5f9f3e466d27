"""Say in one record how a job ended and why, with advice for the person who reads it.

Pure apart from reading the worker's own records in the attempt's directory. Exit codes of a
worker: 0 with result.json, 1 failed with error.json, 75 stopped as asked.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from typing import Any

from redco_flow.launch.memory_pressure import KillScope
from redco_flow.tracking.attempt import AttemptDirectory

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL: try again, it will go on where it stopped

_MEMORY_ADVICE = (
    "Use a smaller per-device batch or shorter sequences, split the model over more devices "
    "(num_model_shards), or take a machine with more memory."
)
_MEMORY_MARKS = (
    "RESOURCE_EXHAUSTED",
    "Out of memory allocating",
    "CUDA out of memory",
    f"[Errno {errno.ENOMEM}]",
)
# In the system's words too: not every library passes the number on.
_DISK_MARKS = tuple(
    mark
    for number in (errno.ENOSPC, errno.EDQUOT)
    for mark in (f"[Errno {number}]", os.strerror(number))
)


@dataclass(frozen=True)
class Ending:
    """What the supervisor saw.

    Args:
        wait_status: as `os.wait4` returned it; None where no worker was started.
        stop_cause: "cancelled" or "stalled" if the supervisor stopped the worker.
        stop_reason: why, in words.
        oom_kill: where the kernel's out-of-memory killer struck during the job.
        peak_memory_bytes: the worker's largest resident size.
        host_memory_bytes: of the machine; 0 where nobody asked.
        last_output: the end of its output.
    """

    wait_status: int
    stop_cause: str | None = None
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


def judge(ending: Ending, attempt: AttemptDirectory) -> tuple[str, str]:
    """Return the cause ("completed", "failed", ...) and a message for people."""
    if ending.exit_code == 0 and attempt.result_path.exists():
        return "completed", "the result is published."
    if ending.stop_cause is not None:
        return ending.stop_cause, ending.stop_reason
    if ending.signal is not None:
        return _judge_signal(ending)
    if ending.exit_code == 0:
        return "failed", "the worker ended with code 0 but wrote no result; see the log."
    error = attempt.read_error() or {}
    if ending.exit_code == STOPPED_EXIT_CODE:
        reason = error.get("message", "it was asked to")
        return "cancelled", f"the worker stopped early: {reason}"
    if not error:
        return "failed", (
            f"the worker exited with code {ending.exit_code} and left no error record; see the "
            f"end of the log."
        )
    cause, advice = explain(str(error.get("type")), str(error.get("message")))
    return cause, _join(f"{error.get('type')}: {error.get('message')}", advice)


def explain(error_type: str, message: str) -> tuple[str, str]:
    """Return the cause and the advice, possibly none, for an error of a stage."""
    # First: a checkpoint's store says RESOURCE_EXHAUSTED of a full disk.
    if any(mark in message for mark in _DISK_MARKS):
        return "failed", "Free space on that disk, or choose another workspace."
    if error_type.endswith("MemoryError") or any(mark in message for mark in _MEMORY_MARKS):
        return "out_of_memory", _MEMORY_ADVICE
    if f"[Errno {errno.EMFILE}]" in message:
        return "failed", "Raise the limit of open files: ulimit -n 65536."
    return "failed", ""


def exit_record(ending: Ending, attempt: AttemptDirectory, ended_at: str) -> dict[str, Any]:
    """Return what exit.json holds."""
    cause, message = judge(ending, attempt)
    return {
        "exit_code": ending.exit_code,
        "signal": ending.signal,
        "cause": cause,
        "message": message,
        "peak_memory_bytes": ending.peak_memory_bytes,
        "ended_at": ended_at,
    }


def failure_record(error: Exception, ended_at: str) -> dict[str, Any]:
    """Return what exit.json holds when the supervisor itself failed."""
    return {
        "exit_code": None,
        "signal": None,
        "cause": "lost",
        "message": f"the supervisor failed: {type(error).__name__}: {error}",
        "peak_memory_bytes": 0,
        "ended_at": ended_at,
    }


def unstarted_record(why: str, ended_at: str) -> dict[str, Any]:
    """Return what exit.json holds of a job that was taken out of a queue before it began."""
    return {
        "exit_code": None,
        "signal": None,
        "cause": "cancelled",
        "message": f"it never began: {why}.",
        "peak_memory_bytes": 0,
        "ended_at": ended_at,
    }


def _judge_signal(ending: Ending) -> tuple[str, str]:
    assert ending.signal is not None
    killed = f"the worker was killed by {_signal_name(ending.signal)} (signal {ending.signal})"
    if ending.signal == signal.SIGKILL:
        return _judge_kill(killed, ending)
    if ending.signal == signal.SIGABRT and b"bad_alloc" in ending.last_output:
        peak = f"its peak memory was {_gib(ending.peak_memory_bytes)}"
        return "out_of_memory", f"{killed}: an allocation failed; {peak}. {_MEMORY_ADVICE}"
    if ending.signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return "cancelled", f"{killed}, sent by somebody else than redco-flow."
    return "failed", f"{killed}; see the end of the log."


def _judge_kill(killed: str, ending: Ending) -> tuple[str, str]:
    """Say who sent a SIGKILL that was not ours: only what can be known counts as memory."""
    peak = f"its peak memory was {_gib(ending.peak_memory_bytes)}"
    if ending.oom_kill == "cgroup":
        return "out_of_memory", (
            f"{killed} by the kernel's out-of-memory killer; {peak}. {_MEMORY_ADVICE}"
        )
    if ending.oom_kill == "host" and 0 < ending.host_memory_bytes < 2 * ending.peak_memory_bytes:
        # The killer takes the largest process, and beside this one there was room for none larger.
        return "out_of_memory", (
            f"{killed} by the kernel's out-of-memory killer, which struck on this host meanwhile; "
            f"{peak} of the host's {_gib(ending.host_memory_bytes)}. {_MEMORY_ADVICE}"
        )
    if ending.oom_kill == "host":
        return "failed", (
            f"{killed}, not by redco-flow: it may have run out of memory. The kernel's "
            f"out-of-memory killer struck on this host meanwhile; which process it took cannot be "
            f"told from here (see `dmesg`); {peak} of the host's "
            f"{_gib(ending.host_memory_bytes)}. If it was memory: {_MEMORY_ADVICE}"
        )
    return "failed", (
        f"{killed}, not by redco-flow: by somebody's kill -9 or by an out-of-memory killer "
        f"that left no trace here (see `dmesg`); {peak}. If it was memory: {_MEMORY_ADVICE}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return "a signal"


def _join(message: str, advice: str) -> str:
    return f"{message} {advice}" if advice else message
