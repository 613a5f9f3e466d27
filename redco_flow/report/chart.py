"""Draw a line chart as inline SVG: axes with units, lines labelled at their ends, values on hover.

Colours and fonts are the page's style sheet's. No script: a stretch of the chart under the
pointer shows its values by CSS, and as a tooltip by `<title>`. Knows nothing of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from markupsafe import Markup

from redco_flow.report.numbers import number

_LOG_FROM_RATIO = 10.0  # from here on a linear axis flattens the small values into one line
_MARGIN = 0.04
_SMALLEST_PLAIN_STEP, _LARGEST_PLAIN_STEP = 1e-3, 1e6  # beyond, ticks are told as powers of ten


@dataclass(frozen=True)
class Axis:
    """One axis.

    Args:
        low, high: values at its ends; positive if it is logarithmic.
        ticks: values within, ascending.
        labels: their texts.
        is_log: whether equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    is_log: bool = False

    def fraction(self, value: float) -> float:
        """Return where a value lies, from 0 at the low end to 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_axis(
    values: Iterable[float],
    *,
    num_ticks: int = 5,
    from_zero: bool = False,
    may_be_log: bool = False,
    is_tight: bool = False,
    are_counts: bool = False,
) -> Axis:
    """Return an axis that holds all the values.

    Args:
        values: finite.
        num_ticks: about how many.
        from_zero: begin at 0 where no value is below.
        may_be_log: be logarithmic if all values are positive and the largest is at least 10
            times the smallest.
        is_tight: end at the extreme values, without a margin.
        are_counts: put ticks at whole numbers only.
    """
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if may_be_log and low > 0 and high / low >= _LOG_FROM_RATIO:
        return _log_axis(low, high)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high == 0:
        low, high = 0.0, 1.0
    elif low == high:
        low, high = low - abs(low) * 0.1, high + abs(high) * 0.1
    elif not is_tight:
        margin = (high - low) * _MARGIN
        low = low if from_zero and low == 0 else low - margin
        high += margin
    step = _round_step((high - low) / num_ticks)
    if are_counts:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(low, high, ticks, tuple(_tick_text(tick, step) for tick in ticks))


def _log_axis(low: float, high: float) -> Axis:
    low, high = low / 1.15, high * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low <= 1e3 else (1,)
    every = max(1, math.ceil(len(decades) / 8))
    ticks = tuple(
        factor * 10.0**decade
        for decade in decades[::every]
        for factor in factors
        if low <= factor * 10.0**decade <= high
    )
    return Axis(low, high, ticks, tuple(_plain(tick) for tick in ticks), is_log=True)


def _round_step(rough: float) -> float:
    """The nearest of 1, 2 and 5 times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _tick_text(tick: float, step: float) -> str:
    """All ticks of an axis with the same number of decimals."""
    if tick == 0 or abs(tick) < step / 2:
        return "0"
    if not _SMALLEST_PLAIN_STEP <= step < _LARGEST_PLAIN_STEP:
        return number(float(f"{tick:.6g}"))
    if step >= 1000:
        return f"{tick / 1000:,.0f}k"
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{tick:,.{decimals}f}"


def _plain(tick: float) -> str:
    if tick >= 1:
        return f"{tick:,.0f}"
    return f"{tick:g}" if tick >= 1e-3 else number(float(f"{tick:.6g}"))


Point = tuple[float, float]


def keep_extremes(points: Sequence[Point], num_buckets: int) -> list[Point]:
    """Return at most `2 * num_buckets + 2` of the points, in order, or all if they are so few.

    Args:
        points: ascending by x.
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
    for index, (x, _) in enumerate(points):
        place = min(int((x - first) / width), num_buckets - 1)
        if place != current:
            kept |= _extremes(points, bucket)
            bucket, current = [], place
        bucket.append(index)
    kept |= _extremes(points, bucket)
    return [points[index] for index in sorted(kept)]


def _extremes(points: Sequence[Point], indices: Sequence[int]) -> set[int]:
    if not indices:
        return set()
    return {
        min(indices, key=lambda index: points[index][1]),
        max(indices, key=lambda index: points[index][1]),
    }


_NUM_BUCKETS = 240
_MAX_STRETCHES = 120
_MAX_MARKERS = 60
_CHARACTER_WIDTH = 6.9
_LINE_HEIGHT = 15.0
_TOP, _BOTTOM = 34.0, 42.0


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        label: stands at its end.
        points: (x, y), ascending by x, finite.
        colour: 1 to 6, of the page's palette; each has its own stroke too.
        is_sparse: mark each point, for a line of few measurements.
    """

    label: str
    points: Sequence[Point]
    colour: int
    is_sparse: bool = False


