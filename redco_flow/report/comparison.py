"""Tables, curves and pages of several runs side by side: the views `compare` and `diff`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from redco_flow.report.charts import Figure, Line, LineChart
from redco_flow.report.compared_run import (
    ComparedRun,
    best_of,
    best_run_value,
    direction,
    metric_names,
    not_compared,
)
from redco_flow.report.numbers import duration, number, signed, value_text
from redco_flow.report.run_diff.measures import MetricChange
from redco_flow.report.run_diff.runs import RunDiff
from redco_flow.report.run_diff.settings import Change
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table
from redco_flow.report.training_history import points_of
from redco_flow.tracking.run_metrics import training_metric

_MAX_VALUE = 80
_DESCRIPTIVE = ("name", "description", "tags")
_HEX = frozenset("0123456789abcdef")
_LOGGED = {"loss": "training loss", "learning_rate": "learning rate", "grad_norm": "gradient norm"}


def comparison_page(runs: Sequence[ComparedRun], now: str, *, with_curves: bool = True) -> RunsPage:
    """Return the page of several runs: settings that differ, metrics, curves.

    Args:
        now: the time as `utc_now` gives it.
        with_curves: whether the logs of trainings are read for their curves.
    """
    settings = differing_settings(runs)
    return RunsPage(
        of="comparison",
        title=f"{len(runs)} runs",
        facts=[("settings", f"{len(settings)} differ" if settings else "all equal")],
        sections=[
            Section("Runs", [runs_table(runs, metric_names(runs), settings)], note=_BEST),
            *_measured(runs, with_curves=with_curves),
        ],
        built_at=now,
    )


def diff_page(diff: RunDiff, now: str, *, with_curves: bool = True) -> RunsPage:
    """Return the page of two runs: each group of differences, metrics, curves.

    Args:
        now: the time as `utc_now` gives it.
        with_curves: whether the logs of trainings are read for their curves.
    """
    runs = (diff.first, diff.second)
    metrics = [_changed_metrics(diff.metrics)] if diff.metrics else []
    found = {
        "equal": ", ".join(diff.equal) or "nothing",
        "patch": diff.patch.remark,
        "not read": "; ".join(diff.remarks),
    }
    return RunsPage(
        of="comparison",
        title=" and ".join(one.label for one in runs),
        facts=[(name, text) for name, text in found.items() if text],
        sections=[
            Section("Runs", [runs_table(runs, [])]),
            Section("Metrics", metrics),
            *(_group(name, changes, diff) for name, changes in diff.changes.items()),
            *_measured(runs, with_curves=with_curves),
        ],
        built_at=now,
    )


def _measured(runs: Sequence[ComparedRun], *, with_curves: bool) -> list[Section]:
    parts = Section("Parts of the data", list(parts_tables(runs)))
    return [parts, Section("Curves", figures=overlaid(runs))] if with_curves else [parts]


_BEST = (
    "Of each metric for which it is known whether more is better, the best is bold, unless the "
    "runs' scores cannot be compared; a score that cannot is marked with the reason. "
    "val/… was measured by the training, on its validation rows."
)


def differing_settings(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the dotted keys of the settings that are not equal in all of the runs."""
    keys = dict.fromkeys(key for one in runs for key in one.settings)
    return [
        key
        for key in keys
        if key.partition(".")[0] not in _DESCRIPTIVE
        and len({json.dumps(one.settings.get(key), sort_keys=True) for one in runs}) > 1
    ]


def runs_table(
    runs: Sequence[ComparedRun], metrics: Sequence[str], settings: Sequence[str] = ()
) -> Table:
    """Return a table of runs, their settings and metrics, the best of each metric marked.

    Args:
        settings: the dotted keys that have a column.
    """
    best = {name: best_run_value(name, runs) for name in metrics}
    reasons = {name: not_compared(name, runs) for name in metrics}
    rows = [
        [
            Cell(one.label),
            Cell("", mark=one.state),
            Cell(duration(one.seconds), is_number=True),
            *(
                Cell(value_text(one.settings[key]) if key in one.settings else "–")
                for key in settings
            ),
            *(
                _score(one.metrics.get(name), best[name], reasons[name].get(one.label, ""))
                for name in metrics
            ),
            Cell(one.created_at[:16].replace("T", " "), is_number=True),
        ]
        for one in runs
    ]
    names = [*settings, *metrics]
    header = ["run", "state", "time", *names, "created (UTC)"]
    caption = [
        "Runs",
        *(["settings that differ"] if settings else []),
        *(["metrics"] if metrics else []),
    ]
    links = {one.label: f"/run/{one.run.id}/" for one in runs}
    return Table(", ".join(caption), header, rows, names, may_transpose=True, links=links)


