"""Differences of two runs' metrics, with intervals, and of their trainings' last records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.report.compared_run import ComparedRun
from redco_flow.report.metrics import direction_of, is_metrics, metrics_artifact
from redco_flow.report.run_diff.settings import Change, changes_by_stage, collect
from redco_flow.report.stage_facts import DAMAGED, StageFacts, logging_attempts
from redco_flow.report.training_history import Record, read_history
from redco_flow.tracking.metrics_artifact import read_metrics
from redco_flow.tracking.paired_bootstrap import (
    CannotCompare,
    Evaluation,
    compared,
    draw_scores,
    refuse_other_examples,
    why_not_compared,
)
from redco_flow.tracking.run_metrics import locate_metrics, training_metric
from redco_flow.tracking.score_identity import ScoreIdentity, identify_scores

Stages = Mapping[str, StageFacts]


@dataclass(frozen=True)
class Resampling:
    """Draws of the bootstrap for an interval; the defaults are those of the stage `compare`.

    Args:
        num_resamples: 0 for no intervals.
        confidence: of the intervals, between 0 and 1.
        seed: of the draws.
    """

    num_resamples: int = 10_000
    confidence: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class MetricChange:
    """One metric whose value differs, that cannot be compared, or that one run does not have.

    Args:
        key: its name, with the stage's before it where several report it.
        first: its value in the first run; None where that has none.
        second: in the second run.
        better: "max" or "min"; empty where that is not known.
        difference: second - first; None where the two scores cannot be compared.
        low, high: of the difference's interval, by paired bootstrap over the examples.
        p_value: two-sided, of no difference.
        is_significant: whether the p-value is below one minus the confidence.
        remark: why there is no interval.
        not_compared: why there is no difference.
    """

    key: str
    first: float | None
    second: float | None
    better: str = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    is_significant: bool | None = None
    remark: str = ""
    not_compared: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON value."""
        return asdict(self)


def metric_changes(
    first: ComparedRun, second: ComparedRun, resampling: Resampling
) -> list[MetricChange]:
    """Return the metrics that differ or cannot be compared, those of both runs first.

    Args:
        resampling: of the intervals; without resamples there are none.
    """
    old, new = _located(first), _located(second)
    directions = {**first.directions, **second.directions}
    pairs = _Pairs(first, second, resampling)
    names = dict.fromkeys((*(name for name in new if name in old), *new, *old))
    found = [_change(name, old.get(name), new.get(name), pairs) for name in names]
    return [
        replace(one, better=direction_of(one.key, directions))
        for one in found
        if one.not_compared or not _is_equal(one.first, one.second)
    ]


@dataclass(frozen=True)
class _Score:
    """A metric's value in one run, the stage and key behind its name, and its identity."""

    stage: str
    key: str
    value: float
    identity: ScoreIdentity


def _located(side: ComparedRun) -> dict[str, _Score]:
    """Every metric of a run by the name that people use."""
    stages = side.stages
    entries = {
        name: {**one.entry, "metrics": one.metrics, "artifacts": one.outputs}
        for name, one in stages.items()
    }
    results = {name: one.result for name, one in stages.items() if one.result is not None}
    identities = identify_scores(entries, results, side.store)
    return {
        name: _Score(stage, key, stages[stage].metrics[key], identities.get(name, ScoreIdentity()))
        for name, (stage, key) in locate_metrics(entries).items()
    }


def _is_equal(first: float | None, second: float | None) -> bool:
    both_nan = all(one is not None and math.isnan(one) for one in (first, second))
    return first == second or both_nan


def _change(name: str, old: _Score | None, new: _Score | None, pairs: _Pairs) -> MetricChange:
    """One metric, with its interval where both runs scored the same examples one by one."""
    values = (old.value if old else None, new.value if new else None)
    if old is None or new is None:
        return MetricChange(name, *values)
    if why := old.identity.comparable_with(new.identity):
        return MetricChange(name, *values, not_compared=why)
    if _is_equal(*values):
        return MetricChange(name, *values)
    change = MetricChange(name, *values, difference=new.value - old.value)
    found = pairs.find(old.stage, new.stage, new.key)
    if isinstance(found, str):
        return replace(change, remark=found)
    sure = {key: found[key] for key in ("low", "high", "p_value", "is_significant")}
    return replace(change, **sure)


class _Pairs:
    """Pairs of evaluations, each resampled once for all its metrics."""

    def __init__(self, first: ComparedRun, second: ComparedRun, resampling: Resampling) -> None:
        self._sides = (first, second)
        self._resampling = resampling
        self._found: dict[tuple[str, str], dict[str, dict[str, Any]] | str] = {}

    def find(self, first: str, second: str, key: str) -> dict[str, Any] | str:
        """The comparison of a score, or why there is none; empty where that is obvious."""
        pair = (first, second)
        if pair not in self._found:
            self._found[pair] = self._compare(*pair)
        found = self._found[pair]
        if isinstance(found, str):
            return found
        return found.get(key, "its metric has no score of each example")

    def _compare(self, first: str, second: str) -> dict[str, dict[str, Any]] | str:
        if not self._resampling.num_resamples:
            return ""
        stages = [
            side.stages[name] for side, name in zip(self._sides, (first, second), strict=True)
        ]
        # A training, say, only reports what it measured.
        if not all(any(is_metrics(name) for name in stage.outputs) for stage in stages):
            return ""
        artifacts = [
            metrics_artifact(stage, side.store)
            for stage, side in zip(stages, self._sides, strict=True)
        ]
        try:
            systems = [
                Evaluation(name, artifact.id, *read_metrics(artifact.path))
                for name, artifact in zip(("first", "second"), artifacts, strict=True)
                if artifact is not None
            ]
            if len(systems) < len(artifacts):
                return "an evaluation's artifact is gone"
            refuse_other_examples(systems)
            return self._resampled(*systems)
        except CannotCompare:
            return "scored on other examples"
        except (RedcoFlowError, ImportError, *DAMAGED):  # a metric of the user's may be gone too
            return "no scores of each example, or not by a metric that is here"

    def _resampled(self, first: Evaluation, second: Evaluation) -> dict[str, dict[str, Any]]:
        both = (first, second)
        common = [key for key in first.summary.metrics if key in second.summary.metrics]
        keys = [key for key in common if not why_not_compared(both, key)]
        how = self._resampling
        draws = draw_scores(both, keys, num_resamples=how.num_resamples, seed=how.seed)
        return {key: compared(second, first, key, draws, how.confidence) for key in keys}


def training_changes(first: Stages, second: Stages) -> list[Change]:
    """Return the differences of the trainings' last records: steps, losses, epochs."""
    return changes_by_stage(collect(first, _last_records), collect(second, _last_records))


_LOGGED = {"step": "step", "epoch": "epoch", "loss": training_metric("loss")}


def _last_records(stage: StageFacts) -> dict[str, Any] | None:
    """A training's last record and its last evaluation; None where it logged nothing."""
    attempts, _ = logging_attempts(stage)
    if not any(attempt.metrics_path.is_file() for attempt in attempts):
        return None
    history = read_history(attempts)
    if not history.logged:
        return None
    last = _last(history.logged)
    scored = _last(history.evaluations)
    found = {name: last[key] for key, name in _LOGGED.items() if last.get(key) is not None}
    if scored.get("eval_loss") is not None:
        name = training_metric("eval_loss")
        found |= {name: scored["eval_loss"], f"{name} at step": scored["step"]}
    return found


def _last(records: list[Record]) -> Record:
    return records[-1] if records else {}
