"""Describe charts as Plotly figures: lines over steps or time, points of several runs.

Has only data and axes; `assets/page.js` draws them in the browser, with the page's colours
and the reader's choices (log scale, smoothing). Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from redco_flow.report.numbers import number

Point = tuple[float, float]
Gap = tuple[float, None]
XKind = Literal["linear", "date", "category"]

NUM_COLOURS = 6  # of the page's palette
_LOG_FROM_RATIO = 10.0  # from here on a linear axis flattens the small values into one line
_NUM_BUCKETS = 600
_MAX_MARKERS = 60
_SIGNIFICANT_DIGITS = 6
_DASHES = ("solid", "longdash", "dash", "dot", "dashdot", "longdashdot")


def keep_extremes(points: Sequence[Point | Gap], num_buckets: int) -> list[Point | Gap]:
    """Return at most `2 * num_buckets + 2` of the points, in order, or all if they are fewer.

    Args:
        points: ascending by x; gaps stay.
        num_buckets: stretches of x, at least 1; of each the lowest and the highest point stay,
            and of the whole the first and the last.
    """
    if len(points) <= 2 * num_buckets + 2:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / num_buckets or 1.0
    kept = {0, len(points) - 1}
    bucket: list[int] = []
    current = 0
    for index, (x, y) in enumerate(points):
        if y is None:
            kept.add(index)
            continue
        place = min(int((x - first) / width), num_buckets - 1)
        if place != current:
            kept |= _extremes(points, bucket)
            bucket, current = [], place
        bucket.append(index)
    kept |= _extremes(points, bucket)
    return [points[index] for index in sorted(kept)]


def _extremes(points: Sequence[Point | Gap], indices: Sequence[int]) -> set[int]:
    if not indices:
        return set()
    return {
        min(indices, key=lambda index: points[index][1] or 0.0),
        max(indices, key=lambda index: points[index][1] or 0.0),
    }


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        label: its name in the legend.
        points: (x, y), ascending by x, finite; where y is None the line has a gap, which is never
            the first or the last point.
        colour: from 1, of the page's palette; beyond the palette with another stroke.
        is_sparse: mark each point, for a line of few measurements.
    """

    label: str
    points: Sequence[Point | Gap]
    colour: int
    is_sparse: bool = False


@dataclass(frozen=True)
class LineChart:
    """Lines over one x axis.

    Args:
        title: what the chart shows, for readers who do not see it.
        x_label, y_label: with their units.
        lines: each with at least one point.
        height: in pixels.
        may_be_log: the y axis begins as a logarithmic one where the values span a factor of 10.
        from_zero: the y axis begins at 0.
        x_range: the first and the last x, to draw several charts over the same stretch.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    height: int = 340
    may_be_log: bool = False
    from_zero: bool = False
    x_range: Point | None = None

    @property
    def num_left_out(self) -> int:
        """Number of points that are not drawn, because lower and higher ones next to them are."""
        return sum(len(line.points) - len(_drawn(line)) for line in self.lines)

    @property
    def description(self) -> str:
        """The chart in a sentence, for readers who do not see it."""
        said = [
            f"{line.label or self.y_label}: from {number(line.points[0][1])} at "
            f"{self.x_label} {number(line.points[0][0])} to {number(line.points[-1][1])} at "
            f"{self.x_label} {number(line.points[-1][0])}"
            for line in self.lines
        ]
        return f"{self.title}. {'; '.join(said)}."


@dataclass(frozen=True)
class Group:
    """Points of one colour in a `PointChart`.

    Args:
        label: its name in the legend.
        xs: numbers, ISO times or names of categories, as the chart's `x_kind` says.
        ys: finite.
        texts: what the pointer shows of each point, a line for each of its lines.
        symbol: of Plotly: circle, star, x, ….
        has_line: join the points in order.
        thickness: of points, in pixels; lines are a fourth of it.
    """

    label: str
    xs: Sequence[float | str]
    ys: Sequence[float]
    texts: Sequence[str]
    colour: int
    symbol: str = "circle"
    has_line: bool = False
    thickness: float = 9.0


@dataclass(frozen=True)
class PointChart:
    """Labelled points: runs over time, points of a sweep.

    Args:
        title: what the chart shows, for readers who do not see it.
        x_kind: what the xs are.
        ticks: (value, text) of the y axis where it is not to have its own.
        may_be_log_x: the x axis is logarithmic where the values span a factor of 10.
    """

    title: str
    x_label: str
    y_label: str
    groups: Sequence[Group]
    x_kind: XKind = "linear"
    height: int = 320
    ticks: Sequence[tuple[float, str]] = field(default_factory=tuple)
    may_be_log_x: bool = False
    has_legend: bool = True

    @property
    def description(self) -> str:
        """The chart in a sentence, for readers who do not see it."""
        ys = [y for group in self.groups for y in group.ys]
        if not ys or self.ticks:
            return f"{self.title}."
        return f"{self.title}: {len(ys)} points from {number(min(ys))} to {number(max(ys))}."


Chart = LineChart | PointChart


@dataclass(frozen=True)
class Figure:
    """A chart and what is said under it."""

    title: str
    chart: Chart
    is_wide: bool = True
    note: str = ""

    @property
    def plot(self) -> dict[str, Any]:
        """The figure for the page's script."""
        return plotly_figure(self.chart)

    @property
    def has_smoothing(self) -> bool:
        """Whether any line is dense enough for smoothing to say something."""
        chart = self.chart
        return isinstance(chart, LineChart) and any(_is_dense(line) for line in chart.lines)

    @property
    def has_log(self) -> bool:
        """Whether a logarithmic y axis can show any of it."""
        if isinstance(self.chart, PointChart):
            return False
        return any(y and y > 0 for line in self.chart.lines for _, y in line.points)


