"""Find a job's processes on this machine, whichever namespace they live in."""

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

from redco_flow.launch.processes import ATTEMPT_VARIABLE


def processes_of(attempt, program=""):
    """Process id by (rank, pid order) of everything that runs for an attempt."""
    mark = f"{ATTEMPT_VARIABLE}={attempt.path}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in environment and program in command and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def worker_of(attempt, rank=0):
    """The process id of one rank's worker; None while there is none."""
    for pid in processes_of(attempt, "redco_flow.worker"):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"REDCO_FLOW_RANK={rank}".encode() in environment:
            return pid
    return None


@contextmanager
def held(attempt, num_ranks=1):
    """Stop an attempt's workers meanwhile: however busy the machine is, they get no further."""
    workers = [worker_of(attempt, rank) for rank in range(num_ranks)]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield workers
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def phase_of(attempt):
    """What the stage says it does."""
    return (attempt.read_progress() or {}).get("phase")
