"""Keep rows as they are, with their token ids where the recipe has some.

A row is checked by what training does with it: the recipe's `collate_fn` makes a batch of it alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from redco_flow.recipes.declared import RowsRecipe
from redco_flow.runtime.context import StageContext
from redco_flow.spec.recipe_settings import values_of
from redco_flow.stages.artifacts.arrow_split import IDS, ArrowSplit, RowSplit
from redco_flow.stages.artifacts.dataset import ROW_COLUMNS
from redco_flow.stages.data.row_values import as_json_value, unpack_row
from redco_flow.stages.preprocess.batches import RawRows
from redco_flow.stages.preprocess.blocks import BlockStore, counted_ids
from redco_flow.stages.preprocess.config import Config
from redco_flow.stages.preprocess.encoding import (
    MAX_COUNTED_TARGETS,
    Batches,
    Encoded,
    SplitCount,
    load_template,
)
from redco_flow.stages.preprocess.pairs import BlockSplit
from redco_flow.stages.preprocess.row_reader import RowReader, row_reader
from redco_flow.stages.preprocess.tokenizer import ensure_tokenizer, record_of
from redco_flow.text.tokenizer import TextTokenizer


class RowEncoder:
    """Keeps rows; see `Encoder`. A tokenizer that encodes them is made if it is not there.

    Raises:
        BadRows, NoRows, DataChanged: a tokenizer is to be trained on data that cannot be used.
        ValueError: the tokenizer cannot be had or trained.
    """

    phase = "reading"

    def __init__(
        self, context: StageContext, config: Config, recipe: RowsRecipe, store: BlockStore
    ) -> None:
        self._context, self._config, self._store = context, config, store
        self._recipe = recipe
        self._settings = recipe.last_argument(values_of(config.settings))
        reader = row_reader(recipe, values_of(config.settings), config.data.columns)
        self.labels = reader.labels
        self.read_row = reader if recipe.encode_row is None else self._encoding(reader)

    def encode(self, batches: Batches) -> Generator[tuple[BlockSplit, Encoded], None, None]:
        """Put the token ids of rows into columns."""
        for block_split, batch in batches:
            ids = {name: [row[name] for row in batch["ids"]] for name in batch["ids"][0]}
            counts = {"rows": len(batch["row_id"])} | counted_ids(ids)
            types = {**ROW_COLUMNS, **dict.fromkeys(ids, IDS)}
            yield block_split, Encoded({**batch, **ids}, types, counts)

    encode_grouped = encode

    def summary(self, counts: SplitCount, paths: Mapping[str, list[Path]]) -> dict[str, Any]:
        """Return the counts, the target's column and the tokenizer of the columns with texts."""
        columns, is_truncated = self._recipe.text_columns, self._recipe.is_truncated
        found: dict[str, Any] = {
            "splits": counts,
            "max_source_length": 0,
            "max_target_length": 0,
            "tokenizer": {},
            "target": self._recipe.target or "",
        }
        if not columns:
            return found
        texts = (str(row[column]) for row in _rows(paths["train"]) for column in columns)
        tokenizer = TextTokenizer.load(
            ensure_tokenizer(self._context, self._config, self._store, texts)
        )
        if is_truncated is not None:
            found["splits"] = {split: dict(counted) for split, counted in counts.items()}
            for split, counted in found["splits"].items():
                rows = _rows(paths[split])
                if cut := sum(is_truncated(row, tokenizer, *self._settings) for row in rows):
                    counted["cut_targets"] = cut
        return found | {"tokenizer": record_of(tokenizer, self._context, self._config)}

    def first_targets(self, paths: Sequence[Path]) -> list[Any]:
        """Return JSON values; none where no column has targets."""
        target, rows = self._recipe.target, RowSplit(ArrowSplit(paths))
        if target is None:
            return []
        return [
            as_json_value(rows[index].get(target))
            for index in range(min(len(rows), MAX_COUNTED_TARGETS))
        ]

    def _encoding(self, reader: RowReader) -> RowReader:
        """Return a reader that encodes rows, too."""
        recipe, data = self._recipe, self._config.data
        texts = self._training_texts(reader)
        directory = ensure_tokenizer(self._context, self._config, self._store, texts)
        renders = {}
        if recipe.takes_messages:
            kwargs = tuple(sorted(data.chat_template_kwargs.items()))
            renders["template"] = partial(load_template, str(directory), kwargs)
        tokenizer, encode_row = TextTokenizer.load(directory), recipe.encode_row
        around = {"source_prefix": data.source_prefix, "source_suffix": data.source_suffix}
        assert encode_row is not None

        def encode(row: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
            return encode_row(row, tokenizer, *self._settings, **around, **renders)

        return replace(reader, encode=encode)

    def _training_texts(self, reader: RowReader) -> Iterator[str]:
        """Read all rows once before they are encoded, where a tokenizer is to be trained."""
        source = RawRows(self._context, self._config, reader)
        for block_split, batch in source.batches("reading for the tokenizer", lambda _: True):
            if block_split.split == "train":
                for row in map(unpack_row, batch["row"]):
                    yield from (_text_of(row[column]) for column in self._recipe.text_columns)


def _rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    rows = RowSplit(ArrowSplit(paths))
    return (rows[index] for index in range(len(rows)))


def _text_of(value: Any) -> str:
    """Return a text, or those of messages."""
    if isinstance(value, list):
        return "\n".join(str(one.get("content", "")) for one in value if isinstance(one, dict))
    return str(value)
