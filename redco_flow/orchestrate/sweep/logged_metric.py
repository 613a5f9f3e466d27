"""Read one metric of a sweep's trainings from what they log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redco_flow.orchestrate.run.cancel import Log
from redco_flow.orchestrate.sweep.successive_halving import Measurement
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.maker import find_maker
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import unless_damaged


class LoggedMetric:
    """A metric in the logs of several runs, of which each value is read once.

    Args:
        stage: whose trainings log it.
        metric: such as `val/eval_loss`.
        log: takes a line on each damaged record.
    """

    def __init__(self, stage: str, metric: str, log: Log) -> None:
        self._stage = stage
        self._metric = metric
        self._log = log
        self._offsets: dict[tuple[str, Path], int] = {}

    def read_new(self, run: RunDirectory) -> Iterator[Measurement]:
        """Yield what a run has logged since the last call."""
        for attempt, number in self._attempts(run):
            for record in self._new_records(run, attempt.metrics_path):
                step, found = record.get("step"), _find(record, self._metric)
                if isinstance(step, int) and found:
                    yield Measurement(str(record.get("time")), run.id, step, number, found[0])

    def _attempts(self, run: RunDirectory) -> list[tuple[AttemptDirectory, int]]:
        """Return the attempts with their numbers: 0 for those whose result the run reuses.

        The own attempts of a reused stage have ended without a result.
        """
        state = unless_damaged(run.read_state) or {}
        entry = state.get("stages", {}).get(self._stage, {})
        if entry.get("reused") and (maker := find_maker(run, self._stage, entry)):
            return [(attempt, 0) for attempt in maker.attempts]
        return [(attempt, attempt.number) for attempt in run.attempts(self._stage)]

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
