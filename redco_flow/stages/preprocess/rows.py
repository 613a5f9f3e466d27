"""Keep rows as they are, for recipes that encode nothing: split, held out, checked, digested.

A row is checked by what training does with it: the recipe's `collate_fn` makes a batch of it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from redco_flow.recipes.declared import RowsRecipe
from redco_flow.recipes.find import find_recipe
from redco_flow.records import write_json
from redco_flow.spec.recipe_settings import values_of
from redco_flow.stages.artifacts.dataset import (
    SUMMARY_FILE,
    TOKENIZER_FOLDER,
    ArrowSplit,
    DatasetSummary,
    RowSplit,
)
from redco_flow.stages.context import Output, Shard, StageContext, StageOutputs
from redco_flow.stages.data.row_values import as_json_value, unpack_row
from redco_flow.stages.data.splits import SPLITS
from redco_flow.stages.preprocess.batches import RawPairs
from redco_flow.stages.preprocess.blocks import DATASET, Block, BlockStore, BlockWriters
from redco_flow.stages.preprocess.config import Config
from redco_flow.stages.preprocess.encoding import load_template
from redco_flow.stages.preprocess.joined import (
    MAX_COUNTED_TARGETS,
    damaged,
    files_of,
    record_of,
    row_metadata,
    summed,
    trivial_targets,
)
from redco_flow.stages.preprocess.labels import are_ordered, class_names, tell_missing_classes
from redco_flow.stages.preprocess.pairs import RowCounts
from redco_flow.stages.preprocess.row_reader import RowReader, row_reader
from redco_flow.stages.preprocess.tokenizer import ensure_tokenizer_of
from redco_flow.text.tokenizer import TextTokenizer


def run_shard(context: StageContext, config: Config, shard: Shard) -> Callable[[], StageOutputs]:
    """Keep a shard's blocks; return what joins all shards' into the dataset.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used.
    """
    store = BlockStore(context.work_dir)
    recipe = _recipe(config)
    read_row = row_reader(recipe, values_of(config.settings), config.data.columns)
    labels = read_row.labels
    if recipe.encode_row is not None:
        read_row = _encoding(context, config, store, read_row)
    source = RawPairs(context, config, read_row)
    written = _write_blocks(
        source, store, lambda block: shard.has(block) and not store.is_there(block)
    )

    def join() -> StageOutputs:
        num_blocks = source.counts.num_blocks
        again = damaged(context, store, set(range(num_blocks)) - written)
        if again:
            _write_blocks(RawPairs(context, config, read_row), store, again.__contains__)
        skipped = source.bad_rows.counts + source.counts.left_out
        summary = _summary(config, store, recipe.target or "", num_blocks, skipped)
        summary = replace(
            summary,
            classes=class_names(labels),
            classes_are_ordered=are_ordered(labels),
            tokenizer=_tokenizer_record(context, config, store, summary),
        )
        summary = replace(summary, splits=_with_truncated(config, store, summary))
        tell_missing_classes(labels)
        return _dataset(store, summary, source.counts)

    return join


def _encoding(
    context: StageContext, config: Config, store: BlockStore, read_row: RowReader
) -> RowReader:
    """Return a reader that encodes rows, by a tokenizer that is made if it is not there."""
    recipe = _recipe(config)
    assert recipe.encode_row is not None

    def texts() -> Iterator[str]:
        """Read all rows once before they are encoded, where a tokenizer is to be trained."""
        source = RawPairs(context, config, read_row)
        for block_split, batch in source.batches("reading for the tokenizer", lambda _: True):
            if block_split.split == "train":
                rows = map(unpack_row, batch["row"])
                yield from (_text_of(row[column]) for row in rows for column in recipe.text_columns)

    directory = ensure_tokenizer_of(context, config, store, texts())
    renders = {}
    if recipe.takes_messages:
        kwargs = tuple(sorted(config.data.chat_template_kwargs.items()))
        renders["template"] = partial(load_template, str(directory), kwargs)
    encode_row, data = recipe.encode_row, config.data
    around = {"source_prefix": data.source_prefix, "source_suffix": data.source_suffix}
    tokenizer = TextTokenizer.load(directory)
    last = recipe.last_argument(values_of(config.settings))
    return replace(
        read_row, encode=lambda row: encode_row(row, tokenizer, *last, **around, **renders)
    )


def _recipe(config: Config) -> RowsRecipe:
    recipe = find_recipe(config.recipe)
    assert isinstance(recipe, RowsRecipe)  # `run` sees to it
    return recipe


def _text_of(value: Any) -> str:
    """A text, or those of messages."""
    if isinstance(value, list):
        return "\n".join(str(one.get("content", "")) for one in value if isinstance(one, dict))
    return str(value)


def _write_blocks(
    source: RawPairs, store: BlockStore, is_wanted: Callable[[int], bool]
) -> set[int]:
    """Read all rows, and write the blocks that are wanted; return which."""
    with BlockWriters(store) as writers:
        # It is asked at every row: each block is looked up once.
        for block_split, batch in source.batches("reading", cache(is_wanted)):
            writers.write_rows(block_split, batch)
    written = set(writers.committed)
    for number in range(source.counts.num_blocks):
        if number not in written and is_wanted(number):  # it has no usable row
            store.commit(number, Block((), {}))
            written.add(number)
    return written


def _summary(
    config: Config,
    store: BlockStore,
    target: str,
    num_blocks: int,
    skipped_rows: Mapping[str, int],
) -> DatasetSummary:
    blocks = [store.read(number) for number in range(num_blocks)]
    files = files_of(blocks, DATASET)
    paths = [store.path_of(file) for file in files["train"]]
    return DatasetSummary(
        recipe=config.recipe,
        source_prefix=config.data.source_prefix,
        source_suffix=config.data.source_suffix,
        max_source_length=0,
        max_target_length=0,
        splits=summed(blocks).by_split(),
        files={split: [file.name for file in files[split]] for split in SPLITS if split in files},
        skipped_rows=dict(sorted(skipped_rows.items())),
        tokenizer={},
        target=target,
        **trivial_targets(_first_targets(RowSplit(ArrowSplit(paths)), target)),
    )


def _tokenizer_record(
    context: StageContext, config: Config, store: BlockStore, summary: DatasetSummary
) -> dict[str, Any]:
    """Make the tokenizer of the columns that hold texts, and return what it is; empty for none."""
    columns = _recipe(config).text_columns
    if not columns:
        return {}
    rows = RowSplit(ArrowSplit([store.dataset / name for name in summary.files["train"]]))
    texts = (str(rows[index][column]) for index in range(len(rows)) for column in columns)
    return record_of(TextTokenizer.load(ensure_tokenizer_of(context, config, store, texts)))


def _with_truncated(
    config: Config, store: BlockStore, summary: DatasetSummary
) -> Mapping[str, Mapping[str, int]]:
    """Return the splits' counts, with the rows whose texts the recipe will cut."""
    recipe = _recipe(config)
    is_truncated = recipe.is_truncated
    if is_truncated is None or not summary.tokenizer:
        return summary.splits
    tokenizer = TextTokenizer.load(store.dataset / TOKENIZER_FOLDER)
    last = recipe.last_argument(values_of(config.settings))
    counts = {}
    for split, counted in summary.splits.items():
        rows = RowSplit(ArrowSplit([store.dataset / name for name in summary.files[split]]))
        cut = sum(is_truncated(rows[index], tokenizer, *last) for index in range(len(rows)))
        counts[split] = {**counted, **({"cut_targets": cut} if cut else {})}
    return counts


def _first_targets(rows: RowSplit, target: str) -> list[Any]:
    """Return the targets of the first training rows; none where no column has them."""
    num_counted = min(len(rows), MAX_COUNTED_TARGETS)
    return list(_values(rows, num_counted, target)) if target else []


def _values(rows: RowSplit, count: int, column: str) -> Iterator[Any]:
    for index in range(count):
        yield as_json_value(rows[index].get(column))


def _dataset(store: BlockStore, summary: DatasetSummary, read: RowCounts) -> StageOutputs:
    blocks = [store.read(number) for number in range(read.num_blocks)]
    digests = {file.name: file.blake3 for of in files_of(blocks, DATASET).values() for file in of}
    store.keep_only(digests)
    write_json(store.dataset / SUMMARY_FILE, summary.to_json())
    metadata = row_metadata(summary, read)
    return StageOutputs({"dataset": Output("dataset", store.dataset, metadata, digests)})