@dataclass(frozen=True)
class LineChart:
    """What to draw.

    Args:
        title: what the chart shows, for those who do not see it.
        x_label, y_label: with their units.
        lines: each with at least one point.
        width, height: in pixels at full size.
        may_be_log: the y axis is logarithmic where the values span a factor of 10.
        from_zero: the y axis begins at 0.
        x_range: the first and the last x, to draw several charts over the same stretch.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    width: float = 920.0
    height: float = 320.0
    may_be_log: bool = False
    from_zero: bool = False
    x_range: tuple[float, float] | None = None

    @property
    def num_left_out(self) -> int:
        """How many points are not drawn, because lower and higher ones beside them are."""
        return sum(len(line.points) - len(_drawn(line)) for line in self.lines)


@dataclass(frozen=True)
class _Frame:
    """Where the axes lie in the picture."""

    x_axis: Axis
    y_axis: Axis
    left: float
    right: float
    top: float
    bottom: float

    def x(self, value: float) -> float:
        return self.left + self.x_axis.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.y_axis.fraction(value) * (self.bottom - self.top)


def draw(chart: LineChart) -> Markup:
    """Return the chart as an `<svg>` element."""
    frame = _frame(chart)
    parts = [
        *_grid(chart, frame),
        *(_line(line, frame) for line in chart.lines),
        *_end_labels(chart, frame),
        *_stretches(chart, frame),
    ]
    return Markup(
        '<svg class="chart" viewBox="0 0 {w:.0f} {h:.0f}" role="img" aria-label="{label}">'
        "{inner}</svg>"
    ).format(
        w=chart.width, h=chart.height, label=_description(chart), inner=Markup("\n").join(parts)
    )


def _frame(chart: LineChart) -> _Frame:
    points = list(chain.from_iterable(line.points for line in chart.lines))
    x_axis = make_axis(
        chart.x_range or (x for x, _ in points),
        num_ticks=max(3, int(chart.width / 110)),
        is_tight=True,
        are_counts=True,
    )
    y_axis = make_axis(
        (y for _, y in points),
        num_ticks=max(4, int(chart.height / 45)),
        may_be_log=chart.may_be_log,
        from_zero=chart.from_zero,
    )
    return _Frame(
        x_axis=x_axis,
        y_axis=y_axis,
        left=14 + _CHARACTER_WIDTH * max(map(len, y_axis.labels), default=1),
        right=chart.width - 18 - _CHARACTER_WIDTH * max(len(_label(line)) for line in chart.lines),
        top=_TOP,
        bottom=chart.height - _BOTTOM,
    )


def _grid(chart: LineChart, frame: _Frame) -> list[Markup]:
    parts = []
    for tick, text in zip(frame.y_axis.ticks, frame.y_axis.labels, strict=True):
        y = frame.y(tick)
        parts.append(
            Markup(
                '<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'
                '<text class="tick" x="{x:.1f}" y="{ty:.1f}" text-anchor="end">{text}</text>'
            ).format(left=frame.left, y=y, right=frame.right, x=frame.left - 7, ty=y + 4, text=text)
        )
    for tick, text in zip(frame.x_axis.ticks, frame.x_axis.labels, strict=True):
        parts.append(
            Markup(
                '<path class="axis" d="M{x:.1f} {y:.1f}v5"/>'
                '<text class="tick" x="{x:.1f}" y="{ty:.1f}" text-anchor="middle">{text}</text>'
            ).format(x=frame.x(tick), y=frame.bottom, ty=frame.bottom + 19, text=text)
        )
    scale = ", log scale" if frame.y_axis.is_log else ""
    parts.append(
        Markup(
            '<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>'
            '<text class="axis-name y-name" x="2" y="16">{y_label}</text>'
            '<text class="axis-name" x="{middle:.1f}" y="{x_y:.1f}" text-anchor="middle">'
            "{x_label}</text>"
        ).format(
            left=frame.left,
            bottom=frame.bottom,
            right=frame.right,
            y_label=chart.y_label + scale,
            middle=(frame.left + frame.right) / 2,
            x_y=chart.height - 5,
            x_label=chart.x_label,
        )
    )
    return parts


def _drawn(line: Line) -> list[Point]:
    return keep_extremes(line.points, _NUM_BUCKETS)


def _line(line: Line, frame: _Frame) -> Markup:
    points = [(frame.x(x), frame.y(y)) for x, y in _drawn(line)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    is_marked = line.is_sparse and len(points) <= _MAX_MARKERS
    marked = points if is_marked or len(points) == 1 else []
    markers = Markup("").join(
        Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(x, y) for x, y in marked
    )
    return Markup('<g class="line colour-{}"><path d="M{}"/>{}</g>').format(
        line.colour, path, markers
    )


def _end_labels(chart: LineChart, frame: _Frame) -> list[Markup]:
    """Each line's name and last value at its end, moved apart where they would overlap."""
    ends = sorted(
        ((frame.y(line.points[-1][1]), line) for line in chart.lines),
        key=lambda end: (end[0], end[1].label),
    )
    places = _spread([y for y, _ in ends], frame.top, frame.bottom)
    return [
        Markup(
            '<path class="leader" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'
            '<text class="end-label colour-{colour}" x="{x:.1f}" y="{y:.1f}">{text}</text>'
        ).format(
            x1=frame.x(line.points[-1][0]),
            y1=y,
            x2=frame.right + 9,
            y2=place,
            colour=line.colour,
            x=frame.right + 12,
            y=place + 4,
            text=_label(line),
        )
        for (y, line), place in zip(ends, places, strict=True)
    ]


