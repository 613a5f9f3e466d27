"""Recognise which recipe a data file is for, by the names of its columns and its first rows.

A bounded number of rows and bytes is read.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice, permutations
from pathlib import Path
from typing import Any, Literal

from redco_flow.errors import UsageError
from redco_flow.local_paths import exists, expanded
from redco_flow.recipes.starters import Column, Fit, Kind, starters
from redco_flow.spec.data_files import missing_file
from redco_flow.spec.names import listed, nearest, shown
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.raw_data import CsvDialect
from redco_flow.stages.data.image_files import ENDINGS
from redco_flow.stages.data.row_files import DIALECTS, ending_of
from redco_flow.stages.data.rows import BadRow, Rows
from redco_flow.stages.data.source import data_files, open_sources, problem_of
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.data.text_lines import TextLines

How = Literal["by_names", "in_order", "as_given"]
"""Columns are assigned by names, in the user's order, or also whatever their names are."""

MAX_ROWS = 1000
_MAX_BYTES = 8_000_000
_MAX_CLASS_CHARACTERS = 100
_ROWS_PER_CLASS = 4
_MIN_ROWS = 20
_MAX_BAD_SHARE = 0.01
_IDS = ("id", "idx", "index", "guid", "uuid", "nr", "no", "")
_OF_ANOTHER_USE = (  # not left out without an option, nor taken for texts of unknown names
    *("context", "contexts", "passage", "evidence", "system", "system_prompt", "history"),
    *("label", "labels", "class", "category", "target"),
    *("chosen", "rejected", "preferred", "dispreferred"),
)
_SHOWN_KINDS: dict[Kind, str] = {
    "image": "images",
    "path": "names of image files; a folder with a folder of images for each class can be read",
    "messages": "messages",
    "turns": "ShareGPT messages",
    "decimal": "numbers",
    "number": "whole numbers",
    "class": "short texts",
    "text": "texts",
}


