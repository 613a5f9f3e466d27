"""A pipeline's history as a page: metrics over time, with promotions, new data and failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from redco_flow.report.charts import Figure, Group, PointChart
from redco_flow.report.numbers import duration, moment, score, signed
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table

_DIGITS_OF_DATA = 8


@dataclass(frozen=True)
class HistoryPoint:
    """One run of a pipeline.

    Args:
        failure: why it failed; empty of a run that went well.
        differences: of each metric, to the last run before that has it.
        data: digest of its raw data; empty where it is not known.
        is_data_new: whether the data are others than those of the run before.
        promoted: the names that its checkpoints were given, with the time: "production, 2026-…".
        not_compared: why a metric has no difference to the last run before that has it.
    """

    run: str
    created_at: str
    state: str
    seconds: float | None
    failure: str
    metrics: Mapping[str, float]
    differences: Mapping[str, float]
    data: str
    is_data_new: bool
    promoted: Sequence[str]
    not_compared: Mapping[str, str] = field(default_factory=dict)


def history_page(
    pipeline: str, points: Sequence[HistoryPoint], metrics: Sequence[str], now: str
) -> RunsPage:
    """Return a pipeline's history.

    Args:
        points: its runs, oldest first.
        metrics: which are shown.
        now: the time as `utc_now` gives it.
    """
    done = sum(point.state == "completed" for point in points)
    promoted = [name for point in points for name in point.promoted]
    return RunsPage(
        of="history",
        title=pipeline,
        facts=[
            ("runs", f"{done} of {len(points)} completed"),
            ("first", moment(points[0].created_at) if points else "–"),
            ("last", moment(points[-1].created_at) if points else "–"),
            ("last promotion", promoted[-1] if promoted else "none"),
        ],
        sections=[
            Section("Over time", figures=[_figure(points, name) for name in metrics], note=_NOTE),
            Section("Runs", [_table(points, metrics)]),
        ],
        built_at=now,
    )


_NOTE = (
    "A failed run has no score and is drawn at the score of the run before. val/… was measured by "
    "the training, on its validation rows."
)


def _figure(points: Sequence[HistoryPoint], name: str) -> Figure:
    chart = PointChart(
        title=f"{name} over time",
        x_label="created (UTC)",
        y_label=name,
        groups=[group for group in _groups(points, name) if group.xs],
        x_kind="date",
    )
    return Figure(name, chart)


def _groups(points: Sequence[HistoryPoint], name: str) -> Iterator[Group]:
    scored = [point for point in points if name in point.metrics]
    yield _group("score", scored, name, 1, has_line=True)
    yield _group(
        "new data", [one for one in scored if one.is_data_new], name, 6, "diamond-open", 17
    )
    yield _group("promoted", [one for one in scored if one.promoted], name, 3, "star", 17)
    failed = [(one, _score_before(points, index, name)) for index, one in enumerate(points)]
    placed = [(one, value) for one, value in failed if one.failure and value is not None]
    yield Group(
        "failed",
        [_time(one) for one, _ in placed],
        [value for _, value in placed],
        [f"{one.run}\n{one.failure}" for one, _ in placed],
        5,
        "x",
        thickness=12,
    )


def _group(
    label: str,
    points: Sequence[HistoryPoint],
    name: str,
    colour: int,
    symbol: str = "circle",
    thickness: float = 8,
    *,
    has_line: bool = False,
) -> Group:
    return Group(
        label,
        [_time(one) for one in points],
        [one.metrics[name] for one in points],
        ["\n".join(_told(one, name)) for one in points],
        colour,
        symbol,
        has_line,
        thickness,
    )


def _told(point: HistoryPoint, name: str) -> Iterator[str]:
    difference = point.differences.get(name)
    change = f" ({signed(difference)})" if difference else ""
    yield f"{name} {score(point.metrics[name])}{change}"
    if name in point.not_compared:
        yield f"not compared with the run before: {point.not_compared[name]}"
    yield point.run
    yield moment(point.created_at)
    if point.data:
        yield f"data {point.data[:_DIGITS_OF_DATA]}{', new' if point.is_data_new else ''}"
    yield from (f"promoted: {text}" for text in point.promoted)


def _score_before(points: Sequence[HistoryPoint], index: int, name: str) -> float | None:
    """The score of the last run before that has one; of the first after where none has."""
    around = [*points[index::-1], *points[index:]]
    return next((one.metrics[name] for one in around if name in one.metrics), None)


def _time(point: HistoryPoint) -> str:
    """As Plotly reads dates: without a zone, so that it is shown as it stands, in UTC."""
    return point.created_at[:19].replace("T", " ")


def _table(points: Sequence[HistoryPoint], metrics: Sequence[str]) -> Table:
    rows = [
        [
            Cell(one.run, note="; ".join(one.promoted)),
            Cell("", mark=one.state, note=one.failure),
            *(_score(one, name) for name in metrics),
            Cell(duration(one.seconds), is_number=True),
            Cell(one.created_at[:16].replace("T", " "), is_number=True),
            Cell(one.data[:_DIGITS_OF_DATA], note="new" if one.is_data_new else ""),
        ]
        for one in reversed(points)
    ]
    header = ["run", "state", *metrics, "time", "created (UTC)", "data"]
    return Table("Runs, newest first", header, rows)


def _score(point: HistoryPoint, name: str) -> Cell:
    difference = point.differences.get(name)
    note = "" if difference is None else signed(difference) if difference else "="
    note = point.not_compared.get(name, note)
    return Cell(score(point.metrics.get(name)), is_number=True, note=note)
