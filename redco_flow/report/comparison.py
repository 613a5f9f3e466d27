"""The page of several runs: what differs, metrics with the best marked, curves overlaid."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.report.charts import Figure, Line, LineChart
from redco_flow.report.metrics import direction_of, metrics_artifact
from redco_flow.report.numbers import duration, number, score, seconds_between, signed, value_text
from redco_flow.report.run_diff.changes import Change
from redco_flow.report.run_diff.measures import MetricChange
from redco_flow.report.run_diff.runs import RunDiff
from redco_flow.report.run_diff.settings import read_settings
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table
from redco_flow.report.stage_facts import DAMAGED, logging_attempts, read_stages
from redco_flow.report.training_history import History, points_of, read_history
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.run_metrics import read_metrics, training_metric
from redco_flow.tracking.score_identity import ScoreIdentity, identify_scores
from redco_flow.tracking.typed_records import unless_damaged
from redco_flow.tracking.workspace import Workspace

_MAX_VALUE = 120  # of two runs, where there is room
_MAX_COLUMNS = 9
_NOT_COMPARED = ("name", "description", "tags")
_LOGGED = {"loss": "training loss", "learning_rate": "learning rate", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class ComparedRun:
    """What one run brings to a comparison.

    Args:
        label: how tables and legends call it.
        settings: all of resolved.yaml, by dotted key.
        metrics: by the names that `status` gives them.
        identities: what each of the metrics was measured on and by.
        directions: "max" or "min" of scores, as far as evaluations say.
        parts: scores by metric, then by part of the data.
        trainings: what each training stage logged.
    """

    label: str
    run: RunDirectory
    state: str
    created_at: str
    seconds: float | None
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]
    identities: Mapping[str, ScoreIdentity]
    directions: Mapping[str, str]
    parts: Mapping[str, Mapping[str, float]]
    trainings: Mapping[str, History]


def read_compared(run: RunDirectory, label: str = "") -> ComparedRun:
    """Return what a run brings to a comparison; what cannot be read is left out.

    Args:
        label: the run's id where it is empty.
    """
    workspace = Workspace(run.path.parents[1])
    stages = read_stages(run, workspace, lambda _: None)
    store = ArtifactStore(workspace)
    state = unless_damaged(run.read_state) or {}
    record = unless_damaged(lambda: run.record) or {}
    directions: dict[str, str] = {}
    parts: dict[str, Mapping[str, Any]] = {}
    for name, stage in stages.items():
        if (artifact := metrics_artifact(stage, store)) is None:
            continue
        directions |= artifact.metadata.get("directions") or {}
        parts[name] = artifact.metadata.get("parts") or {}
    entries = state.get("stages") or {}
    results = {name: one.result for name, one in stages.items() if one.result is not None}
    trainings = {name: read_history(logging_attempts(stage)[0]) for name, stage in stages.items()}
    return ComparedRun(
        label=label or run.id,
        run=run,
        state=str(state.get("state") or "damaged"),
        created_at=str(record.get("created_at") or ""),
        seconds=seconds_between(state.get("started_at"), state.get("ended_at")),
        settings=_settings(run),
        metrics=read_metrics(entries),
        identities=identify_scores(entries, results, store),
        directions=directions,
        parts=_by_metric({name: found for name, found in parts.items() if found}),
        trainings={name: found for name, found in trainings.items() if found.logged},
    )


def _by_metric(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the scores of parts by metric, whose name says the stage where several have parts."""
    found: dict[str, dict[str, float]] = {}
    for stage, of_stage in parts.items():
        prefix = f"{stage}/" if len(parts) > 1 else ""
        for part, scored in of_stage.items():
            for name, value in scored["metrics"].items():
                found.setdefault(f"{prefix}{name}", {})[part] = value
    return found


def _settings(run: RunDirectory) -> dict[str, Any]:
    try:
        return read_settings(run)
    except (RedcoFlowError, *DAMAGED):
        return {}


