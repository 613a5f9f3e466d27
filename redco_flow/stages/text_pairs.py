"""Turn raw rows into pairs of source and target text, spread over the splits.

Knows which fields matter, what a usable text is, and how sources are held out. Refuses to know
files and tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.bad_rows import BadRow, BadRowLog
from redco_flow.stages.data_source import SPLITS, Source
from redco_flow.stages.row_files import FileRow


@dataclass(frozen=True)
class TextPair:
    """One usable row.

    Args:
        split: where it belongs.
        row_id: "file name:line", the same wherever the file lies.
    """

    split: str
    row_id: str
    source: str
    target: str


def read_pairs(
    sources: list[Source], data: DataSection, bad_rows: BadRowLog, on_row: Callable[[], None]
) -> Iterator[TextPair]:
    """Yield every usable row of every source, in reading order; bad ones go into `bad_rows`.

    Args:
        on_row: called once for each row read, good or bad: progress, and the place to stop.
    """
    held_out = _held_out(sources, data)
    num_read = dict.fromkeys(SPLITS, 0)
    for source in sources:
        for row in source.rows():
            on_row()
            if num_read[source.split] == data.max_examples:
                break
            pair = _pair(row, source, data)
            if isinstance(pair, BadRow):
                bad_rows.add(pair)
                continue
            num_read[source.split] += 1
            split = held_out(pair.source) if source.split == "train" else source.split
            yield TextPair(split, pair.row_id, pair.source, pair.target)


def _pair(row: FileRow | BadRow, source: Source, data: DataSection) -> TextPair | BadRow:
    if isinstance(row, BadRow):
        return row
    texts = []
    for key in (data.source_key, data.target_key):
        problem = _problem_of_text(row.fields, key)
        if problem:
            return BadRow(f"{source.place}:{row.line}", *problem)
        texts.append(row.fields[key])
    return TextPair(source.split, f"{source.name}:{row.line}", *texts)


def _problem_of_text(fields: Any, key: str) -> tuple[str, str] | None:
    """What is wrong with one field as (reason, detail), or None."""
    if key not in fields:
        return f"no field '{key}'", f"its fields are {', '.join(map(str, fields)) or '(none)'}"
    value = fields[key]
    if not isinstance(value, str):
        return f"field '{key}' is not text", f"it is {type(value).__name__}"
    if not value.strip():
        return f"field '{key}' is empty", ""
    if "\0" in value:
        return "NUL byte", f"in field '{key}'"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "half a surrogate pair", f"in field '{key}'"
    return None


def _held_out(sources: list[Source], data: DataSection) -> Callable[[str], str]:
    """A function from a training source to its split; equal sources stay together."""
    given = {source.split for source in sources}
    test = 0.0 if "test" in given else data.test_fraction
    validation = 0.0 if "validation" in given else data.validation_fraction

    def split_of(source: str) -> str:
        # A hash, not a random number: the split survives reordering and added rows.
        head = hashlib.sha256(source.encode()).digest()[:8]
        share = int.from_bytes(head, "big") / 2**64
        if share < test:
            return "test"
        return "validation" if share < test + validation else "train"

    return split_of
