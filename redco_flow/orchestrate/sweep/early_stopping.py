"""Stop the trainings of a sweep that are not among the best, by the metrics that they log.

Used by the sweep's process. A decision is recorded before its job is cancelled, so the next process
after a `kill -9` continues with the same decisions.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.executor import reattach
from redco_flow.orchestrate.run.cancel import Log, has_ended
from redco_flow.orchestrate.sweep.logged_metric import LoggedMetric
from redco_flow.orchestrate.sweep.successive_halving import Measurement, SuccessiveHalving, decide
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import RungDecision, SweepDirectory

# A second request kills at once: one that another process may have sent gets its grace first.
_SECONDS_TO_STOP = 60.0


class SweepEarlyStopping:
    """Early stopping of one sweep.

    Args:
        sweep: its lease is held by this process.
        log: takes a line on each decision to stop.
    """

    def __init__(self, sweep: SweepDirectory, log: Log) -> None:
        self._sweep = sweep
        self._log = log
        self._halving = SuccessiveHalving(**sweep.record["early_stopping"])
        self._logged = LoggedMetric(self._halving.stage, self._halving.metric, log)
        self._decisions = sweep.read_decisions()
        self._stops = {one.run: one for one in self._decisions if one.is_stopped}
        self._watched: list[RunDirectory] = []
        self._found: list[Measurement] = []
        self._asked: set[AttemptDirectory] = set()
        self._not_before = dict.fromkeys(self._stops, time.monotonic() + _SECONDS_TO_STOP)

    def watch(self, run: RunDirectory) -> None:
        """Judge this run's training from now on, until the run has ended."""
        self._watched.append(run)

    def has_stopped(self, run: RunDirectory) -> bool:
        """Whether the run's last attempt was to be stopped, and did not end in another way."""
        stop, latest = self._stops.get(run.id), run.latest_attempt(self._halving.stage)
        if stop is None or latest is None or latest.number != stop.attempt:
            return False
        return latest.cause in (None, Cause.CANCELLED)

    def look(self) -> None:
        """Read what was logged since the last call, decide, and cancel the jobs to be stopped."""
        ended = [run for run in self._watched if has_ended(run)]
        self._found += [one for run in self._watched for one in self._logged.read_new(run)]
        try:
            for decision in decide(self._halving, self._found, list(self._decisions)):
                self._record(decision)
        except OSError as error:  # of a full disk: what was found is judged at the next look
            self._log(f"{error.filename} cannot be written, trying again: {error.strerror}")
            return
        self._found.clear()
        self._watched = [run for run in self._watched if run not in ended]
        now = time.monotonic()
        for run in self._watched:
            if run.id not in self._stops or now < self._not_before.get(run.id, 0.0):
                continue
            try:
                self._stop(run, self._stops[run.id])
            except RedcoFlowError as error:
                self._not_before[run.id] = now + _SECONDS_TO_STOP
                self._log(f"{run.id} is not stopped yet, trying again: {error}")

    def _record(self, decision: RungDecision) -> None:
        self._sweep.add_decision(decision)
        self._decisions.append(decision)
        if decision.is_stopped:
            self._stops[decision.run] = decision

    def _stop(self, run: RunDirectory, stop: RungDecision) -> None:
        """Cancel the job of a run's training, once."""
        attempt = run.latest_attempt(self._halving.stage)
        if attempt is None or attempt in self._asked or attempt.read_exit() is not None:
            return
        if attempt.number > stop.attempt:
            if run.attempt(self._halving.stage, stop.attempt).cause is Cause.CANCELLED:
                return  # a user continues it
            # The attempt failed before it could be stopped, and was tried again.
            with suppress(OSError):  # tried again at the next look
                self._record(replace(stop, attempt=attempt.number))
        if (job := attempt.read_job()) is not None:
            reattach(job).cancel(check=False)
            self._asked.add(attempt)
            self._log(f"{run.id} is {stop.reason}")