def differing_settings(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the dotted keys of the settings that not all of the runs have alike."""
    keys = dict.fromkeys(key for one in runs for key in one.settings)
    return [
        key
        for key in keys
        if key.partition(".")[0] not in _NOT_COMPARED
        and len({json.dumps(one.settings.get(key), sort_keys=True) for one in runs}) > 1
    ]


def metric_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the metrics of any of the runs, in the order of appearance."""
    return list(dict.fromkeys(name for one in runs for name in one.metrics))


def best_of(values: Sequence[float | None], direction: str) -> float | None:
    """Return the best of a metric's values; None where it is not known which way is better."""
    known = [value for value in values if value is not None]
    if not direction or len(known) < 2 or min(known) == max(known):
        return None
    return min(known) if direction == "min" else max(known)


def not_compared(name: str, runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Return why a metric of a run cannot be compared with the first run's that has it, by label.

    Args:
        name: the metric's.
    """
    scored = [one for one in runs if name in one.metrics]
    first = scored[0].identities.get(name, ScoreIdentity()) if scored else ScoreIdentity()
    reasons = {
        one.label: first.comparable_with(one.identities.get(name, ScoreIdentity()))
        for one in scored[1:]
    }
    return {
        label: f"not compared with {scored[0].label}: {why}"
        for label, why in reasons.items()
        if why
    }


def best_run_value(name: str, runs: Sequence[ComparedRun]) -> float | None:
    """Return the best value of a metric; None where not all of its values can be compared."""
    if not_compared(name, runs):
        return None
    return best_of([one.metrics.get(name) for one in runs], direction(name, runs))


def direction(name: str, runs: Sequence[ComparedRun]) -> str:
    """Return "max" or "min", which is better of a metric; empty where no evaluation says."""
    known = {key: way for one in runs for key, way in one.directions.items()}
    return direction_of(name, known)


def comparison_page(runs: Sequence[ComparedRun], now: str, diff: RunDiff | None = None) -> RunsPage:
    """Return a page that compares runs.

    Args:
        now: the time as `utc_now` gives it.
        diff: of two runs, what differs between them; it replaces the table of settings.
    """
    metrics = [_readable(metrics_table(runs))]
    if diff is None:
        facts = [("runs", ", ".join(one.label for one in runs))]
        differences = [Section("Settings", list(_settings_table(runs)))]
    else:
        metrics += [_changed_metrics(diff.metrics)] if diff.metrics else []
        facts = [("equal", ", ".join(diff.equal) or "nothing")]
        facts += [("not read", "; ".join(diff.remarks))] if diff.remarks else []
        differences = [_group(name, changes, diff) for name, changes in diff.changes.items()]
    return RunsPage(
        of="comparison",
        title=f"{len(runs)} runs" if diff is None else " and ".join(one.label for one in runs),
        facts=facts,
        sections=[
            Section("Metrics", metrics, note=_BEST if len(runs) > 1 else ""),
            Section("Parts of the data", list(parts_tables(runs))),
            *differences,
            Section("Curves", figures=overlaid(runs)),
        ],
        built_at=now,
    )


def _group(name: str, changes: Sequence[Change], diff: RunDiff) -> Section:
    """One group of differences between two runs; measured values are rounded, set ones are not."""
    value = number if name == "training" else lambda one: value_text(one, _MAX_VALUE)
    rows = [
        [
            Cell(one.key, note=", ".join(one.stages)),
            Cell(value(one.first), note=one.first_place),
            Cell(value(one.second), note=one.second_place),
        ]
        for one in changes
    ]
    table = Table(f"What differs in {name}", [name, "first", "second"], rows)
    patch = diff.patch.text if name == "code" else ""
    return Section(name.capitalize(), [table] if rows else [], text=patch)


def _changed_metrics(changes: Sequence[MetricChange]) -> Table:
    header = ["metric", "first", "second", "difference", "95 % interval", "better"]
    return Table("Metrics that differ", header, [_changed_metric(one) for one in changes])


def _changed_metric(change: MetricChange) -> list[Cell]:
    if change.low is None or change.high is None:
        why = f"not compared: {change.not_compared}" if change.not_compared else change.remark
        sure = [Cell("", note=why), Cell("")]
    else:
        interval = f"{signed(change.low)} to {signed(change.high)}"
        sure = [Cell(interval, is_number=True), Cell(_verdict(change))]
    difference = "" if change.difference is None else signed(change.difference)
    numbers = (score(change.first), score(change.second), difference)
    return [Cell(change.key), *(Cell(text, is_number=True) for text in numbers), *sure]


def _verdict(change: MetricChange) -> str:
    if not change.is_significant or not change.difference:
        return "not significant"
    return "second" if (change.difference > 0) == (change.better == "max") else "first"


def _readable(table: Table) -> Table:
    """The table with a column for each run where it would be wide otherwise."""
    is_wide = len(table.header) > max(_MAX_COLUMNS, len(table.rows))
    return table.transposed() if is_wide else table


_BEST = (
    "Of each metric for which it is known whether more is better, the best is bold, unless the "
    "runs' scores cannot be compared; a score that cannot is marked with the reason. "
    "val/… was measured by the training, on its validation rows."
)


def metrics_table(runs: Sequence[ComparedRun]) -> Table:
    """Return a table of runs and their metrics, the best of each marked."""
    names = metric_names(runs)
    best = {name: best_run_value(name, runs) for name in names}
    reasons = {name: not_compared(name, runs) for name in names}
    rows = [
        [
            Cell(one.label),
            Cell("", mark=one.state),
            *(
                _value(one.metrics.get(name), best[name], reasons[name].get(one.label, ""))
                for name in names
            ),
            Cell(duration(one.seconds), is_number=True),
            Cell(one.created_at[:16].replace("T", " "), is_number=True),
        ]
        for one in runs
    ]
    return Table("Runs and their metrics", ["run", "state", *names, "time", "created (UTC)"], rows)


def parts_tables(runs: Sequence[ComparedRun]) -> Iterator[Table]:
    """Yield a table of each metric that parts of the data have: runs against parts."""
    for name in dict.fromkeys(name for one in runs for name in one.parts):
        of_runs = [one.parts.get(name, {}) for one in runs]
        parts = sorted({part for found in of_runs for part in found})
        way = "" if not_compared(name, runs) else direction(name, runs)
        best = {part: best_of([found.get(part) for found in of_runs], way) for part in parts}
        rows = [
            [Cell(one.label), *(_value(found.get(part), best[part]) for part in parts)]
            for one, found in zip(runs, of_runs, strict=True)
        ]
        yield Table(f"{name} of each part", ["run", *parts], rows)


def _value(value: float | None, best: float | None, note: str = "") -> Cell:
    is_best = value is not None and value == best
    return Cell(score(value), is_number=True, mark="best" if is_best else "", note=note)


def _settings_table(runs: Sequence[ComparedRun]) -> Iterator[Table]:
    keys = differing_settings(runs)
    rows = [[Cell(key), *(Cell(setting_text(one, key)) for one in runs)] for key in keys]
    caption = "Settings in which the runs differ" if keys else "All settings are equal"
    yield Table(caption, ["setting", *(one.label for one in runs)], rows)


def setting_text(run: ComparedRun, key: str) -> str:
    """Return a setting's value as text; a dash where the run has none."""
    return value_text(run.settings[key]) if key in run.settings else "–"


def overlaid(runs: Sequence[ComparedRun]) -> list[Figure]:
    """Return a chart of each thing that trainings logged, with a line for each run."""
    stages = dict.fromkeys(stage for one in runs for stage in one.trainings)
    # Where there are several trainings, each chart says whose it is.
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
