"""Stop the trainings of a sweep that are not among the best, by the metrics that they log.

Used by the sweep's process. A decision is recorded before its job is cancelled, so the next process
after a `kill -9` continues with the same decisions.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.executor import reattach
from redco_flow.orchestrate.run.cancel import Log, has_ended
from redco_flow.orchestrate.sweep.successive_halving import Measurement, SuccessiveHalving, decide
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import RungDecision, SweepDirectory
from redco_flow.tracking.typed_records import unless_damaged

# A second request kills at once: one that another process may have sent gets its grace first.
_SECONDS_TO_STOP = 60.0


class EarlyStopping:
    """Early stopping of one sweep.

    Args:
        sweep: its lease is held by this process.
        log: takes a line on each decision to stop.
    """

    def __init__(self, sweep: SweepDirectory, log: Log) -> None:
        self._sweep = sweep
        self._log = log
        self._halving = SuccessiveHalving(**sweep.record["early_stopping"])
        self._decisions = sweep.read_decisions()
        self._stops = {one.run: one for one in self._decisions if one.is_stopped}
        self._watched: list[RunDirectory] = []
        self._found: list[Measurement] = []
        self._offsets: dict[tuple[str, Path], int] = {}
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
        self._found += [one for run in self._watched for one in self._measurements(run)]
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

    def _measurements(self, run: RunDirectory) -> Iterator[Measurement]:
        for attempt, number in self._attempts(run):
            for record in self._new_records(run, attempt.metrics_path):
                step, found = record.get("step"), _find(record, self._halving.metric)
                if isinstance(step, int) and found:
                    yield Measurement(str(record.get("time")), run.id, step, number, found[0])

    def _attempts(self, run: RunDirectory) -> list[tuple[AttemptDirectory, int]]:
        """Return the attempts with their numbers: 0 for those whose result the run reuses."""
        stage = self._halving.stage
        if own := run.attempts(stage):
            return [(attempt, attempt.number) for attempt in own]
        state = unless_damaged(run.read_state) or {}
        made_by = state.get("stages", {}).get(stage, {}).get("made_by")
        if not made_by:
            return []
        maker = RunDirectory(run.path.parent / made_by["run"])
        return [(attempt, 0) for attempt in maker.attempts(made_by["stage"])]

    def _new_records(self, run: RunDirectory, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the records of the lines that are whole and were not read before."""
        offset = self._offsets.get((run.id, path), 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
        except OSError:  # not there yet, or the file system does not answer: read at the next look
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offsets[run.id, path] = offset + len(whole)
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                self._log(f"{path} has a damaged line, which is left out")
                continue
            if isinstance(record, dict):
                yield record


def _find(record: Mapping[str, Any], metric: str) -> tuple[float | None] | None:
    """Return the value of a metric in a record, None for one that is not a finite number.

    Args:
        metric: `val/KEY` of an evaluation, `train/KEY` of a training step, or `KEY` of either.
    """
    group, _, key = metric.partition("/")
    if group not in ("train", "val"):
        group, key = "", metric
    scores = record.get("metrics")
    is_evaluation = isinstance(scores, Mapping)
    values = scores if isinstance(scores, Mapping) else record
    if group == ("train" if is_evaluation else "val") or key not in values:
        return None
    value = values[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    with suppress(OverflowError):
        return (float(value) if is_number and math.isfinite(value) else None,)
    return (None,)
