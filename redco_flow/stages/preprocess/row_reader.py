"""Check a row of a recipe of rows, as training will use it: pack it, make a batch of it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from redco_flow.errors import UnusableRow
from redco_flow.recipes.declared import RowsRecipe
from redco_flow.recipes.recipe import (
    CLASSES,
    Batch,
    Collate,
    Example,
)
from redco_flow.spec.names import failure
from redco_flow.stages.data.row_values import BadValue, MissingPillow, pack_row, unpack_row
from redco_flow.stages.data.rows import BadRow, FileRow, problem_of_field
from redco_flow.stages.data.source import Source
from redco_flow.stages.preprocess.labels import ClassLabels, Labels, class_names, labels_for

SplitOf = Callable[[bytes], str]
"""From what makes a row the same as another to its split."""


class PackedRow(NamedTuple):
    """One usable row.

    Args:
        block, split: where it belongs.
        row_id: "file name:line", the same wherever the file lies.
        row: the columns of its recipe, packed.
        ids: token ids by column, of a recipe that encodes rows.
    """

    block: int
    split: str
    row_id: str
    row: bytes
    ids: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class RowReader:
    """Turns a row of the data into one that is kept.

    Args:
        names: the columns that are kept; None: all.
        renamed: the data's name of a column by the recipe's.
        collate_fn: the recipe's.
        target: the column that `labels` reads, where they are there.
        split_by: the columns that decide which rows are held out; none: all.
        split_key: the bytes that do so instead.
        encode: row -> token ids by column.
    """

    names: Sequence[str] | None
    renamed: Mapping[str, str]
    collate_fn: Collate
    target: str | None = None
    labels: Labels | None = None
    split_by: Sequence[str] = ()
    split_key: Callable[[Example], bytes] | None = None
    encode: Callable[[Example], Mapping[str, Sequence[int]]] | None = None

    def __call__(
        self, row: FileRow, source: Source, split_of: SplitOf | None, block: int
    ) -> PackedRow | BadRow:
        """Check a row and pack it."""
        location = f"{source.location}:{row.line}"
        try:
            columns = self._columns(row.fields) | self._label(row.fields, source)
            packed = pack_row(columns, source.image_folders)
        except BadValue as error:
            return BadRow(location, error.reason, error.detail)
        try:
            example = unpack_row(packed)
            self.collate_fn([example])
            ids = {} if self.encode is None else self.encode(example)
        except MissingPillow:
            raise
        except UnusableRow as error:
            return BadRow(location, error.reason, error.detail)
        except Exception as error:  # noqa: BLE001 (the user's function may raise anything)
            reason = f"collate_fn raised {type(error).__name__}"
            return BadRow(location, reason, failure(error).removeprefix(": ").strip())
        split = split_of(self._identity(example, packed)) if split_of else source.split
        return PackedRow(block, split, f"{source.name}:{row.line}", packed, ids)

    def _identity(self, example: Example, packed: bytes) -> bytes:
        """Return what makes a row the same as another to its split."""
        if self.split_key is not None:
            return self.split_key(example)
        values = [example[name] for name in self.split_by]
        if not values:
            return packed
        if all(isinstance(value, str) for value in values):  # as of a pair of texts its source
            return "\0".join(values).encode()
        return pack_row(dict(zip(self.split_by, values, strict=True)))

    def _label(self, fields: Mapping[str, Any], source: Source) -> dict[str, Any]:
        if self.labels is None or self.target is None:
            return {}
        key = self.renamed.get(self.target, self.target)
        return {self.target: self.labels.read(fields, key, source)}

    def _columns(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if self.names is None:
            own = {theirs: name for name, theirs in self.renamed.items()}
            return {own.get(key, key): value for key, value in fields.items()}
        found = {}
        for name in self.names:
            key = self.renamed.get(name, name)
            if problem := problem_of_field(fields, key):
                raise BadValue(*problem)
            found[name] = fields[key]
        return found


def row_reader(
    recipe: RowsRecipe, settings: Mapping[str, Any], renamed: Mapping[str, str]
) -> RowReader:
    """Return what reads the rows of a recipe.

    Args:
        settings: the recipe's, as written in YAML.
        renamed: `data.columns`.
    """
    labels = labels_for(recipe, settings)
    return RowReader(
        recipe.columns,
        renamed,
        _checking(recipe, settings, labels),
        recipe.target,
        labels,
        recipe.split_by,
        recipe.split_key,
    )


def _checking(recipe: RowsRecipe, settings: Mapping[str, Any], labels: Labels | None) -> Collate:
    """Return the recipe's collate_fn; of classes it knows those that were read so far."""

    @cache
    def with_classes(_num_classes: int) -> Collate:
        names = class_names(labels)
        own = settings if names is None else {**settings, CLASSES: names}
        return recipe.collate_with(own)

    def collate_fn(examples: Sequence[Example]) -> Batch:
        num_classes = len(labels) if isinstance(labels, ClassLabels) else 0
        return with_classes(num_classes)(examples)

    return collate_fn
