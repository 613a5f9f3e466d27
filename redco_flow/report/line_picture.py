"""Draw a chart of lines as a small SVG picture, for pages that run no script of ours.

Markdown shows it from a `data:` URL, in the Prefect UI as elsewhere; no library draws it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from redco_flow.report.charts import NUM_COLOURS, LineChart, Point, keep_extremes
from redco_flow.report.numbers import number

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 34, 44
_NUM_BUCKETS = 150  # more points than the picture has pixels to tell them apart
_NUM_TICKS = 5
_MOST_MARKERS = 40
_LOG_FROM_RATIO = 10.0
# Of the page's palette in daylight: the picture's ground is white whatever the reader's scheme.
_COLOURS = ("#0b62c4", "#c2410c", "#15803d", "#7c3aed", "#b91c6b", "#0f766e")
assert len(_COLOURS) == NUM_COLOURS


@dataclass(frozen=True)
class _Axis:
    """Numbers along one side.

    Args:
        low, high: of the numbers; low < high.
        start, end: of the side, in pixels.
        is_log: equal distances are equal ratios; all numbers are above 0 then.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        scale: Callable[[float], float] = math.log if self.is_log else float
        low, high = scale(self.low), scale(self.high)
        return self.start + (scale(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """A few round numbers between the ends."""
        if self.is_log and self.high / self.low >= 100:
            exponents = range(
                math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1
            )
            every = -(-len(exponents) // _NUM_TICKS)
            return [10.0**exponent for exponent in exponents[::every]]
        step = _round_step((self.high - self.low) / _NUM_TICKS)
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step) + 1)]


def picture_address(chart: LineChart) -> str:
    """Return a chart as a `data:` URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(draw_lines(chart).encode()).decode()


def draw_lines(chart: LineChart) -> str:
    """Return a chart as an SVG document; it must have a line with a point."""
    across, up = _axes(chart)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="sans-serif" font-size="12" '
        f'fill="#3f4754"><title>{escape(chart.description)}</title>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="#fff"/>',
        *_grid(across, up),
        *_labels(chart),
        *_drawn_lines(chart, across, up),
        "</svg>",
    ]
    return "".join(parts)


def _axes(chart: LineChart) -> tuple[_Axis, _Axis]:
    points = [point for line in chart.lines for point in line.points]
    xs = [float(x) for x, _ in points] + list(chart.x_range or ())
    ys = [float(y) for _, y in points] + ([0.0] if chart.from_zero else [])
    low, high = _widened(min(ys), max(ys))
    is_log = chart.may_be_log and min(ys) > 0 and max(ys) / min(ys) >= _LOG_FROM_RATIO
    if is_log:
        low, high = min(ys), max(ys)
    across = _Axis(*_widened(min(xs), max(xs), share=0.0), _LEFT, _WIDTH - _RIGHT)
    return across, _Axis(low, high, _HEIGHT - _BOTTOM, _TOP, is_log)


def _widened(low: float, high: float, share: float = 0.05) -> tuple[float, float]:
    """The ends with room around what lies between, or around the only number."""
    room = (high - low) * share if high > low else max(abs(low), 1.0) / 2
    return low - room, high + room


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(size * power for size in (1, 2, 5, 10) if size * power >= step * (1 - 1e-9))


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    for value in up.ticks():
        y = up.place(value)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#e3e6ea"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>'
    for value in across.ticks():
        x, y = across.place(value), _HEIGHT - _BOTTOM
        yield f'<path d="M{x:.1f} {y}v4" stroke="#8a929e"/>'
        yield f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{_tick(value)}</text>'


def _tick(value: float) -> str:
    value = round(value, 12)  # 0.30000000000000004
    return number(int(value)) if value == int(value) else f"{value:g}"


def _labels(chart: LineChart) -> Iterator[str]:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    below = f'x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle"'
    yield f"<text {below}>{escape(chart.x_label)}</text>"
    yield f'<text x="12" y="20" font-weight="bold">{escape(chart.y_label)}</text>'
    x = _WIDTH - _RIGHT
    for line in reversed(chart.lines if len(chart.lines) > 1 else ()):
        yield (
            f'<text x="{x}" y="20" text-anchor="end" fill="{_colour(line.colour)}">'
            f"{escape(line.label)}</text>"
        )
        x -= 8 * len(line.label) + 16


def _drawn_lines(chart: LineChart, across: _Axis, up: _Axis) -> Iterator[str]:
    for line in chart.lines:
        points = keep_extremes(line.points, _NUM_BUCKETS)
        places = [f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in points]
        colour = _colour(line.colour)
        yield (
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" '
            'stroke-width="2" stroke-linejoin="round"/>'
        )
        if _is_marked(points, is_sparse=line.is_sparse):
            for place in places:
                x, _, y = place.partition(",")
                yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'


def _is_marked(points: Sequence[Point], *, is_sparse: bool) -> bool:
    return len(points) == 1 or (is_sparse and len(points) <= _MOST_MARKERS)


def _colour(number_: int) -> str:
    return _COLOURS[(number_ - 1) % NUM_COLOURS]
