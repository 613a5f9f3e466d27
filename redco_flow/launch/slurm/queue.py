"""What Slurm says of all our jobs, asked for seldom: one request for all of them.

A look never waits for a younger answer than there is, except for the one thread that asks.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from redco_flow.errors import ClusterUnreachable, StageFailed
from redco_flow.launch.slurm import commands as slurm_commands
from redco_flow.launch.slurm.commands import JobEntry

SECONDS_BETWEEN_REQUESTS = 10.0
SECONDS_BETWEEN_URGENT_REQUESTS = 1.0
_MAX_SECONDS_BETWEEN_REQUESTS = 120.0
_SECONDS_WITHOUT_ACCOUNTING = 600.0

Clock = Callable[[], float]
ListJobs = Callable[[], dict[str, JobEntry]]
FindAccounted = Callable[[Iterable[str]], dict[str, JobEntry]]


@dataclass(frozen=True)
class QueueView:
    """One answer of Slurm's.

    Args:
        entries: every job that it knows, by id.
        asked_at: when, on the queue's clock; minus infinity where it never answered.
        problem: why the last request after this answer failed; "" where it did not.
    """

    entries: Mapping[str, JobEntry] = field(default_factory=dict)
    asked_at: float = float("-inf")
    problem: str = ""


class SlurmQueue:
    """Slurm's answers, shared by every thread of a process.

    Args:
        list_jobs: asks for all jobs.
        find_accounted: asks the accounting for some; raises where there is none.
        clock: seconds.
    """

    def __init__(
        self,
        list_jobs: ListJobs,
        find_accounted: FindAccounted,
        clock: Clock = time.monotonic,
    ) -> None:
        self.clock = clock
        self._list_jobs = list_jobs
        self._find_accounted = find_accounted
        self._asking = threading.Lock()
        self._view = QueueView()
        self._tried_at = float("-inf")
        self._num_failures = 0
        self._accounted: dict[str, JobEntry] = {}
        self._no_accounting_until = float("-inf")
        self._accounting_asked_at = float("-inf")

    def look(self, *, urgent: bool = False) -> QueueView:
        """Return the newest answer; ask anew if it is old and no other thread is asking.

        Args:
            urgent: something has happened that Slurm must know more of by now.
        """
        if self._is_due(urgent=urgent) and self._asking.acquire(blocking=False):
            try:
                if self._is_due(urgent=urgent):
                    self._ask()
            finally:
                self._asking.release()
        return self._view

    def accounted(self, job_id: str) -> JobEntry | None:
        """Return what the accounting says of a job; None where it says nothing, or is not there."""
        known = self._accounted.get(job_id)
        now = self.clock()
        is_due = now - self._accounting_asked_at >= SECONDS_BETWEEN_REQUESTS
        if known is None and is_due and now >= self._no_accounting_until:
            self._accounting_asked_at = now
            try:
                self._accounted |= self._find_accounted([job_id])
            except (ClusterUnreachable, StageFailed):
                self._no_accounting_until = now + _SECONDS_WITHOUT_ACCOUNTING
        return self._accounted.get(job_id)

    def _is_due(self, *, urgent: bool) -> bool:
        wait = SECONDS_BETWEEN_URGENT_REQUESTS if urgent else SECONDS_BETWEEN_REQUESTS
        if self._num_failures:
            wait = SECONDS_BETWEEN_REQUESTS * 2 ** min(self._num_failures - 1, 8)
        return self.clock() - self._tried_at >= min(wait, _MAX_SECONDS_BETWEEN_REQUESTS)

    def _ask(self) -> None:
        self._tried_at = asked_at = self.clock()
        try:
            entries = self._list_jobs()
        except (ClusterUnreachable, StageFailed) as error:
            self._num_failures += 1
            self._view = QueueView(self._view.entries, self._view.asked_at, str(error))
        else:
            self._num_failures = 0
            self._view = QueueView(entries, asked_at)


@functools.lru_cache
def shared_queue(cluster: str) -> SlurmQueue:
    """Return the one queue of this process for a cluster: all jobs share its requests.

    Args:
        cluster: $SLURM_CONF, or "" for the machine's own.
    """
    environment = {**os.environ, **({"SLURM_CONF": cluster} if cluster else {})}
    return SlurmQueue(
        lambda: slurm_commands.list_jobs(environment),
        lambda job_ids: slurm_commands.find_accounted(job_ids, environment),
    )
