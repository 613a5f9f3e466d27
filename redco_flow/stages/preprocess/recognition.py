"""Recognise which recipe a data file is for, by the names of its columns and its first rows.

A bounded number of rows and bytes is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, permutations
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.recipes.starters import Column, Fit, Kind, starters
from redco_flow.spec.names import listed, nearest
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.raw_data import CsvDialect
from redco_flow.stages.data.image_folder import ENDINGS
from redco_flow.stages.data.row_files import DIALECTS, ending_of
from redco_flow.stages.data.rows import BadRow, Rows
from redco_flow.stages.data.source import data_files, open_sources, problem_of
from redco_flow.stages.data.text_lines import TextLines

MAX_ROWS = 1000
_MAX_BYTES = 8_000_000
_MAX_CLASS_CHARACTERS = 100
_ROWS_PER_CLASS = 4
_IDS = ("id", "idx", "index", "guid", "uuid", "nr", "no", "")


@dataclass(frozen=True)
class Head:
    """The first rows of the training split.

    Args:
        columns: the values of each column, without nulls and empty texts.
        is_whole: whether there are no other rows.
        splits: that the data has.
        delimiter: of csv files, if it is unusual.
    """

    columns: Mapping[str, list[Any]]
    num_rows: int
    is_whole: bool
    splits: frozenset[str]
    delimiter: str | None


@dataclass(frozen=True)
class Recognised:
    """A recipe, the file's column for each key of `fit.columns`, and those found by their names."""

    recipe: str
    fit: Fit
    names: Mapping[str, str]
    by_name: frozenset[str]


def read_head(path: Path) -> Head:
    """Read the first rows.

    Raises:
        UsageError: there is no such file, it cannot be read, or it has no rows.
    """
    data = DataSection(dataset=str(path))
    if problem := problem_of(data):
        raise UsageError(problem)
    try:
        if delimiter := _delimiter(data):
            data = DataSection(dataset=str(path), csv=CsvDialect(delimiter=delimiter))
        sources = open_sources(data)
        rows = (row for one in sources if one.split == "train" for row in one.rows())
        columns, num_rows, why = _first_rows(rows)
        is_whole = next(rows, None) is None
    except (ValueError, OSError) as error:
        text = str(error)
        raise UsageError(text if str(path) in text else f"{path}: {text}") from error
    if not num_rows:
        raise UsageError(f"{path}: there are no rows to train on{why}.")
    return Head(columns, num_rows, is_whole, frozenset(one.split for one in sources), delimiter)


def _delimiter(data: DataSection) -> str | None:
    """Return another delimiter that the first line of a csv file has instead of the usual one."""
    file = next((file for file in data_files(data) if ending_of(file) in DIALECTS), None)
    if file is None:
        return None
    with TextLines(file) as lines:
        header = next(lines, "")
    is_usual = str(DIALECTS[str(ending_of(file))].delimiter) in header
    return None if is_usual else next((mark for mark in ",;\t|" if mark in header), None)


def _first_rows(rows: Rows) -> tuple[dict[str, list[Any]], int, str]:
    """Return values by column, the number of rows, and what is wrong with the first bad one."""
    columns: dict[str, list[Any]] = {}
    num_rows, num_bytes, why = 0, 0, ""
    for row in islice(rows, MAX_ROWS):
        if isinstance(row, BadRow):
            why = why or f": {row}"
            continue
        num_rows += 1
        for name, value in row.fields.items():
            columns.setdefault(str(name), []).extend([] if value in (None, "") else [value])
            num_bytes += size_of(value)
        if num_bytes > _MAX_BYTES:
            break
    return columns, num_rows, why


