"""A pipeline's history as a page: metrics over time, with promotions, new data and failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redco_flow.report.charts import Figure, Group, PointChart
from redco_flow.report.numbers import duration, moment, score, signed
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table

DIGITS_OF_DATA = 8


@dataclass(frozen=True)
class HistoryEntry:
    """One run of a pipeline, beside the one before it.

    Args:
        cause: why its first failed stage ended, such as "out_of_memory"; empty where none failed.
        message: what that stage, or else the run, said last; empty of a run that went well.
        metrics: by name, as `status` has them.
        differences: of each metric, to the last run before that has it, where the two scores can
            be compared.
        not_compared: why a metric has no difference to the last run before that has it.
        data: digest of what identifies the raw data; empty before a stage has a result.
        data_changed: whether raw data of stages that this run and the last before it with
            results both have differ; None where there is nothing to compare.
        code_changed: whether modules that such stages import differ.
        artifacts: the ids of all that its stages have made or reused.
    """

    run: str
    created_at: str
    state: str
    seconds: float | None
    sweep: str
    cause: str
    message: str
    metrics: dict[str, float]
    differences: dict[str, float]
    not_compared: dict[str, str]
    data: str
    data_changed: bool | None
    code_changed: bool | None
    artifacts: tuple[str, ...] = ()

    @property
    def failure(self) -> str:
        """Why it failed; empty of a run that went well."""
        return " ".join(filter(None, (self.cause, self.message)))

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON value."""
        return asdict(self)


Promoted = Mapping[str, Sequence[str]]


def history_page(
    pipeline: str,
    points: Sequence[HistoryEntry],
    metrics: Sequence[str],
    promoted: Promoted,
    now: str,
) -> RunsPage:
    """Return a pipeline's history.

    Args:
        points: its runs, oldest first.
        metrics: which are shown.
        promoted: by run, the aliases that its checkpoints got, with the time: "production, 2026-…".
        now: the time as `utc_now` gives it.
    """
    done = sum(point.state == "completed" for point in points)
    promotions = [name for point in points for name in promoted.get(point.run, ())]
    return RunsPage(
        of="history",
        title=pipeline,
        facts=[
            ("runs", f"{done} of {len(points)} completed"),
            ("first", moment(points[0].created_at) if points else "–"),
            ("last", moment(points[-1].created_at) if points else "–"),
            ("last promotion", promotions[-1] if promotions else "none"),
        ],
        sections=[
            Section(
                "Over time",
                figures=[_figure(points, name, promoted) for name in metrics],
                note=_NOTE,
            ),
            Section("Runs", [_table(points, metrics, promoted)]),
        ],
        built_at=now,
    )


_NOTE = (
    "A failed run has no score and is drawn at the score of the run before. val/… was measured by "
    "the training, on its validation rows."
)


def _figure(points: Sequence[HistoryEntry], name: str, promoted: Promoted) -> Figure:
    chart = PointChart(
        title=f"{name} over time",
        x_label="created (UTC)",
        y_label=name,
        groups=[group for group in _groups(points, name, promoted) if group.xs],
        x_kind="date",
    )
    return Figure(name, chart)


def _groups(points: Sequence[HistoryEntry], name: str, promoted: Promoted) -> Iterator[Group]:
    scored = [point for point in points if name in point.metrics]
    texts = {one.run: "\n".join(_told(one, name, promoted)) for one in scored}
    marked = (
        ("score", scored, 1, "circle", 8.0),
        ("new data", [one for one in scored if one.data_changed], 6, "diamond-open", 17.0),
        ("promoted", [one for one in scored if one.run in promoted], 3, "star", 17.0),
    )
    for label, ones, colour, symbol, thickness in marked:
        yield Group(
            label,
            [_time(one) for one in ones],
            [one.metrics[name] for one in ones],
            [texts[one.run] for one in ones],
            colour,
            symbol,
            has_line=label == "score",
            thickness=thickness,
        )
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


def _told(point: HistoryEntry, name: str, promoted: Promoted) -> Iterator[str]:
    difference = point.differences.get(name)
    change = f" ({signed(difference)})" if difference else ""
    yield f"{name} {score(point.metrics[name])}{change}"
    if name in point.not_compared:
        yield f"not compared with the run before: {point.not_compared[name]}"
    yield point.run
    yield moment(point.created_at)
    if point.data:
        yield f"data {point.data[:DIGITS_OF_DATA]}{', new' if point.data_changed else ''}"
    yield from (f"promoted: {text}" for text in promoted.get(point.run, ()))


def _score_before(points: Sequence[HistoryEntry], index: int, name: str) -> float | None:
    """The score of the last run before that has one; of the first after where none has."""
    around = [*points[index::-1], *points[index:]]
    return next((one.metrics[name] for one in around if name in one.metrics), None)


def _time(point: HistoryEntry) -> str:
    """As Plotly reads dates: without a zone, so that it is shown as it stands, in UTC."""
    return point.created_at[:19].replace("T", " ")


def _table(points: Sequence[HistoryEntry], metrics: Sequence[str], promoted: Promoted) -> Table:
    rows = [
        [
            Cell(one.run, note="; ".join(promoted.get(one.run, ()))),
            Cell("", mark=one.state, note=one.failure),
            *(_score(one, name) for name in metrics),
            Cell(duration(one.seconds), is_number=True),
            Cell(one.created_at[:16].replace("T", " "), is_number=True),
            Cell(one.data[:DIGITS_OF_DATA], note="new" if one.data_changed else ""),
        ]
        for one in reversed(points)
    ]
    header = ["run", "state", *metrics, "time", "created (UTC)", "data"]
    return Table("Runs, newest first", header, rows)


def _score(point: HistoryEntry, name: str) -> Cell:
    difference = point.differences.get(name)
    note = "" if difference is None else signed(difference) if difference else "="
    note = point.not_compared.get(name, note)
    return Cell(score(point.metrics.get(name)), is_number=True, note=note)