@dataclass(frozen=True)
class FirstRows:
    """The first rows of the training split.

    Args:
        columns: the values of each column, without nulls, empty texts and empty lists.
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


def read_head(path: Path) -> FirstRows:
    """Read the first rows.

    Raises:
        UsageError: there is no such file, it cannot be read, it has too few rows, or more than
            1 % of them are bad.
    """
    if not exists(expanded(path)):
        missing = missing_file(str(path), "file or directory")
        raise UsageError(f"--data reads files of this machine: {missing}")
    path = expanded(path).absolute()
    data = DataSection(dataset=str(path))
    if problem := problem_of(data):
        raise UsageError(problem)
    try:
        if delimiter := _delimiter(data):
            data = DataSection(dataset=str(path), csv=CsvDialect(delimiter=delimiter))
        sources = open_sources(data)
        rows = (row for one in sources if one.split == "train" for row in one.rows())
        columns, num_rows, bad = _first_rows(rows)
        is_whole = next(rows, None) is None
    except (ValueError, OSError) as error:
        text = str(error)
        raise UsageError(text if str(path) in text else f"{path}: {text}") from error
    if not num_rows:
        raise UsageError(f"{path}: there are no rows to train on{f': {bad[0]}' if bad else ''}.")
    if len(bad) > _MAX_BAD_SHARE * (num_rows + len(bad)):
        what = f"{len(bad)} of the first {num_rows + len(bad)} rows are bad, the first {bad[0]}"
        raise UsageError(f"{path}: {what}. Fix them: at most 1 % of the rows may be bad.")
    splits = frozenset(one.split for one in sources)
    if is_whole and num_rows < _MIN_ROWS and len(splits) < len(SPLITS):
        raise UsageError(
            f"{path}: {num_rows} rows are too few to split off validation and test rows: "
            f"{_MIN_ROWS} are needed, or a folder with files train, validation and test."
        )
    return FirstRows(columns, num_rows, is_whole, splits, delimiter)


def _delimiter(data: DataSection) -> str | None:
    """Return another delimiter that the first line of a csv file has instead of the usual one."""
    file = next((file for file in data_files(data) if ending_of(file) in DIALECTS), None)
    if file is None:
        return None
    with TextLines(file) as lines:
        header = next(lines, "")
    is_usual = str(DIALECTS[str(ending_of(file))].delimiter) in header
    return None if is_usual else next((mark for mark in ",;\t|" if mark in header), None)


def _first_rows(rows: Rows) -> tuple[dict[str, list[Any]], int, list[BadRow]]:
    """Return values by column, the number of good rows, and the bad ones."""
    columns: dict[str, list[Any]] = {}
    num_rows, num_bytes, bad = 0, 0, []
    for row in islice(rows, MAX_ROWS):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        num_rows += 1
        for name, value in row.fields.items():
            is_empty = value in (None, []) or (isinstance(value, str) and not value.strip())
            columns.setdefault(str(name), []).extend([] if is_empty else [value])
            num_bytes += size_of(value)
        if num_bytes > _MAX_BYTES:
            break
    return columns, num_rows, bad


def size_of(value: Any) -> int:
    """Return the bytes of all texts and images in a value."""
    if isinstance(value, Mapping | list):
        return sum(map(size_of, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    return len(value) if isinstance(value, bytes) else 8


def recognise(
    path: Path, head: FirstRows, recipe: str | None, columns: Sequence[str] | None
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
    its = f"Its columns: {', '.join(f'{n} ({_shown(v)})' for n, v in head.columns.items())}."
    if unknown := [name for name in columns or () if name not in head.columns]:
        raise UsageError(f"--columns: {path} has no column '{unknown[0]}'. {its}")
    if columns and len(set(columns)) < len(columns):
        raise UsageError(f"--columns {','.join(columns)} names a column twice.")
    values = {name: head.columns[name] for name in columns or head.columns}
    how: How = "by_names" if columns is None else "in_order" if recipe is None else "as_given"
    found = [
        one
        for name in ([recipe] if recipe else table)
        for fit in table[name].fits
        if (one := _match(name, fit, values, how)) is not None
    ]
    # More names that match count first, then more columns.
    ranks = [(len(one.by_name), len(one.names)) for one in found]
    best = [one for one, rank in zip(found, ranks, strict=True) if rank == max(ranks)]
    names = list(dict.fromkeys(one.recipe for one in best))
    if len(names) == 1:
        if recipe is None and columns is None:
            _check_left_out(path, head, best[0])
        return best[0]
    what = f"fit {' and '.join(names)} equally well" if names else "fit no recipe"
    what = what if names or recipe is None else f"do not fit {recipe}"
    few = names or ([recipe] if recipe else [name for name in table if _lacks_one(name, values)])
    needs = (f"\n  {name}: {columns_of(name)}" for name in few)
    raise UsageError(
        f"{path}: the columns {what}. {its} Give --recipe RECIPE, or --columns A,B with the "
        "columns to use, the target last; both, if the columns have other names or values than "
        "the recipe's usual ones. `redco-flow init --list` shows what recipes read."
        f"{''.join(needs)}"
    )


def _shown(values: Sequence[Any]) -> str:
    """Return what a column has, in words: `short texts, 3 different`."""
    kinds = kinds_of(values)
    if not (what := next((text for kind, text in _SHOWN_KINDS.items() if kind in kinds), "")):
        return "neither texts nor numbers" if values else "empty"
    if all(isinstance(one, bool) for one in values):
        what = "booleans"
    return f"{what}, {len(set(values)):,} different" if {"text", "number"} & kinds else what


def left_out(head: FirstRows, found: Recognised) -> list[str]:
    """Return the columns of the file that the pipeline does not read."""
    return [
        name for name in head.columns if name not in (*found.names.values(), *found.fit.optional)
    ]


def _check_left_out(path: Path, head: FirstRows, found: Recognised) -> None:
    """Refuse to leave out a column that may be a label, or a part of the input."""
    is_plain = list(found.names) == ["text_key"]
    key, target = list(found.fit.columns.items())[-1]
    known = target.names
    if found.names[key].strip().lower() in known:  # more than a pattern, such as `is_*`, says
        known = [one for one in known if "*" not in one]
    doubtful = [
        name
        for name in left_out(head, found)
        if head.columns[name] and not _is_id(name)
        if name.strip().lower() in _OF_ANOTHER_USE
        or (any(_is_named(name, one) for one in known) and _is_of_kind(target, head.columns[name]))
        or (is_plain and _may_be_label(head.columns[name], is_whole=head.is_whole))
    ]
    if doubtful:
        read = ",".join(found.names.values())
        raise UsageError(
            f"{path}: the columns look like {found.recipe} of {shown(read)}, which does not use "
            f"{', '.join(map(shown, doubtful))}. If that is right, give --columns "
            f"{shlex.quote(read)}. Otherwise give --recipe RECIPE, or other --columns A,B, the "
            "target last; join a context or a system prompt to another text in the file."
        )


def _may_be_label(values: Sequence[Any], *, is_whole: bool) -> bool:
    """Whether values repeat, or are numbers, booleans or lists."""
    if all(isinstance(one, str) for one in values) and "number" not in kinds_of(values):
        is_constant = is_whole and len(set(values)) == 1
        return not is_constant and not _are_mostly_distinct(values)
    return not isinstance(values[0], Mapping)


def columns_of(recipe: str) -> str:
    """Return the columns that a recipe reads: `text|sentence + label|labels`."""
    fits = starters()[recipe].fits
    return ", or ".join(" + ".join(map("|".join, _names(fit).values())) for fit in fits)


def _lacks_one(recipe: str, values: Iterable[str]) -> bool:
    """Whether the names match two or more columns of a fit, all but one."""
    known = [list(_names(fit).values()) for fit in starters()[recipe].fits]
    found = [
        [any(_is_named(v, k) for v in values for k in names) for names in one] for one in known
    ]
    return any(sum(one) >= 2 and sum(one) == len(one) - 1 for one in found)


def input_columns(recipe: str, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return keys of `data` that name the columns of a row without targets; None: it does not fit.

    Args:
        row: a file's first; an empty one fits every recipe, by the names that are the defaults.
    """
    by_name = {name.lower(): name for name in row}
    starter = starters().get(recipe)
    for fit in starter.fits if starter and row else ():
        names = {
            key: next((by_name[n] for n in column.names or [key] if n in by_name), "")
            for key, column in fit.columns.items()
            if key not in _OF_TARGETS
        }
        are_turns = {key: fit.columns[key].kind in ("messages", "turns") for key in names}
        if not all(names.values()) or not all(
            fit.columns[key].kind in kinds_of([row[name]])
            for key, name in names.items()
            if are_turns[key]
        ):
            continue
        found = {"source_key" if key == "text_key" else key: one for key, one in names.items()}
        keys = {key: name for key, name in found.items() if key.endswith("_key")}
        renamed = {key.removeprefix("columns."): n for key, n in found.items() if "." in key}
        form = {key: one for key, one in fit.data.items() if key == "format"}
        return {**form, **keys, **({"columns": renamed} if renamed else {})}
    if len(row) == 1 and starter and {"source_key", "text_key"} & starter.fits[-1].columns.keys():
        return {"source_key": next(iter(row))}
    return None if row and starter else {}


