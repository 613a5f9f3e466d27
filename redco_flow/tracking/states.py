"""The states of runs, stages and jobs, and the causes of a job's end.

Both are the strings that stand in the records.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a run, a stage or a sweep's trial.

    Runs have PENDING, RUNNING and the ends COMPLETED, FAILED and CANCELLED; stages WAITING (for a
    cluster, a lock or another run) and SKIPPED (an upstream stage did not complete) too. Nothing
    writes INTERRUPTED: it is what a run is shown as whose orchestrating process is gone. DETACHED
    is the end of that process while its jobs run on.
    """

    PENDING = "pending"
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"
    DETACHED = "detached"


class Cause(StrEnum):
    """Why a job, or one of its ranks, ended.

    LOST: no process that could say so saw the end. NEVER_SUBMITTED: a lost job that no cluster ever
    got, so that submitting it again repeats nothing. TERMINATED, of a rank only: it got SIGTERM,
    from the cluster for reasons of its own or because another rank failed.
    """

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAILURE = "node_failure"
    LOST = "lost"
    NEVER_SUBMITTED = "never_submitted"
    TERMINATED = "terminated"

    @property
    def is_failure(self) -> bool:
        """Whether a rank that ends so ends the other ranks of its job too."""
        return self in (Cause.FAILED, Cause.OUT_OF_MEMORY, Cause.STALLED, Cause.LOST)

    @property
    def is_unobserved(self) -> bool:
        """Whether nothing saw the job's end: it is tried again, at no budget's cost."""
        return self in (Cause.LOST, Cause.NEVER_SUBMITTED)

    @property
    def is_taken_back(self) -> bool:
        """Whether the cluster took the hosts back, after which it starts the job again."""
        return self in (Cause.TERMINATED, Cause.PREEMPTED, Cause.NODE_FAILURE)
