"""Two runs' differences as a page: group by group, metrics with intervals, curves overlaid."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from redco_flow.report.comparison import overlaid, read_compared
from redco_flow.report.numbers import number, score, signed
from redco_flow.report.run_diff.changes import Change
from redco_flow.report.run_diff.measures import MetricChange
from redco_flow.report.run_diff.runs import RunDiff
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table

_MAX_VALUE = 120


def diff_page(diff: RunDiff, now: str) -> RunsPage:
    """Return a page of what differs between two runs.

    Args:
        now: the time as `utc_now` gives it.
    """
    first, second = diff.first.run.id, diff.second.run.id
    runs = [read_compared(side.run) for side in (diff.first, diff.second)]
    remarks = "; ".join(diff.remarks)
    return RunsPage(
        of="diff",
        title=f"{first} and {second}",
        facts=[
            ("first", f"{first}: {diff.first.state}"),
            ("second", f"{second}: {diff.second.state}"),
            ("equal", ", ".join(diff.equal) or "nothing"),
            *([("not read", remarks)] if remarks else []),
        ],
        sections=[
            Section("Metrics", [_metrics(diff.metrics)] if diff.metrics else []),
            *(_section(name, changes, diff) for name, changes in diff.changes.items()),
            Section("Curves", figures=overlaid(runs)),
        ],
        built_at=now,
    )


def _section(name: str, changes: Sequence[Change], diff: RunDiff) -> Section:
    # What was measured is rounded, what was set is not.
    value = number if name == "training" else _exact
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


def _exact(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _metrics(changes: Sequence[MetricChange]) -> Table:
    header = ["metric", "first", "second", "difference", "95 % interval", "better"]
    return Table("Metrics that differ", header, [list(_row(one)) for one in changes])


def _row(change: MetricChange) -> Iterator[Cell]:
    yield Cell(change.key)
    yield Cell(score(change.first), is_number=True)
    yield Cell(score(change.second), is_number=True)
    yield Cell("" if change.difference is None else signed(change.difference), is_number=True)
    if change.low is None or change.high is None:
        why = f"not compared: {change.not_compared}" if change.not_compared else change.remark
        yield Cell("", note=why)
        yield Cell("")
        return
    yield Cell(f"{signed(change.low)} to {signed(change.high)}", is_number=True)
    yield Cell(_verdict(change))


def _verdict(change: MetricChange) -> str:
    if not change.is_significant or not change.difference:
        return "not significant"
    return "second" if (change.difference > 0) == (change.better == "max") else "first"