_OF_TARGETS = ("target_key", "columns.label", "columns.caption", "output", "completion", "input")


def _names(fit: Fit) -> dict[str, list[str]]:
    return {key: column.names or [key] for key, column in fit.columns.items()}


def _match(recipe: str, fit: Fit, values: Mapping[str, list[Any]], how: How) -> Recognised | None:
    """Assign columns by their names, then the rest by their kinds if no other column is left.

    In order, all columns are assigned in the fit's order, but for names that cannot be changed.
    """
    chosen: dict[str, str] = {}
    for key, column in fit.columns.items():
        if how == "by_names" or not column.names:
            names = (one for known in _names(fit)[key] for one in values if _is_named(one, known))
            others = (one for one in names if one not in chosen.values())
            if name := next((one for one in others if _is_of_kind(column, values[one])), None):
                chosen[key] = name
    rest = [key for key in fit.columns if key not in chosen]
    free = [name for name in values if name not in chosen.values()]
    if how == "by_names":
        free = [name for name in free if name not in fit.optional and not _is_id(name)]
    if rest or how != "by_names":
        if len(free) != len(rest):
            return None
        for order in permutations(free) if how == "by_names" else [free]:
            if all(_is_accepted(fit, *one, values, how) for one in zip(rest, order, strict=True)):
                chosen |= zip(rest, order, strict=True)
                break
        else:
            return None
    by_name = (n for key, n in chosen.items() if any(_is_named(n, k) for k in _names(fit)[key]))
    return Recognised(recipe, fit, {key: chosen[key] for key in fit.columns}, frozenset(by_name))