def parts_tables(runs: Sequence[ComparedRun]) -> Iterator[Table]:
    """Yield a table of each metric that parts of the data have: runs against parts."""
    for name in dict.fromkeys(name for one in runs for name in one.parts):
        of_runs = [one.parts.get(name, {}) for one in runs]
        parts = sorted({part for found in of_runs for part in found})
        way = "" if not_compared(name, runs) else direction(name, runs)
        best = {part: best_of([found.get(part) for found in of_runs], way) for part in parts}
        rows = [
            [Cell(one.label), *(_score(found.get(part), best[part]) for part in parts)]
            for one, found in zip(runs, of_runs, strict=True)
        ]
        yield Table(f"{name} of each part", [f"{name} of", *parts], rows, [f"{name} of", *parts])


def _score(value: float | None, best: float | None, footnote: str = "") -> Cell:
    return Cell.of_score(value, is_best=value is not None and value == best, footnote=footnote)


def _group(name: str, changes: Sequence[Change], diff: RunDiff) -> Section:
    """One group of differences between two runs; measured values are rounded, settings are not."""
    value = number if name == "training" else _value
    rows = [
        [
            Cell(one.key, note=", ".join(one.stages)),
            Cell(value(one.first), note=one.first_place),
            Cell(value(one.second), note=one.second_place),
        ]
        for one in changes
    ]
    what = "placement, which is not part of a result's identity" if name == "placement" else name
    table = Table(f"Differences in {what}", [name, "first", "second"], rows)
    patch = diff.patch.text if name == "code" else ""
    return Section(name.capitalize(), [table] if rows else [], text=patch)


def _value(value: Any) -> str:
    is_digest = isinstance(value, str) and len(value) in (40, 64) and set(value) <= _HEX
    return str(value)[:12] if is_digest else value_text(value, _MAX_VALUE)


def _changed_metrics(changes: Sequence[MetricChange]) -> Table:
    rows = [
        [
            Cell(one.key),
            Cell.of_score(one.first),
            Cell.of_score(one.second),
            Cell("" if one.difference is None else signed(one.difference), is_number=True),
            Cell(_interval(one), is_number=True),
            Cell(_verdict(one)),
        ]
        for one in changes
    ]
    header = ["metric", "first", "second", "difference", "95 % interval", "second is"]
    return Table("Metrics that differ", header, rows).compact()


def _interval(change: MetricChange) -> str:
    if change.low is None or change.high is None:
        return ""
    return f"{signed(change.low)} to {signed(change.high)}"


def _verdict(change: MetricChange) -> str:
    """Whether the second run is better or worse, or why that is not known."""
    if change.not_compared:
        return f"not compared: {change.not_compared}"
    if change.is_significant is None or not change.difference or math.isnan(change.difference):
        return f"no interval: {change.remark}" if change.remark else ""
    if not change.is_significant:
        return "not significant"
    if not change.better:
        return "significant"
    return "better" if (change.difference > 0) == (change.better == "max") else "worse"


def overlaid(runs: Sequence[ComparedRun]) -> list[Figure]:
    """Return a chart of each logged quantity of trainings, with a line for each run."""
    stages = dict.fromkeys(stage for one in runs for stage in one.trainings)
    # With several trainings, each chart names its stage.
    prefixes = {stage: f"{stage}: " if len(stages) > 1 else "" for stage in stages}
    return [figure for stage in stages for figure in _of_stage(stage, prefixes[stage], runs)]


def _of_stage(stage: str, prefix: str, runs: Sequence[ComparedRun]) -> Iterator[Figure]:
    histories = {one.label: one.trainings[stage] for one in runs if stage in one.trainings}
    logged = {name: {k: h.logged for k, h in histories.items()} for name in _LOGGED}
    names = dict.fromkeys(
        name for history in histories.values() for name in history.evaluation_metrics
    )
    scored = {
        name: {k: h.evaluations for k, h in histories.items()} for name in ("eval_loss", *names)
    }
    for name, records in (*list(logged.items())[:1], *scored.items(), *list(logged.items())[1:]):
        lines = [
            Line(label, points, number, is_sparse=name in scored)
            for number, (label, found) in enumerate(records.items(), 1)
            if (points := points_of(found, name))
        ]
        if lines:
            title = training_metric(name) if name in scored else _LOGGED.get(name, name)
            shown = f"{title} over optimizer steps of stage {stage}"
            chart = LineChart(shown, "step", title, lines, may_be_log="loss" in name)
            yield Figure(f"{prefix}{title}", chart, is_wide=name in ("loss", "eval_loss"))
