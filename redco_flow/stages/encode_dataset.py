"""Build a dataset: read pairs, hold out splits, get a tokenizer, encode, write.

The heavy body of preprocess. Rows stream through files in the work directory, so memory does
not grow with the data; only the distinct words (for a trained tokenizer) and one hash per row of
a grouped evaluation split are held.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redco_flow.recipes.recipe import find_recipe
from redco_flow.recipes.text_tokenizer import TextTokenizer
from redco_flow.records import write_json
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.arrow_split import TEXT, ArrowSplit, SplitWriter
from redco_flow.stages.bad_rows import BadRowLog, NoRows
from redco_flow.stages.context import Output, StageContext, StageOutputs
from redco_flow.stages.data_integrity import DataGuard
from redco_flow.stages.data_source import SPLITS, open_sources
from redco_flow.stages.dataset_artifact import (
    COLUMNS,
    SUMMARY_FILE,
    TOKENIZER_FOLDER,
    DatasetSummary,
    split_path,
)
from redco_flow.stages.grouping import Batch, grouped, ungrouped
from redco_flow.stages.local_model import tokenizer_source
from redco_flow.stages.model_tokenizer import save_pretrained_tokenizer
from redco_flow.stages.parallel_encoding import EncodeCall, encode_batches
from redco_flow.stages.preprocess import Config, data_files
from redco_flow.stages.text_pairs import read_pairs
from redco_flow.stages.tokenizer_training import save_tokenizer, train_tokenizer

_RAW_COLUMNS = {"row_id": TEXT, "source": TEXT, "target": TEXT}
_MAX_COUNTED_TARGETS = 100_000


def encode_dataset(context: StageContext, config: Config) -> StageOutputs:
    """Write the dataset into the work directory.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used.
        ValueError: the tokenizer cannot be had or trained.
    """
    raw, dataset = _empty(context.work_dir / "raw"), _empty(context.work_dir / "dataset")
    skipped = _read_raw(context, config, raw)
    splits = {split: ArrowSplit(split_path(raw, split)) for split in _nonempty(raw)}
    if "train" not in splits:
        raise NoRows("no training rows are left after checking and holding out; see 'data'.")
    _make_tokenizer(context, config, splits["train"], dataset / TOKENIZER_FOLDER)
    tokenizer = TextTokenizer.load(dataset / TOKENIZER_FOLDER)
    counts = {
        split: _encode_split(context, config, split, rows, dataset)
        for split, rows in splits.items()
    }
    summary = _summary(config, tokenizer, counts, skipped, _most_frequent_target(splits["train"]))
    write_json(dataset / SUMMARY_FILE, summary.to_json())
    shutil.rmtree(raw)
    metadata = {"splits": summary.splits, "skipped_rows": skipped, "recipe": config.recipe}
    return StageOutputs({"dataset": Output("dataset", dataset, metadata)})


def _empty(folder: Path) -> Path:
    """Make a folder anew: what an interrupted attempt left is of no use."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _read_raw(context: StageContext, config: Config, raw: Path) -> dict[str, int]:
    """Write the usable pairs of each split; returns how many rows were skipped, by reason."""
    guard = DataGuard(context, data_files(config))
    bad_rows = BadRowLog(config.data.on_bad_row)
    num_read = 0

    def on_row() -> None:
        nonlocal num_read
        num_read += 1
        if num_read % 1000 == 1:
            context.raise_if_stopped()
            context.report(phase="reading", step=num_read)

    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(split_path(raw, split), _RAW_COLUMNS))
            for split in SPLITS
        }
        for pair in read_pairs(open_sources(config.data), config.data, bad_rows, on_row):
            row = {"row_id": [pair.row_id], "source": [pair.source], "target": [pair.target]}
            writers[pair.split].write(row)
    guard.check_again()
    bad_rows.raise_if_any()
    for split, writer in writers.items():
        if not writer.num_rows:
            split_path(raw, split).unlink()
            if getattr(config.data, split) or split == "train":
                raise NoRows(_no_rows_message(config.data, split, bad_rows))
    return dict(sorted(bad_rows.counts.items()))