def _label(line: Line) -> str:
    return f"{line.label} {number(float(line.points[-1][1]))}"


def _spread(places: Sequence[float], top: float, bottom: float) -> list[float]:
    """Move ascending places apart to a line's height, and back above the bottom."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + _LINE_HEIGHT if moved else top))
    limit = bottom
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - _LINE_HEIGHT
    return moved


def _stretches(chart: LineChart, frame: _Frame) -> list[Markup]:
    """Stretches of the chart, each with the values of one logged x, shown under the pointer."""
    xs = sorted({x for line in chart.lines for x, _ in line.points})
    every = math.ceil(len(xs) / _MAX_STRETCHES)
    # What is measured rarely can always be reached.
    rare = {x for line in chart.lines if line.is_sparse for x, _ in line.points}
    chosen = xs[:: max(1, every)]
    if len(rare) <= _MAX_STRETCHES:
        chosen = sorted(rare.union(chosen))
    values = [dict(line.points) for line in chart.lines]
    parts = []
    for index, x in enumerate(chosen):
        before = chosen[index - 1] if index else x
        after = chosen[index + 1] if index + 1 < len(chosen) else x
        left = frame.x((before + x) / 2) if index else frame.left - 8
        right = frame.x((after + x) / 2) if after != x else frame.right + 8
        here = [
            (line, found[x]) for line, found in zip(chart.lines, values, strict=True) if x in found
        ]
        parts.append(_stretch(chart, frame, x, (left, right), here))
    return parts


def _stretch(
    chart: LineChart,
    frame: _Frame,
    x: float,
    edges: tuple[float, float],
    here: Sequence[tuple[Line, float]],
) -> Markup:
    said = [f"{chart.x_label} {number(int(x) if float(x).is_integer() else x)}"]
    said += [f"{line.label or chart.y_label} {number(float(y))}" for line, y in here]
    dots = Markup("").join(
        Markup('<circle class="colour-{}" cx="{:.1f}" cy="{:.1f}" r="4"/>').format(
            line.colour, frame.x(x), frame.y(y)
        )
        for line, y in here
    )
    return Markup(
        '<g class="stretch"><title>{text}</title>'
        '<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        '<path d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>{dots}'
        '<text x="{tx:.1f}" y="16" text-anchor="end">{text}</text></g>'
    ).format(
        text=" · ".join(said),
        left=edges[0],
        top=frame.top,
        width=max(0.1, edges[1] - edges[0]),
        height=frame.bottom - frame.top,
        x=frame.x(x),
        bottom=frame.bottom,
        dots=dots,
        tx=chart.width - 4,
    )


def _description(chart: LineChart) -> str:
    """The chart in a sentence, for those who do not see it."""
    said = [
        f"{line.label}: from {number(float(line.points[0][1]))} at {chart.x_label} "
        f"{number(line.points[0][0])} to {number(float(line.points[-1][1]))} at {chart.x_label} "
        f"{number(line.points[-1][0])}"
        for line in chart.lines
    ]
    return f"{chart.title}. {'; '.join(said)}."
