"""Processes of a job: which one this is, and how they are tied together and ended.

Linux only. What ties processes together is for a single-threaded caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from redco_flow.launch.slurm.nodes import rank_by_fabric

ATTEMPT_VARIABLE = "REDCO_FLOW_ATTEMPT"  # in the environment of every process of a job

READY = b"ready"  # what a job's first process writes to `--ready-fd` once job.json is there

WARNING_SIGNAL = "URG"
"""What Slurm sends some time before the end. It reaches every process of the job, the worker's
helpers too, so it must be one that does nothing to those who do not expect it."""

START_AGAIN_EXIT_CODE = 75
"""Exit code of a process that drives a run and that its job has to start again."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SECONDS_TO_DIE = 5.0  # longer only in an uninterruptible read of a dead file system
_libc = ctypes.CDLL(None, use_errno=True)

FAULT_VARIABLE = "REDCO_FLOW_DRILL_FAULT"
FAULTS = ("preempt", "kill", "stall", "timeout")


def exit_within(seconds: float, code: int) -> None:
    """End this process with the exit code if it still lives by then: threads may not let it end."""
    late = threading.Timer(seconds, os._exit, [code])
    late.daemon = True
    late.start()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill the calling process when `parent`, which started it, dies.

    To be called in the child between fork and exec. The parent must not start children from
    short-lived threads: the signal comes when the starting *thread* ends.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(besides: Container[int] = ()) -> list[int]:
    """SIGKILL and reap every descendant of the calling process, which has adopted orphans.

    Args:
        besides: processes that are left alone.

    Returns:
        Those that did not die in time; normally none.
    """
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while _reap_ended_children():
        alive = [pid for pid in descendants(os.getpid()) if pid not in besides]
        if not alive and besides:
            return []
        if time.monotonic() > deadline:
            return alive
        for pid in alive:
            _kill(pid)
        time.sleep(0.001)  # nothing tells when the last of a whole tree is gone
    return []


def kill_processes_of(attempt: Path) -> list[int]:
    """SIGKILL this host's processes that a job of `attempt` left behind; return their ids."""
    return kill_processes_with(ATTEMPT_VARIABLE, str(attempt))


def kill_processes_with(variable: str, value: str) -> list[int]:
    """SIGKILL this host's processes that started with this variable; return their ids."""
    killed = []
    for pid in _processes_with(variable, value):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def processes_of(attempt: Path) -> Iterator[int]:
    """Yield this host's processes of a job of `attempt`, the calling one left out.

    They are known by their environment, so a reused process id is never meant.
    """
    return _processes_with(ATTEMPT_VARIABLE, str(attempt))


def _processes_with(variable: str, value: str) -> Iterator[int]:
    mark = f"{variable}={value}".encode()
    for pid in _all_processes():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid != os.getpid() and mark in variables:
                yield pid


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def _reap_ended_children() -> bool:
    """Reap what has ended; say whether there are children left."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def descendants(root: int) -> list[int]:
    """Return this host's processes below `root`, itself left out."""
    children: dict[int, list[int]] = {}
    for pid in _all_processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            parent = int(stat[stat.rindex(")") + 1 :].split()[1])
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    unseen = [root]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _kill(pid: int) -> None:
    # It may be gone, or belong to another user (setuid): the caller's deadline covers both.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


_PREFIX = "REDCO_FLOW_"
_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class RankInfo:
    """One process among those of its job.

    Args:
        rank: from 0, over all hosts.
        num_processes: of the job.
        local_rank: from 0, on this host.
        processes_per_host: on this host.
        gpus_per_host: what all processes of this host share; 0 for none.
        restart: how often the cluster has restarted this job.
        rendezvous_seconds: how long to wait for the others.
        shares_disk: 1 if all processes see the workspace, 0 if each host has its own.
        has_bound_gpus: 1 if this process sees only its own share of the host's GPUs, as Slurm binds
            tasks by --gpus-per-task or --gpu-bind; 0 if it sees those of all processes.
    """

    rank: int = 0
    num_processes: int = 1
    local_rank: int = 0
    processes_per_host: int = 1
    gpus_per_host: int = 0
    restart: int = 0
    rendezvous_seconds: int = 300
    shares_disk: int = 1
    has_bound_gpus: int = 0

    @classmethod
    def from_slurm(
        cls,
        environ: Mapping[str, str],
        *,
        gpus_per_host: int,
        rendezvous_seconds: int,
        fabrics: Sequence[str] = (),
    ) -> RankInfo:
        """Read what srun says.

        Args:
            fabrics: the nodes of each, which are to have ranks in a row.

        Raises:
            KeyError: this is no task of srun's.
        """
        num_processes = int(environ["SLURM_NTASKS"])
        # Of a job with several stages, a stage may run on fewer nodes than the job has.
        num_hosts = int(environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_NNODES"])
        processes_per_host = num_processes // num_hosts
        visible = next(filter(None, map(environ.get, _VISIBLE_GPUS)), None)
        num_visible = len(visible.split(",")) if visible else 0
        is_bound = num_visible * processes_per_host == gpus_per_host > num_visible
        return cls(
            rank=rank_by_fabric(environ, fabrics) if fabrics else int(environ["SLURM_PROCID"]),
            num_processes=num_processes,
            local_rank=int(environ["SLURM_LOCALID"]),
            processes_per_host=processes_per_host,
            gpus_per_host=gpus_per_host,
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
            rendezvous_seconds=rendezvous_seconds,
            has_bound_gpus=int(is_bound),
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RankInfo:
        """Read what the supervisor set; a process on its own where it set nothing."""
        names = [field.name for field in fields(cls)]
        given = {name: environ.get(_PREFIX + name.upper()) for name in names}
        return cls(**{name: int(value) for name, value in given.items() if value is not None})

    def to_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        names = [field.name for field in fields(self)]
        return {_PREFIX + name.upper(): str(getattr(self, name)) for name in names}

    @property
    def local_device_ids(self) -> list[int] | None:
        """The GPUs, of those it sees, that are this process's; None: all that JAX finds.

        Raises:
            ValueError: the processes cannot share them evenly.
        """
        if self.gpus_per_host == 0:
            return None
        share, rest = divmod(self.gpus_per_host, self.processes_per_host)
        if rest or not share:
            raise ValueError(
                f"{self.processes_per_host} processes per host cannot share {self.gpus_per_host} "
                f"GPUs evenly; let processes_per_host divide gpus_per_host."
            )
        first = 0 if self.has_bound_gpus else self.local_rank * share
        return list(range(first, first + share))