def _no_rows_message(data: DataSection, split: str, bad_rows: BadRowLog) -> str:
    where = getattr(data, split) or data.dataset
    skipped = f" ({bad_rows.counts.total()} bad rows were skipped)" if bad_rows.counts else ""
    return f"{where}: no usable row for split '{split}'{skipped}; is the file empty?"


def _nonempty(raw: Path) -> list[str]:
    return [split for split in SPLITS if split_path(raw, split).is_file()]


def _make_tokenizer(
    context: StageContext, config: Config, train: ArrowSplit, directory: Path
) -> None:
    """Train or fetch the tokenizer and save it into the dataset."""
    context.report(phase="tokenizer")
    source = tokenizer_source(config.model, config.data)
    if source is not None:
        save_pretrained_tokenizer(source, directory)
        return
    asked = config.data.tokenizer.train if config.data.tokenizer else None
    if asked is None:
        raise ValueError(
            "there is no tokenizer: give data.tokenizer: {train: {vocab_size: 4096}}, or "
            "data.tokenizer.name_or_path, or a model.name_or_path that has one."
        )
    texts = _texts(context, train, config.data.source_prefix)
    save_tokenizer(train_tokenizer(texts, asked.vocab_size, asked.type), directory)


def _texts(context: StageContext, rows: ArrowSplit, source_prefix: str) -> Iterator[str]:
    for batch in rows.batches():
        context.raise_if_stopped()
        yield from (source_prefix + source for source in batch["source"])
        yield from batch["target"]


def _encode_split(
    context: StageContext, config: Config, split: str, rows: ArrowSplit, dataset: Path
) -> dict[str, int]:
    """Write one split's examples; returns its counts."""
    counts: Counter[str] = Counter()
    is_grouped = config.data.group_by_source and split != "train"
    batches = grouped(rows) if is_grouped else ungrouped(rows)
    call = EncodeCall(
        module=find_recipe(config.recipe).__name__,
        tokenizer=str(dataset / TOKENIZER_FOLDER),
        source_prefix=config.data.source_prefix,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
    )
    with SplitWriter(split_path(dataset, split), COLUMNS) as writer:
        for batch, encoded in encode_batches(call, batches, config.num_workers):
            context.raise_if_stopped()
            writer.write(
                {**batch, "source_ids": encoded.source_ids, "target_ids": encoded.target_ids}
            )
            _count(counts, batch, encoded)
            context.report(phase=f"encoding {split}", step=writer.num_rows, total_steps=len(rows))
    return dict(counts)


def _count(counts: Counter[str], batch: Batch, encoded: Any) -> None:
    counts["rows"] += len(batch["row_id"])
    counts["references"] += sum(map(len, batch["references"]))
    for side in ("source", "target"):
        lengths = [len(ids) for ids in getattr(encoded, f"{side}_ids")]
        counts[f"{side}_tokens"] += sum(lengths)
        counts[f"cut_{side}s"] += sum(getattr(encoded, f"is_{side}_cut"))
        counts[f"longest_{side}"] = max(counts[f"longest_{side}"], *lengths)


def _most_frequent_target(train: ArrowSplit) -> dict[str, Any]:
    """The commonest target among the first training rows; memory stays bounded."""
    targets: Counter[str] = Counter()
    for batch in train.batches():
        targets.update(batch["target"])
        if targets.total() >= _MAX_COUNTED_TARGETS:
            break
    # Ties go to the smallest text, not to the first: the order of rows is no property of a task.
    text, count = min(targets.items(), key=lambda item: (-item[1], item[0]))
    return {"text": text, "count": count, "among": targets.total()}


def _summary(
    config: Config,
    tokenizer: TextTokenizer,
    counts: Mapping[str, Mapping[str, int]],
    skipped: Mapping[str, int],
    most_frequent_target: Mapping[str, Any],
) -> DatasetSummary:
    return DatasetSummary(
        recipe=config.recipe,
        source_prefix=config.data.source_prefix,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        splits=counts,
        skipped_rows=skipped,
        tokenizer={
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "pad_id": tokenizer.pad_id,
            "eos_id": tokenizer.eos_id,
        },
        most_frequent_target=most_frequent_target,
    )
