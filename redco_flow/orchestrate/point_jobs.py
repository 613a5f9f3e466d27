"""What a sweep's process sees of one point's jobs in the queue: is it time for a driver?

A driver is a process on a login node, and following what only waits needs none. Reads the
attempts' records and what the cluster says of their jobs; starts and ends nothing.
"""

from __future__ import annotations

from redco_flow.launch.executor import CallJob, reattach
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.shared_attempt import current_attempt
from redco_flow.tracking.states import State


class PointJobs:
    """The jobs that one point's run waits for.

    Args:
        run: its jobs are in the queue, as far as they could be submitted.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._own: list[CallJob] = []
        self._shared: list[CallJob] = []
        for stage in run.read_state()["stages"]:
            attempt = current_attempt(run, stage)
            if attempt is not None and (record := attempt.read_job()):
                is_own = attempt.path.is_relative_to(run.path)
                (self._own if is_own else self._shared).append(reattach(record))

    def want_driver(self) -> bool:
        """Whether a job of the point's own has begun; of a point without, all others' have ended.

        A point that has no job at all wants one now: it can reuse everything, or tell why it has
        none.
        """
        if self._own:
            return any(job.status().state is not State.PENDING for job in self._own)
        return all(job.done() for job in self._shared)