def plotly_figure(chart: Chart) -> dict[str, Any]:
    """Return a chart as `data` and `layout` of Plotly; texts are escaped, for Plotly reads tags.

    `meta` of each of the data is for the page's script: `colour` of the palette, and whether the
    trace is `dense` enough to be smoothed.
    """
    if isinstance(chart, LineChart):
        return _of_lines(chart)
    return _of_points(chart)


def _of_lines(chart: LineChart) -> dict[str, Any]:
    y_axis: dict[str, Any] = {"title": {"text": escape(chart.y_label)}, "hoverformat": ".5~g"}
    values = [y for line in chart.lines for _, y in line.points if y is not None]
    if chart.may_be_log and min(values) > 0 and max(values) / min(values) >= _LOG_FROM_RATIO:
        y_axis["type"] = "log"
    if chart.from_zero:
        y_axis["rangemode"] = "tozero"
    x_axis: dict[str, Any] = {"title": {"text": escape(chart.x_label)}, "hoverformat": ",~f"}
    if chart.x_range and chart.x_range[0] < chart.x_range[1]:
        x_axis["range"] = list(chart.x_range)
    return {
        "data": [_line_trace(line, chart) for line in chart.lines],
        "layout": {
            "height": chart.height,
            "hovermode": "x unified",
            "showlegend": len(chart.lines) > 1,
            "xaxis": x_axis,
            "yaxis": y_axis,
        },
    }


def _line_trace(line: Line, chart: LineChart) -> dict[str, Any]:
    points = _drawn(line)
    is_marked = len(points) == 1 or (line.is_sparse and len(points) <= _MAX_MARKERS)
    return {
        "type": "scatter",
        "name": escape(line.label or chart.y_label),
        "x": [x for x, _ in points],
        "y": [None if y is None else _rounded(y) for _, y in points],
        "mode": "lines+markers" if is_marked else "lines",
        "line": {"width": 1.8, "dash": _dash(line.colour) if len(chart.lines) > 1 else "solid"},
        "meta": {"colour": _of_palette(line.colour), "dense": _is_dense(line)},
    }


def _of_points(chart: PointChart) -> dict[str, Any]:
    y_axis: dict[str, Any] = {"title": {"text": escape(chart.y_label)}, "hoverformat": ".5~g"}
    if chart.ticks:
        y_axis |= {
            "tickvals": [value for value, _ in chart.ticks],
            "ticktext": [escape(text) for _, text in chart.ticks],
        }
    x_axis: dict[str, Any] = {"title": {"text": escape(chart.x_label)}, "type": chart.x_kind}
    xs = [x for group in chart.groups for x in group.xs if isinstance(x, int | float)]
    is_wide = chart.may_be_log_x and xs and min(xs) > 0 and max(xs) / min(xs) >= _LOG_FROM_RATIO
    if chart.x_kind == "linear" and is_wide:
        x_axis["type"] = "log"
    return {
        "data": [_point_trace(group) for group in chart.groups],
        "layout": {
            "height": chart.height,
            "hovermode": "closest",
            "showlegend": chart.has_legend and len(chart.groups) > 1,
            "xaxis": x_axis,
            "yaxis": y_axis,
        },
    }


def _point_trace(group: Group) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": escape(group.label),
        "x": [escape(x) if isinstance(x, str) else x for x in group.xs],
        "y": [_rounded(y) for y in group.ys],
        "text": [escape(text).replace("\n", "<br>") for text in group.texts],
        "hoverinfo": "text",
        "mode": "lines+markers" if group.has_line else "markers",
        "line": {"width": group.thickness / 4, "dash": _dash(group.colour)},
        "marker": {"size": group.thickness, "symbol": group.symbol},
        "meta": {"colour": _of_palette(group.colour), "dense": False},
    }


def _drawn(line: Line) -> list[Point | Gap]:
    return keep_extremes(line.points, _NUM_BUCKETS)


def _is_dense(line: Line) -> bool:
    return not line.is_sparse and len(line.points) > 2


def _of_palette(colour: int) -> int:
    return (colour - 1) % NUM_COLOURS + 1


def _dash(colour: int) -> str:
    """The strokes of one colour after the other, so that no two lines look the same."""
    first, again = (colour - 1) % NUM_COLOURS, (colour - 1) // NUM_COLOURS
    return _DASHES[(first + again) % len(_DASHES)]


def _rounded(value: float) -> float:
    """Enough digits for every screen, in few bytes."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
