"""Keep rows as they are, for recipes that encode nothing: split, held out, checked, digested.

A row is checked by what training does with it: the recipe's `collate_fn` makes a batch of it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from redco_flow.errors import UnusableRow
from redco_flow.recipes.build import collate_rows
from redco_flow.recipes.recipe import (
    CLASSES,
    Batch,
    Collate,
    Example,
    RowColumns,
    encodes_rows,
    find_recipe,
    takes_messages,
    text_columns,
)
from redco_flow.records import write_json
from redco_flow.spec.names import failure
from redco_flow.spec.recipe_settings import read_settings, values_of
from redco_flow.stages.artifacts.dataset import (
    SUMMARY_FILE,
    ArrowSplit,
    DatasetSummary,
    RowSplit,
)
from redco_flow.stages.context import Output, Shard, StageContext, StageOutputs
from redco_flow.stages.data.row_values import (
    BadValue,
    MissingPillow,
    as_json_value,
    pack_row,
    unpack_row,
)
from redco_flow.stages.data.rows import BadRow, FileRow, problem_of_field
from redco_flow.stages.data.source import Source
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
    summed,
    trivial_targets,
)
from redco_flow.stages.preprocess.labels import ClassLabels, Labels, class_names, labels_for
from redco_flow.stages.preprocess.pairs import SplitOf
from redco_flow.stages.preprocess.tokenizer import ensure_tokenizer_of
from redco_flow.text.tokenizer import TextTokenizer


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
    """How a row of the data becomes one that is kept.

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
            packed = pack_row(self._columns(row.fields) | self._label(row.fields, source))
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


def run_shard(context: StageContext, config: Config, shard: Shard) -> Callable[[], StageOutputs]:
    """Keep a shard's blocks; return what joins all shards' into the dataset.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used.
    """
    store = BlockStore(context.work_dir)
    recipe = find_recipe(config.recipe)
    columns = RowColumns.of(recipe)
    labels = labels_for(recipe, values_of(config.settings))
    collate_fn = _checking(config, labels)
    read_row = RowReader(
        columns.names,
        config.data.columns,
        collate_fn,
        columns.target,
        labels,
        getattr(recipe, "SPLIT_BY", ()),
        getattr(recipe, "split_key", None),
    )
    if encodes_rows(recipe):
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
        summary = _summary(config, store, columns, num_blocks, source.skipped)
        summary = replace(
            summary,
            classes=class_names(labels),
            tokenizer=_tokenizer_record(context, config, store, summary),
        )
        return _dataset(store, summary, num_blocks)

    return join


def _encoding(
    context: StageContext, config: Config, store: BlockStore, read_row: RowReader
) -> RowReader:
    """Return a reader that encodes rows, by a tokenizer that is made if it is not there."""
    recipe = find_recipe(config.recipe)

    def texts() -> Iterator[str]:
        """Read all rows once before they are encoded, where a tokenizer is to be trained."""
        source = RawPairs(context, config, read_row)
        for block_split, batch in source.batches("reading for the tokenizer", lambda _: True):
            if block_split.split == "train":
                rows = map(unpack_row, batch["row"])
                yield from (
                    _text_of(row[column]) for row in rows for column in text_columns(recipe)
                )

    directory = ensure_tokenizer_of(context, config, store, texts())
    renders = {}
    if takes_messages(recipe):
        kwargs = tuple(sorted(config.data.chat_template_kwargs.items()))
        renders["template"] = partial(load_template, str(directory), kwargs)
    encode = partial(
        recipe.encode_row,
        **renders,
        tokenizer=TextTokenizer.load(directory),
        settings=read_settings(recipe, values_of(config.settings)),
        source_prefix=config.data.source_prefix,
        source_suffix=config.data.source_suffix,
    )
    return replace(read_row, encode=encode)


def _text_of(value: Any) -> str:
    """A text, or those of messages."""
    if isinstance(value, list):
        return "\n".join(str(one.get("content", "")) for one in value if isinstance(one, dict))
    return str(value)


def _checking(config: Config, labels: Labels | None) -> Collate:
    """Return the recipe's collate_fn; of classes it knows those that were read so far."""
    settings = values_of(config.settings)

    @cache
    def with_classes(_num_classes: int) -> Collate:
        names = class_names(labels)
        own = settings if names is None else {**settings, CLASSES: names}
        return collate_rows(config.recipe, own)

    def collate_fn(examples: Sequence[Example]) -> Batch:
        num_classes = len(labels) if isinstance(labels, ClassLabels) else 0
        return with_classes(num_classes)(examples)

    return collate_fn


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
    columns: RowColumns,
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
        target=columns.target or "",
        **trivial_targets(_first_targets(RowSplit(ArrowSplit(paths)), columns.target)),
    )


def _tokenizer_record(
    context: StageContext, config: Config, store: BlockStore, summary: DatasetSummary
) -> dict[str, Any]:
    """Make the tokenizer of the columns that hold texts, and return what it is; empty for none."""
    columns = text_columns(find_recipe(config.recipe))
    if not columns:
        return {}
    rows = RowSplit(ArrowSplit([store.dataset / name for name in summary.files["train"]]))
    texts = (str(rows[index][column]) for index in range(len(rows)) for column in columns)
    return record_of(TextTokenizer.load(ensure_tokenizer_of(context, config, store, texts)))


def _first_targets(rows: RowSplit, target: str | None) -> list[Any]:
    """Return the targets of the first training rows; none where no column has them."""
    num_counted = min(len(rows), MAX_COUNTED_TARGETS)
    return [] if target is None else list(_values(rows, num_counted, target))


def _values(rows: RowSplit, count: int, column: str) -> Iterator[Any]:
    for index in range(count):
        yield as_json_value(rows[index].get(column))


def _dataset(store: BlockStore, summary: DatasetSummary, num_blocks: int) -> StageOutputs:
    blocks = [store.read(number) for number in range(num_blocks)]
    digests = {file.name: file.blake3 for of in files_of(blocks, DATASET).values() for file in of}
    store.keep_only(digests)
    write_json(store.dataset / SUMMARY_FILE, summary.to_json())
    metadata = {
        "splits": summary.splits,
        "skipped_rows": summary.skipped_rows,
        "recipe": summary.recipe,
    }
    return StageOutputs({"dataset": Output("dataset", store.dataset, metadata, digests)})