def _is_named(name: str, known: str) -> bool:
    return fnmatchcase(name.strip().lower(), known)


def _is_id(name: str) -> bool:
    lower = name.strip().lower()
    return lower in _IDS or lower.endswith("_id") or lower.startswith("unnamed: ")


def _is_accepted(fit: Fit, key: str, name: str, columns: Mapping[str, list[Any]], how: How) -> bool:
    """Whether a column is one of the fit's; without a known name classes repeat, texts do not."""
    column, values = fit.columns[key], columns[name]
    if how == "as_given" and column.names:
        return column.kind in kinds_of(values)
    if any(_is_named(name, known) for known in _names(fit)[key]):
        return _is_of_kind(column, values)
    if not column.by_kind or column.kind not in kinds_of(values):
        return False
    if column.kind == "text":
        return _are_mostly_distinct(values) and name.strip().lower() not in _OF_ANOTHER_USE
    return column.kind != "class" or 2 <= len(set(values)) <= len(values) / _ROWS_PER_CLASS


def _is_of_kind(column: Column, values: Sequence[Any]) -> bool:
    """Whether the values of a column with a known name are of its kind."""
    is_kind = column.kind in kinds_of(values)
    return is_kind and not (column.kind == "class" and _are_mostly_distinct(values))


def _are_mostly_distinct(values: Sequence[Any]) -> bool:
    return len(set(values)) > len(values) / 2


def kinds_of(values: Sequence[Any]) -> frozenset[Kind]:
    """Return the kinds that all values of a column are of."""
    if not values:
        return frozenset({"any"})
    numbers = list(map(_number, values))
    if all(map(math.isfinite, numbers)):
        are_whole = all(number == int(number) for number in numbers)
        return frozenset({"any", "number", "class" if are_whole else "decimal"})
    kinds = frozenset[Kind].intersection(*(frozenset(_kinds(one)) for one in values))
    return kinds - {"text", "class"} if kinds & {"path", "messages", "turns"} else kinds


def _number(value: Any) -> float:
    try:
        is_one = isinstance(value, str | int | float) and not isinstance(value, bool)
        return float(value) if is_one else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _kinds(value: Any) -> Iterator[Kind]:
    """Yield the kinds of one value of a column that does not only have numbers."""
    yield "any"
    if isinstance(value, bool):
        yield "class"
    if isinstance(value, str):
        yield "text"
        yield "answer"
        if len(value) <= _MAX_CLASS_CHARACTERS:
            yield "class"
        if Path(value[-8:]).suffix.lower() in ENDINGS:
            yield "path"
        if value.startswith("[{"):
            with suppress(ValueError):
                value = json.loads(value)
    if isinstance(value, Mapping) and "bytes" in value:
        yield "image"
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        if "role" in value[0]:
            yield "messages"
            yield "answer"
        elif "from" in value[0]:
            yield "turns"
