"""Read the points of a sweep: a grid of values, random draws, and rows of a file, multiplied.

`--sweep KEY=V1,V2` gives values, `--sweep 'KEY=loguniform(1e-5, 1e-3)'` a distribution, of which
`--num-samples` draws are taken, and `--points FILE` rows of a CSV or JSON Lines file. A sampler
that learns from finished points reads the same texts as a space.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True)
class Distribution:
    """A distribution of a setting's values.

    Args:
        kind: `uniform`, `loguniform`, or `randint` for whole numbers.
        low, high: the bounds; of `randint`, `high` is the largest number.
    """

    kind: Literal["uniform", "loguniform", "randint"]
    low: float
    high: float

    @classmethod
    def read(cls, kind: str, low: str, high: str) -> Distribution:
        """Read `KIND(LOW, HIGH)`, where a whole number is below HIGH.

        Raises:
            ValueError: there is no such distribution, or its bounds are none.
        """
        if kind == "randint":
            first, last = int(low), int(high)
            if first >= last:
                raise ValueError(f"no whole number is at least {first} and below {last}")
            return cls("randint", first, last - 1)
        if kind not in ("uniform", "loguniform"):
            raise ValueError("a distribution is uniform, loguniform or randint; quote a text")
        lowest, highest = float(low), float(high)
        if not -math.inf < lowest < highest < math.inf or (kind == "loguniform" and lowest <= 0):
            raise ValueError(
                "give two finite numbers, the lower one first, and for loguniform above 0"
            )
        return cls("uniform" if kind == "uniform" else "loguniform", lowest, highest)

    def draw(self, generator: random.Random) -> str:
        """Return a value drawn at random."""
        if self.kind == "randint":
            return self.text(generator.randint(int(self.low), int(self.high)))
        if self.kind == "uniform":
            return self.text(generator.uniform(self.low, self.high))
        return self.text(math.exp(generator.uniform(math.log(self.low), math.log(self.high))))

    def text(self, value: float) -> str:
        """Return a value as text, with four significant digits where it is no whole number."""
        if self.kind == "randint":
            return str(int(value))
        text = f"{value:.4g}"
        return text if self.low <= float(text) <= self.high else repr(value)


Space = dict[str, Distribution | list[str]]
"""By key, a distribution or the values of which a point has one."""


@dataclass(frozen=True)
class Trial:
    """A point as a trial of Optuna.

    Args:
        overrides: its values.
        value: the last one of the metric; None of a point that is running or has failed.
        step: at which it was measured.
    """

    overrides: Sequence[str]
    state: Literal["running", "complete", "pruned", "fail"]
    value: float | None = None
    step: int = 0


def read_space(texts: Sequence[str]) -> Space:
    """Return the settings of which a sampler chooses each point's values.

    Args:
        texts: as of `read_points`.

    Raises:
        ConfigError: every text that is neither a distribution nor different values.
    """
    space, problems = _read_settings(texts, ())
    if problems:
        raise ConfigError(problems)
    return space


def ends_of(space: Space) -> list[Point]:
    """Return points that together have both bounds of each distribution and each listed value.

    The first has all first values, each further one another value of one setting, and the last has
    all last values.
    """
    bounds = [
        [f"{key}={value}" for value in one]
        if isinstance(one, list)
        else [f"{key}={one.text(one.low)}", f"{key}={one.text(one.high)}"]
        for key, one in space.items()
    ]
    first, last = (tuple(values[index] for values in bounds) for index in (0, -1))
    between = [
        (*first[:index], value, *first[index + 1 :])
        for index, values in enumerate(bounds)
        for value in values[1:]
    ]
    return list(dict.fromkeys([first, *between, last]))


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
    rows, problems = _read_rows(file) if file is not None else ([()], [])
    settings, of_settings = _read_settings(texts, rows)
    problems += of_settings
    drawn = {key: one for key, one in settings.items() if isinstance(one, Distribution)}
    listed = {key: one for key, one in settings.items() if isinstance(one, list)}
    axes = [[f"{key}={value}" for value in values] for key, values in listed.items()]
    if not problems and bool(drawn) != bool(samples.number):
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


def _read_settings(texts: Sequence[str], rows: Iterable[Point]) -> tuple[Space, list[Problem]]:
    """Return what `--sweep` gives for each key, and what is wrong with it.

    Args:
        rows: points of a file, which have other keys.
    """
    space: Space = {}
    problems: list[Problem] = []
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        if (found := _DISTRIBUTION.fullmatch(values)) is not None:
            try:
                space[key] = Distribution.read(*found.groups())
            except ValueError as error:
                problems.append(_problem(f"{shown(text)}: {error}"))
            continue
        space[key] = _split(values)
        problems += _problems(text, [f"{key}={value}" for value in _split(values)])
    keys = Counter(text.partition("=")[0].strip() for text in texts)
    keys.update({override.partition("=")[0] for row in rows for override in row})
    for key, count in keys.items():
        if count > 1:
            problems.append(_problem(f"{shown(key)} is given {count} times: give all its values"))
    return space, problems


def _draws(drawn: Mapping[str, Distribution], samples: Samples) -> Iterator[Point]:
    """Draw all settings together, sample by sample: more samples begin with the same ones."""
    generator = random.Random(samples.seed)  # noqa: S311
    for _ in range(samples.number):
        yield tuple(f"{key}={one.draw(generator)}" for key, one in drawn.items())


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
    _different([(key.strip(), "") for key in reader.fieldnames or ()])
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} has not as many cells as the first line")
        yield reader.line_num, tuple(f"{key.strip()}={v}" for key, v in row.items() if v != "")


def _json_rows(text: str) -> Iterator[tuple[int, Point]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        row = json.loads(line, object_pairs_hook=_different)
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no JSON object")
        yield number, tuple(f"{key}={_json(value)}" for key, value in row.items())


def _different(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a mapping; refuse a key of which only the last value would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{shown(twice)} is given twice")
    return found


def _json(value: Any) -> str:
    # YAML has no escapes for characters beyond 16 bits that JSON writes as two halves.
    return json.dumps(value, ensure_ascii=False)


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
