"""The verb diff: what differs between two runs, in groups, and what does not."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from redco_flow.cli.arguments import Verbs, add_html, add_json, add_workspace, workspace_path
from redco_flow.cli.text import columns, number, short_id
from redco_flow.errors import UsageError
from redco_flow.report.numbers import value_text
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import find_run
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.report.run_diff.changes import Change
    from redco_flow.report.run_diff.measures import MetricChange
    from redco_flow.report.run_diff.runs import RunDiff

_MAX_CHANGES = 40
_MAX_PATCH_LINES = 60
_HEX = frozenset("0123456789abcdef")
_TITLES = {"placement": "placement (no part of a result's identity)"}


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    diff = verbs.add("diff", _diff)
    diff.add_argument("first", metavar="RUN", help="the earlier run: id, its beginning or path")
    diff.add_argument("second", nargs="?", default="@last", metavar="RUN", help="the later (@last)")
    diff.add_argument(
        "--resamples",
        type=int,
        default=10_000,
        metavar="N",
        help="draws of the bootstrap behind the intervals (10000); 0 for no intervals",
    )
    diff.add_argument("--all", action="store_true", help="every change and the whole patch")
    add_html(diff)
    add_json(diff)
    add_workspace(diff)


def _diff(options: argparse.Namespace) -> int:
    # Imported here: the other verbs need not wait for it.
    from redco_flow.report.run_diff.measures import Resampling
    from redco_flow.report.run_diff.runs import diff_runs

    if options.resamples < 0:
        raise UsageError(f"--resamples {options.resamples}: 0 or more.")
    workspace = Workspace(workspace_path(options).absolute())
    first, second = find_run(workspace, options.first), find_run(workspace, options.second)
    found = diff_runs(first, second, Resampling(options.resamples))
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        print("\n".join(diff_lines(found, is_whole=options.all)))
    if options.html:
        from redco_flow.report.comparison import comparison_page, read_compared
        from redco_flow.report.runs_page import write_page

        page = comparison_page([read_compared(run) for run in (first, second)], utc_now(), found)
        sys.stderr.write(f"page: {write_page(page, options.html)}\n")
    return 0


def diff_lines(diff: RunDiff, *, is_whole: bool = False) -> list[str]:
    """Return two runs' differences as lines: only what differs, then what is equal.

    Args:
        is_whole: every change of every group, and the whole patch.
    """
    sides = {"first": diff.first, "second": diff.second}
    heads = [[name, one.run.id, one.state, _created(one.run.record)] for name, one in sides.items()]
    lines = _aligned(heads, indent="")
    for name, changes in diff.changes.items():
        found = list(_lines(changes, is_whole, is_measured=name == "training"))
        found += _patch_lines(diff, is_whole) if name == "code" else []
        lines += ["", _TITLES.get(name, name), *found] if found else []
    lines += ["", "metrics", *_metric_lines(diff.metrics)] if diff.metrics else []
    lines += ["", f"equal: {', '.join(diff.equal) or 'nothing'}"]
    return [*lines, *(f"not read: {remark}" for remark in diff.remarks)]


def _created(record: dict[str, Any]) -> str:
    return str(record.get("created_at") or "")[:16].replace("T", " ")


def _lines(changes: Sequence[Change], is_whole: bool, *, is_measured: bool) -> Iterator[str]:
    """A group's changes; what was measured is rounded, what was set is not."""
    if not changes:
        return
    shown = changes if is_whole else changes[:_MAX_CHANGES]
    rows = [
        [
            change.key,
            number(change.first) if is_measured else _side(change.first, change.first_place),
            "→",
            number(change.second) if is_measured else _side(change.second, change.second_place),
            f"({', '.join(change.stages)})" if change.stages else "",
        ]
        for change in shown
    ]
    yield from _aligned(rows)
    if len(changes) > len(shown):
        yield f"  and {len(changes) - len(shown)} more (--all shows them)"


def _side(value: Any, place: str) -> str:
    return f"{_value(value)} ({place})" if place else _value(value)


def _value(value: Any) -> str:
    is_digest = isinstance(value, str) and len(value) in (40, 64) and set(value) <= _HEX
    return short_id(value) if is_digest else value_text(value)


def _metric_lines(changes: Sequence[MetricChange]) -> Iterator[str]:
    header = ["METRIC", "FIRST", "SECOND", "DIFFERENCE", "95 % INTERVAL", ""]
    rows = [
        [
            change.key,
            number(change.first) or "–",
            number(change.second) or "–",
            _signed(change.difference),
            _interval(change),
            _verdict(change),
        ]
        for change in changes
    ]
    yield from _aligned([header, *rows])


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4g}"


def _interval(change: MetricChange) -> str:
    return "" if change.low is None else f"{_signed(change.low)} to {_signed(change.high)}"


def _verdict(change: MetricChange) -> str:
    """Whether the second run is better or worse, or why that cannot be said."""
    if change.not_compared:
        return f"not compared: {change.not_compared}"
    if change.is_significant is None or not change.difference or math.isnan(change.difference):
        return f"no interval: {change.remark}" if change.remark else ""
    if not change.is_significant:
        return "not significant"
    is_better = (change.difference > 0) == (change.better == "max")
    return "better" if is_better else "worse"


def _patch_lines(diff: RunDiff, is_whole: bool) -> Iterator[str]:
    lines = diff.patch.text.splitlines()
    if diff.patch.remark:
        yield f"  patch {diff.patch.remark}" if lines else f"  no patch: {diff.patch.remark}"
    shown = lines if is_whole else lines[:_MAX_PATCH_LINES]
    yield from (f"  {line}" for line in shown)
    if len(lines) > len(shown):
        yield f"  … {len(lines) - len(shown)} more lines of the patch (--all shows them)"


def _aligned(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> list[str]:
    """Rows in aligned columns, without a header."""
    lines = columns(rows[1:], rows[0]).splitlines()
    return [f"{indent}{line}" for line in lines]
