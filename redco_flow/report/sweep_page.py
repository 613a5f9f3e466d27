"""A sweep's page: points side by side, mean and spread over seeds, settings against metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, stdev

from redco_flow.report.charts import Figure, Group, PointChart
from redco_flow.report.compared_run import (
    ComparedRun,
    best_of,
    best_run_value,
    direction,
    metric_names,
    not_compared,
)
from redco_flow.report.comparison import overlaid, parts_tables, runs_table
from redco_flow.report.numbers import score
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table

_MAX_SETTINGS, _MAX_METRICS = 6, 4
_SEED = "seed"


@dataclass(frozen=True)
class SweptRun:
    """One point: its run, and the overrides of its settings."""

    run: ComparedRun
    overrides: Sequence[str]

    @property
    def settings(self) -> dict[str, str]:
        """Value by key."""
        pairs = (text.partition("=") for text in self.overrides)
        return {key: value for key, _, value in pairs}

    @property
    def without_seed(self) -> str:
        """The overrides without seeds."""
        kept = [f"{key}={value}" for key, value in self.settings.items() if not _is_seed(key)]
        return "  ".join(kept)


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == _SEED


def sweep_page(name: str, state: str, points: Sequence[SweptRun], now: str) -> RunsPage:
    """Return a sweep's page.

    Args:
        name: the sweep's id.
        state: the sweep's.
        now: the time as `utc_now` gives it.
    """
    runs = [point.run for point in points]
    metrics = metric_names(runs)
    # Metrics of evaluations before those of trainings.
    scored = {name for run in runs for name in run.directions}
    shown = sorted(metrics, key=lambda name: name not in scored)[:_MAX_METRICS]
    done = sum(one.state == "completed" for one in runs)
    stopped = [one for one in runs if one.state == "stopped_early"]
    return RunsPage(
        of="sweep",
        title=name,
        state=state,
        facts=[
            ("points", f"{done} of {len(points)} completed"),
            *([("stopped early", f"{len(stopped)} points")] if stopped else []),
            ("varied", ", ".join(_varied(points))),
            *_best_facts(points, metrics),
        ],
        sections=[
            Section("Over seeds", list(_seed_tables(points, metrics))),
            Section("Points", [runs_table(runs, metrics)]),
            Section("Stopped early", list(_stopped_tables(stopped))),
            Section("Parts of the data", list(parts_tables(runs))),
            Section("Settings and metrics", figures=list(_scatters(points, shown))),
            Section("Parallel coordinates", figures=list(_parallel(points, shown)), note=_PARALLEL),
            Section("Training", figures=overlaid(runs)),
        ],
        built_at=now,
    )


_PARALLEL = "Each line is one point; each axis runs from its lowest value to its highest."


def _stopped_tables(stopped: Sequence[ComparedRun]) -> Iterator[Table]:
    if stopped:
        rows = [[Cell(one.label), Cell(one.message)] for one in stopped]
        links = {one.label: f"/run/{one.run.id}/" for one in stopped}
        yield Table("Points that were stopped early", ["point", "reason"], rows, links=links)


def _varied(points: Sequence[SweptRun]) -> list[str]:
    return list(dict.fromkeys(key for point in points for key in point.settings))


def _best_facts(points: Sequence[SweptRun], metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The best point by each metric, where all points can be compared by it."""
    runs = [point.run for point in points]
    for name in metrics:
        best = best_run_value(name, runs)
        if best is not None:
            point = next(one for one in points if one.run.metrics.get(name) == best)
            yield f"best {name}", f"{score(best)} with {'  '.join(point.overrides)}"


def _seed_tables(points: Sequence[SweptRun], metrics: Sequence[str]) -> Iterator[Table]:
    """Mean and standard deviation over the seeds; none where no seed was varied."""
    groups: dict[str, list[SweptRun]] = {}
    for point in points:
        groups.setdefault(point.without_seed, []).append(point)
    if not any(map(_is_seed, _varied(points))):
        return
    runs = [point.run for point in points]
    means = {name: [_mean(group, name) for group in groups.values()] for name in metrics}
    ways = {name: "" if not_compared(name, runs) else direction(name, runs) for name in metrics}
    best = {name: best_of(means[name], ways[name]) for name in metrics}
    rows = [
        [
            Cell(text or "all points"),
            Cell(str(len(group)), is_number=True),
            *(_spread(group, name, best[name]) for name in metrics),
        ]
        for text, group in groups.items()
    ]
    caption = "Mean ± standard deviation (n − 1) over the seeds"
    yield Table(caption, ["setting", "seeds", *metrics], rows)


