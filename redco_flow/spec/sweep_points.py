"""Read the points of a sweep: a grid of values, random draws, and rows of a file, multiplied.

`--sweep KEY=V1,V2` gives values, `--sweep 'KEY=loguniform(1e-5, 1e-3)'` a distribution, of which
`--num-samples` draws are taken, and `--points FILE` rows of a CSV or JSON Lines file.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redco_flow.errors import ConfigError, Problem
from redco_flow.spec.document import COMMAND_LINE
from redco_flow.spec.names import shown
from redco_flow.spec.overrides import read_override

Point = tuple[str, ...]
"""One point's overrides, `key=value` each, in the order of the settings."""

_CLOSING = {"[": "]", "{": "}", "'": "'", '"': '"'}
_DISTRIBUTION = re.compile(r"\s*(\w+)\(([^(),]+),([^(),]+)\)\s*")


@dataclass(frozen=True)
class Samples:
    """Number and seed of the draws from distributions.

    Args:
        number: draws of each; 0 without distributions.
        seed: the same seed draws the same values.
    """

    number: int = 0
    seed: int = 0


def read_points(
    texts: Sequence[str],
    samples: Samples | None = None,
    file: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    """Return each row of the file with each draw and each combination of values, once.

    The values of the last setting change fastest.

    Args:
        texts: `KEY=V1,V2,…` each; commas within quotes and brackets belong to a value; or
            `KEY=uniform(LOW, HIGH)`, `loguniform(LOW, HIGH)` or `randint(LOW, HIGH)`.
        log: takes a line on points that repeat others and are left out.
        file: `.csv` with a line of keys, or `.jsonl`; an empty cell leaves a setting as it is.

    Raises:
        ConfigError: all that is no setting with different values, or no row of settings.
    """
    samples = samples or Samples()
    drawn: dict[str, Callable[[random.Random], str]] = {}
    problems: list[Problem] = []
    axes = []
    rows, of_rows = _read_rows(file) if file is not None else ([()], [])
    problems += of_rows
    for text in texts:
        key, _, values = text.partition("=")
        if (found := _DISTRIBUTION.fullmatch(values)) is not None:
            try:
                drawn[key.strip()] = _draw_from(*found.groups())
            except ValueError as error:
                problems.append(_problem(f"{shown(text)}: {error}"))
            continue
        axis = [f"{key.strip()}={value}" for value in _split(values)]
        problems += _problems(text, axis)
        axes.append(axis)
    keys = Counter(text.partition("=")[0].strip() for text in texts)
    keys.update({override.partition("=")[0] for row in rows for override in row})
    for key, count in keys.items():
        if count > 1:
            problems.append(_problem(f"{shown(key)} is given {count} times: give all its values"))
    if bool(drawn) != bool(samples.number):
        what = "needs --num-samples N" if drawn else "has no distribution for --num-samples"
        problems.append(_problem(f"{what}, as in --sweep 'KEY=loguniform(1e-5, 1e-3)'"))
    if problems:
        raise ConfigError(problems)
    draws = list(_draws(drawn, samples)) if drawn else [()]
    grid = itertools.product(*axes)
    points = [(*row, *draw, *one) for row, draw, one in itertools.product(rows, draws, grid)]
    different = list(dict.fromkeys(points))
    if len(different) < len(points):
        log(f"{len(points) - len(different)} of {len(points)} points repeat others: left out")
    return different


def _draw_from(kind: str, low: str, high: str) -> Callable[[random.Random], str]:
    """Return what draws a value, as text with four significant digits."""
    if kind not in ("uniform", "loguniform", "randint"):
        raise ValueError("a distribution is uniform, loguniform or randint; quote a text")
    if kind == "randint":
        first, last = int(low), int(high)
        if first >= last:
            raise ValueError(f"no whole number is at least {first} and below {last}")
        return lambda generator: str(generator.randrange(first, last))
    lowest, highest = float(low), float(high)
    if not lowest < highest < math.inf or (kind == "loguniform" and lowest <= 0):
        raise ValueError("the bounds are two numbers, the lower one first; of loguniform above 0")

    def draw(generator: random.Random) -> str:
        if kind == "uniform":
            value = generator.uniform(lowest, highest)
        else:
            value = math.exp(generator.uniform(math.log(lowest), math.log(highest)))
        text = f"{value:.4g}"
        return text if lowest <= float(text) <= highest else repr(value)

    return draw


def _draws(
    drawn: Mapping[str, Callable[[random.Random], str]], samples: Samples
) -> Iterator[Point]:
    """Draw all settings together, sample by sample: more samples begin with the same ones."""
    generator = random.Random(samples.seed)  # noqa: S311
    for _ in range(samples.number):
        yield tuple(f"{key}={draw(generator)}" for key, draw in drawn.items())


def _read_rows(path: Path) -> tuple[list[Point], list[Problem]]:
    """Return a file's rows as overrides, and what is wrong with them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = list(_csv_rows(text) if path.suffix == ".csv" else _json_rows(text))
    except (OSError, ValueError, csv.Error) as error:
        return [], [_problem(f"--points {path}: {error}", "")]
    problems = [
        problem for _, row in rows for override in row for problem in read_override(override)[1]
    ]
    empty = [number for number, row in rows if not row]
    if empty or not rows:
        where = f"line {empty[0]}" if empty else "it"
        problems.append(_problem(f"--points {path}: {where} has no setting", ""))
    return [row for _, row in rows], problems


def _csv_rows(text: str) -> Iterator[tuple[int, Point]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} has not as many cells as the first line")
        yield reader.line_num, tuple(f"{key.strip()}={v}" for key, v in row.items() if v != "")


def _json_rows(text: str) -> Iterator[tuple[int, Point]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no JSON object")
        yield number, tuple(f"{key}={json.dumps(value)}" for key, value in row.items())


def _problems(text: str, axis: Sequence[str]) -> Iterator[Problem]:
    read = [read_override(override) for override in axis]
    mistakes = [problem for _, found in read for problem in found]
    if "=" not in text or mistakes:
        yield from mistakes or [_problem(f"{shown(text)} is not KEY=VALUE,VALUE")]
        return
    values = [override.value for override, _ in read if override is not None]
    for index, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:index]):
            yield _problem(f"{shown(text)} has the value {value!r} twice")


def _problem(message: str, option: str = "--sweep ") -> Problem:
    return COMMAND_LINE.problem(f"{option}{message}")


def _split(text: str) -> list[str]:
    """The values between the commas outside of quotes and brackets."""
    values, open_until = [""], ""
    for character in text:
        if character == "," and not open_until:
            values.append("")
            continue
        if open_until.endswith(character):
            open_until = open_until[:-1]
        elif character in _CLOSING and _may_open(values[-1], open_until):
            open_until += _CLOSING[character]
        values[-1] += character
    return values


def _may_open(before: str, open_until: str) -> bool:
    """Whether a quote or bracket opens something: at a value's start, or within brackets."""
    return open_until[-1] in "]}" if open_until else not before.strip()