def size_of(value: Any) -> int:
    """Return the bytes of all texts and images in a value."""
    if isinstance(value, Mapping | list):
        return sum(map(size_of, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    return len(value) if isinstance(value, bytes) else 8


def recognise(
    path: Path, head: Head, recipe: str | None, columns: Sequence[str] | None
) -> Recognised:
    """Return the recipe that the columns fit best.

    Args:
        recipe: the only one to consider; None: all.
        columns: the only ones to consider, in this order; None: all.

    Raises:
        UsageError: the columns fit none, or several equally well.
    """
    table = starters()
    if recipe is not None and recipe not in table:
        raise UsageError(
            f"--recipe {recipe}: `init` writes no pipeline for it{nearest(recipe, table)} Known: "
            f"{listed(table)}."
        )
    kinds = {name: _kinds_of(values) for name, values in head.columns.items()}
    of_kinds = (
        f"{name} ({'/'.join(sorted(one - {'any'})) or 'nothing known'})"
        for name, one in kinds.items()
    )
    its = f"Its columns: {', '.join(of_kinds)}."
    if unknown := [name for name in columns or () if name not in kinds]:
        raise UsageError(f"--columns: {path} has no column '{unknown[0]}'. {its}")
    values = {name: head.columns[name] for name in columns or kinds}
    found = [
        one
        for name in ([recipe] if recipe else table)
        for fit in table[name].fits
        if (one := _match(name, fit, values)) is not None
    ]
    # More names that match count first, then more columns.
    ranks = [(len(one.by_name), len(one.names)) for one in found]
    best = [one for one, rank in zip(found, ranks, strict=True) if rank == max(ranks)]
    names = list(dict.fromkeys(one.recipe for one in best))
    if len(names) == 1:
        return best[0]
    what = f"fit {' and '.join(names)} equally well" if names else "fit no recipe"
    what = what if names or recipe is None else f"do not fit {recipe}"
    needs = (f"\n  {name}: {columns_of(name)}" for name in names or ([recipe] if recipe else table))
    raise UsageError(
        f"{path}: the columns {what}. {its} Give --recipe RECIPE, or --columns A,B with the "
        f"columns to use, the target last. What recipes read:{''.join(needs)}"
    )


def columns_of(recipe: str) -> str:
    """Return the columns that a recipe reads, in short: `text|sentence|… + label|labels|…`."""
    return ", or ".join(
        " + ".join("|".join([*names[:2], "…"][: len(names)]) for names in _names(fit).values())
        for fit in starters()[recipe].fits
    )


def _names(fit: Fit) -> dict[str, list[str]]:
    return {key: column.names or [key] for key, column in fit.columns.items()}


def _match(recipe: str, fit: Fit, values: Mapping[str, list[Any]]) -> Recognised | None:
    """Assign columns by their names, then the rest by their kinds if no other column is left."""
    lower = {name.strip().lower(): name for name in values}
    chosen: dict[str, str] = {}
    for key, names in _names(fit).items():
        for name in (lower[one] for one in names if one in lower):
            if name not in chosen.values() and fit.columns[key].kind in _kinds_of(values[name]):
                chosen[key] = name
                break
    by_name = frozenset(chosen.values())
    if rest := {key: column for key, column in fit.columns.items() if key not in chosen}:
        free = [name for name in values if name not in by_name and not _is_id(name)]
        if len(free) != len(rest):
            return None
        for order in permutations(free):
            if all(map(_is_by_kind, rest.values(), (values[name] for name in order))):
                chosen |= zip(rest, order, strict=True)
                break
        else:
            return None
    return Recognised(recipe, fit, {key: chosen[key] for key in fit.columns}, by_name)


def _is_id(name: str) -> bool:
    return name.strip().lower() in _IDS or name.lower().endswith("_id")


def _is_by_kind(column: Column, values: Sequence[Any]) -> bool:
    """Whether values without a known name are of a kind: classes repeat, texts do not."""
    if not column.by_kind or column.kind not in _kinds_of(values):
        return False
    if column.kind not in ("text", "class"):
        return True
    repeats = 2 <= len(set(values)) <= len(values) / _ROWS_PER_CLASS
    return repeats == (column.kind == "class")


def _kinds_of(values: Sequence[Any]) -> frozenset[Kind]:
    """Return the kinds that all values of a column are of."""
    if not values:
        return frozenset({"any"})
    numbers = list(map(_number, values))
    if all(map(math.isfinite, numbers)):
        are_whole = all(number == int(number) for number in numbers)
        return frozenset({"any", "number", "class" if are_whole else "decimal"})
    return frozenset[Kind].intersection(*(frozenset(_kinds(one)) for one in values))


def _number(value: Any) -> float:
    try:
        is_one = isinstance(value, str | int | float) and not isinstance(value, bool)
        return float(value) if is_one else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _kinds(value: Any) -> Iterator[Kind]:
    """Yield the kinds of one value of a column that does not only have numbers."""
    yield "any"
    if isinstance(value, str) and value.startswith("[{"):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str) and Path(value[-8:]).suffix.lower() in ENDINGS:
        yield "image"
    elif isinstance(value, str):
        yield "text"
        yield "answer"
        if len(value) <= _MAX_CLASS_CHARACTERS:
            yield "class"
    elif isinstance(value, Mapping) and "bytes" in value:
        yield "image"
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        if "role" in value[0]:
            yield "messages"
            yield "answer"
        elif "from" in value[0]:
            yield "turns"
