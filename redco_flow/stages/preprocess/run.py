"""Build a dataset: read pairs, hold out splits, get a tokenizer, encode, write.

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
from pathlib import Path

from redco_flow.recipes.declared import TextRecipe
from redco_flow.recipes.find import find_recipe
from redco_flow.stages.context import Shard, StageContext, StageOutputs
from redco_flow.stages.data.rows import BadRow, BadRowLog
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.preprocess import rows
from redco_flow.stages.preprocess.batches import KeptPairs, RawPairs
from redco_flow.stages.preprocess.blocks import Block, BlockStore, BlockWriters
from redco_flow.stages.preprocess.config import (
    DEFAULT_MAX_LENGTH,
    Config,
    problem_of_texts,
)
from redco_flow.stages.preprocess.encoding import (
    Encode,
    EncodeCall,
    EncodeChats,
    encode_batches,
)
from redco_flow.stages.preprocess.joined import (
    DatasetJoin,
    EncodedBlocks,
    damaged,
    dataset_columns,
)
from redco_flow.stages.preprocess.pairs import Batch, BlockSplit, PairBatch, ungrouped
from redco_flow.stages.preprocess.tokenizer import ensure_tokenizer


def run(context: StageContext, config: Config) -> StageOutputs:
    """Read, check, split and encode the data."""
    return run_shard(context, config, Shard())()


def run_shard(context: StageContext, config: Config, shard: Shard) -> Callable[[], StageOutputs]:
    """Encode a shard's blocks; return what joins all shards' into the dataset.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used.
        ValueError: the tokenizer cannot be had or trained.
    """
    if find_recipe(config.recipe).is_of_rows:
        return rows.run_shard(context, config, shard)
    store = BlockStore(context.work_dir)
    tokenizer, kept = ensure_tokenizer(context, config, store)
    call = encode_call(config, tokenizer)
    blocks = _Blocks(context, config, store, call, kept)
    encoded = blocks.encode(lambda block: shard.has(block) and not store.is_there(block))

    def join() -> StageOutputs:
        dataset = DatasetJoin(context, config, store, call)
        again = damaged(context, store, set(range(encoded.counts.num_blocks)) - encoded.written)
        if again:
            blocks.encode(again.__contains__)
        return dataset.join(encoded)

    return join


@dataclass(frozen=True)
class _Blocks:
    """How blocks are encoded.

    Args:
        kept: the pairs, where this process has read them all already.
    """

    context: StageContext
    config: Config
    store: BlockStore
    call: Encode
    kept: KeptPairs | None

    def encode(self, is_wanted: Callable[[int], bool]) -> EncodedBlocks:
        """Read all rows, and encode and write the blocks that are wanted."""
        source = self.kept or RawPairs(self.context, self.config)
        unusable = BadRowLog(self.config.data.on_bad_row)
        # It is asked at every row: each block is looked up once.
        pairs = source.batches("reading and encoding", cache(is_wanted))
        with BlockWriters(self.store, dataset_columns(self.config.data)) as writers:
            batches = self._held_back(pairs, writers)
            with closing(encode_batches(self.call, batches, self.config.num_workers)) as encoded:
                for block_split, batch, ids in encoded:
                    for row in ids.unusable:
                        unusable.add(BadRow(*row))
                    writers.write(block_split, batch, ids)
                source.bad_rows.joined(unusable).raise_if_any(source.counts.rows)
        written = set(writers.committed)
        for number in range(source.counts.num_blocks):
            if number not in written and is_wanted(number):  # it has no usable row
                self.store.commit(number, Block((), {}))
                written.add(number)
        return EncodedBlocks(source.counts, written, source.bad_rows, unusable, source.labels)

    def _held_back(
        self, pairs: Iterable[tuple[BlockSplit, PairBatch]], writers: BlockWriters
    ) -> Iterator[tuple[BlockSplit, Batch]]:
        """Put aside the rows of splits that are to be grouped; yield the others."""
        splits = frozenset(SPLITS[1:]) if self.config.data.group_by_source else frozenset()
        for block_split, batch in pairs:
            if block_split.split in splits:
                writers.hold_back(block_split, batch)
            else:
                yield block_split, ungrouped(batch)


def encode_call(config: Config, tokenizer: Path) -> Encode:
    """Return what encodes a stage's texts or conversations.

    Args:
        tokenizer: its directory.
    """
    recipe = find_recipe(config.recipe)
    assert isinstance(recipe, TextRecipe)  # others encode nothing
    if problem := problem_of_texts(config.data, recipe):
        raise ValueError(problem)
    if recipe.takes_conversations:
        return EncodeChats(
            module=recipe.module,
            tokenizer=str(tokenizer),
            template_kwargs=tuple(sorted(config.data.chat_template_kwargs.items())),
            train_on=config.train_on or "assistant",
            max_length=config.max_length or DEFAULT_MAX_LENGTH,
            on_too_long=config.on_too_long or "truncate",
        )
    return EncodeCall(
        module=recipe.module,
        tokenizer=str(tokenizer),
        is_plain_text=config.data.text_key is not None,
        are_labelled=recipe.targets is not None,
        source_prefix=config.data.source_prefix,
        source_suffix=config.data.source_suffix,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        truncation_side=config.truncation_side,
    )
