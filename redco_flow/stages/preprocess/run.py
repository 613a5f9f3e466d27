"""Build a dataset: read rows, hold out splits, get a tokenizer, encode, write.

The heavy body of preprocess. The rows are cut into blocks of fixed size, whatever computes them, so
that a dataset is the same however many processes share its blocks, and a block that is there whole
is not encoded again. A stage that trains a tokenizer keeps what it reads for it. Memory does not
grow with the data, except for the distinct words (for a trained tokenizer) and one hash per row of
a grouped evaluation split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache

from redco_flow.recipes.declared import RowsRecipe
from redco_flow.recipes.find import find_recipe
from redco_flow.runtime.context import Shard, StageContext, StageOutputs
from redco_flow.stages.data.rows import BadRow, BadRowLog
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.preprocess.batches import KeptPairs, RawRows
from redco_flow.stages.preprocess.blocks import BlockStore, BlockWriters, EncodedBlock
from redco_flow.stages.preprocess.config import Config
from redco_flow.stages.preprocess.encoding import ExampleEncoder
from redco_flow.stages.preprocess.joined import DatasetJoin, EncodedBlocks, damaged
from redco_flow.stages.preprocess.pairs import BlockSplit, PairBatch
from redco_flow.stages.preprocess.rows import RowEncoder
from redco_flow.stages.preprocess.texts import text_encoder


def run(context: StageContext, config: Config) -> StageOutputs:
    """Read, check, split and encode the data."""
    return run_shard(context, config, Shard())()


def run_shard(context: StageContext, config: Config, shard: Shard) -> Callable[[], StageOutputs]:
    """Encode a shard's blocks; return what joins all shards' into the dataset.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used.
        ValueError: the tokenizer cannot be had or trained.
    """
    store = BlockStore(context.work_dir)
    encoder, kept = _encoder(context, config, store)
    blocks = _Blocks(context, config, store, encoder, kept)
    encoded = blocks.encode(lambda block: shard.has(block) and not store.is_there(block))

    def join() -> StageOutputs:
        dataset = DatasetJoin(context, config, store, encoder)
        again = damaged(context, store, set(range(encoded.counts.num_blocks)) - encoded.written)
        if again:
            blocks.encode(again.__contains__)
        return dataset.join(encoded)

    return join


def _encoder(
    context: StageContext, config: Config, store: BlockStore
) -> tuple[ExampleEncoder, KeptPairs | None]:
    recipe = find_recipe(config.recipe)
    if isinstance(recipe, RowsRecipe):
        return RowEncoder(context, config, recipe, store), None
    return text_encoder(context, config, store)


@dataclass(frozen=True)
class _Blocks:
    """Encodes blocks.

    Args:
        kept: the pairs, where this process has read them all already.
    """

    context: StageContext
    config: Config
    store: BlockStore
    encoder: ExampleEncoder
    kept: KeptPairs | None

    def encode(self, is_wanted: Callable[[int], bool]) -> EncodedBlocks:
        """Read all rows, and encode and write the blocks that are wanted."""
        source = self.kept or RawRows(self.context, self.config, self.encoder.read_row)
        unusable = BadRowLog(self.config.data.on_bad_row)
        # It is asked at every row: each block is looked up once.
        rows = source.batches(self.encoder.phase, cache(is_wanted))
        with BlockWriters(self.store) as writers:
            batches = self._held_back(rows, writers)
            with closing(self.encoder.encode(batches)) as encoded:
                for block_split, examples in encoded:
                    for row in examples.unusable:
                        unusable.add(BadRow(*row))
                    writers.write(block_split, examples)
                source.bad_rows.joined(unusable).raise_if_any(source.counts.rows)
        written = set(writers.committed)
        for number in range(source.counts.num_blocks):
            if number not in written and is_wanted(number):  # it has no usable row
                self.store.commit(number, EncodedBlock((), {}))
                written.add(number)
        return EncodedBlocks(source.counts, written, source.bad_rows, unusable)

    def _held_back(
        self, rows: Iterable[tuple[BlockSplit, PairBatch]], writers: BlockWriters
    ) -> Iterator[tuple[BlockSplit, PairBatch]]:
        """Put aside the rows of splits that are to be grouped; yield the others."""
        splits = frozenset(SPLITS[1:]) if self.config.data.group_by_source else frozenset()
        for block_split, batch in rows:
            if block_split.split in splits:
                writers.hold_back(block_split, batch)
            else:
                yield block_split, batch
