"""Numbers, durations, sizes and dates as a person reads them in the page. Pure text."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

_SIGNIFICANT_DIGITS = 4
THIN_SPACE = "\u2009"
_SMALLEST_PLAIN = 1e-3
_LARGEST_PLAIN = 1e7


def number(value: Any) -> str:
    """1234.5 → "1,234.5" or so: four significant digits; a count is whole; None → "–"."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else f"{value:.4g}"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not _SMALLEST_PLAIN <= abs(value) < _LARGEST_PLAIN:
        return _scientific(value)
    whole_digits = math.floor(math.log10(abs(value))) + 1
    return f"{value:,.{max(0, _SIGNIFICANT_DIGITS - whole_digits)}f}"


def score(value: Any) -> str:
    """A metric's value: two decimals from 1 upwards, so that a column of them can be compared."""
    if isinstance(value, float) and math.isfinite(value) and (value == 0 or 1 <= abs(value) < 1e4):
        return f"{value:.2f}"
    return number(value)


def signed(value: float) -> str:
    """A difference of scores with its sign; 0.00 has none."""
    sign = "" if value == 0 else "−" if value < 0 else "+"
    return f"{sign}{score(abs(float(value)))}"


def value_text(value: Any, longest: int = 60) -> str:
    """Return a setting's value in one line: a text as it is, anything else as JSON; cut if long."""
    is_line = isinstance(value, str) and value and value.isprintable()
    text = value if is_line else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def duration(seconds: float | None) -> str:
    """0.42 → "0.4 s", 83 → "1 min 23 s", 7260 → "2 h 01 min"; None → "–"."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f}{THIN_SPACE}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{THIN_SPACE}s"
    if whole < 3600:
        return f"{whole // 60}{THIN_SPACE}min {whole % 60:02d}{THIN_SPACE}s"
    return f"{whole // 3600}{THIN_SPACE}h {whole % 3600 // 60:02d}{THIN_SPACE}min"


_MARKS = {"completed": "✓", "failed": "✗", "cancelled": "■", "stopped_early": "■",
          "running": "▶", "skipped": "–"}  # fmt: skip


def state_mark(state: str) -> str:
    """A state as one character: ✓ for "completed"."""
    return _MARKS.get(state, "…")


def size(num_bytes: int) -> str:
    """1536 → "1.5 KiB"."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            digits = 0 if unit == "B" else 1
            return f"{amount:.{digits}f}{THIN_SPACE}{unit}"
        amount /= 1024
    return f"{amount:.1f}{THIN_SPACE}TiB"


def gib(num_bytes: int) -> str:
    """A number of bytes in GiB, without the unit: two decimals, three below 1."""
    amount = num_bytes / 2**30
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.3f}"


def step_seconds(seconds: float | None) -> str:
    """0.01523 → "0.0152 s"; None → ""."""
    return "" if seconds is None else f"{seconds:.3g} s"


def moment(text: str | None) -> str:
    """An ISO time as "2026-01-31 12:00:00 UTC"; what is no time is given back as it is."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return text or "–"
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def short_moment(text: str | None) -> str:
    """An ISO time of UTC as "2026-01-31 12:00"."""
    return (text or "")[:16].replace("T", " ")


def seconds_between(start: str | None, end: str | None) -> float | None:
    """Return the seconds from one ISO time to another; None if either is missing."""
    try:
        began, ended = datetime.fromisoformat(start or ""), datetime.fromisoformat(end or "")
        return max(0.0, (ended - began).total_seconds())
    except (ValueError, TypeError):
        return None


def plural(count: int, noun: str) -> str:
    """1, "run" → "1 run"; 2, "run" → "2 runs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _scientific(value: float) -> str:
    """5e-05 → "5e-5", 1.25e+08 → "1.25e8"."""
    mantissa, _, exponent = f"{value:.{_SIGNIFICANT_DIGITS - 1}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"