def _values(group: Sequence[SweptRun], name: str) -> list[float]:
    return [one.run.metrics[name] for one in group if name in one.run.metrics]


def _mean(group: Sequence[SweptRun], name: str) -> float | None:
    values = _values(group, name)
    return mean(values) if values else None


def _spread(group: Sequence[SweptRun], name: str, best: float | None) -> Cell:
    values = _values(group, name)
    if not values:
        return Cell("–", is_number=True)
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
    text = f"{score(float(mean(values)))}{spread}"
    note = f"{len(values)} seeds" if len(values) < len(group) else ""
    return Cell(text, is_number=True, note=note, mark="best" if mean(values) == best else "")


def _scatters(points: Sequence[SweptRun], metrics: Sequence[str]) -> Iterator[Figure]:
    keys = [key for key in _varied(points) if not _is_seed(key)] or _varied(points)
    for name, key in product(metrics, keys[:_MAX_SETTINGS]):
        having = [one for one in points if name in one.run.metrics and key in one.settings]
        if not having:
            continue
        xs = [one.settings[key] for one in having]
        numbers = _numbers(xs)
        group = Group(
            name,
            xs if numbers is None else numbers,
            [one.run.metrics[name] for one in having],
            [_hover_text(one, name) for one in having],
            1,
        )
        chart = PointChart(
            title=f"{name} by {key}",
            x_label=key,
            y_label=name,
            groups=[group],
            x_kind="linear" if numbers else "category",
            height=270,
            may_be_log_x=True,
        )
        yield Figure(f"{name} by {key}", chart, is_wide=False)


def _hover_text(point: SweptRun, name: str) -> str:
    lines = [f"{name} {score(point.run.metrics[name])}", *point.overrides, point.run.run.id]
    return "\n".join(lines)


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Values as numbers; None unless all of them are."""
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return None
    return values if all(map(math.isfinite, values)) else None


def _parallel(points: Sequence[SweptRun], metrics: Sequence[str]) -> Iterator[Figure]:
    """A line for each point through its settings and metrics, every axis from 0 to 1."""
    names = [*_varied(points)[:_MAX_SETTINGS], *metrics]
    having = [one for one in points if all(name in one.run.metrics for name in metrics)]
    if len(having) < 2 or not metrics:
        return
    axes = {name: _axis(having, name) for name in names}
    runs = [one.run for one in having]
    best = best_run_value(metrics[0], runs)
    groups = [
        Group(
            label=one.run.label,
            xs=names,
            ys=[axes[name][index] for name in names],
            texts=[f"{name} {_shown(one, name)}" for name in names],
            colour=index + 1,
            has_line=True,
            thickness=9.0 if one.run.metrics[metrics[0]] == best else 4.0,
        )
        for index, one in enumerate(having)
    ]
    chart = PointChart(
        title=f"Settings and metrics of {len(having)} points, an axis each",
        x_label="",
        y_label="",
        groups=groups,
        x_kind="category",
        height=360,
        ticks=[(0.0, "lowest"), (1.0, "highest")],
        has_legend=False,
    )
    yield Figure(f"Settings and metrics; thick: the best by {metrics[0]}", chart)


def _shown(point: SweptRun, name: str) -> str:
    metrics = point.run.metrics
    return score(metrics[name]) if name in metrics else point.settings.get(name, "–")


def _axis(points: Sequence[SweptRun], name: str) -> list[float]:
    """Each point's place on one axis, from 0 to 1."""
    texts = [one.settings.get(name, "") for one in points]
    if all(name in one.run.metrics for one in points):
        values: list[float] = [one.run.metrics[name] for one in points]
    else:
        kinds = list(dict.fromkeys(texts))
        values = _numbers(texts) or [float(kinds.index(text)) for text in texts]
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]
