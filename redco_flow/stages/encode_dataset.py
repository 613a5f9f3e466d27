"""Build a dataset: read pairs, hold out splits, get a tokenizer, encode, write.

The heavy body of preprocess. With a tokenizer that is there already, rows are encoded while they
are read. What must be seen as a whole first (all rows for a tokenizer to be trained, a grouped
evaluation split) is put into raw files in the work directory and encoded from there. Memory does
not grow with the data, except for the distinct words (for a trained tokenizer) and one hash per
row of a grouped evaluation split.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from redco_flow.recipes.recipe import find_recipe
from redco_flow.recipes.text_tokenizer import TextTokenizer
from redco_flow.records import write_json
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.bad_rows import BadRowLog
from redco_flow.stages.context import Output, StageContext, StageOutputs
from redco_flow.stages.data_source import SPLITS
from redco_flow.stages.dataset_artifact import (
    SUMMARY_FILE,
    TOKENIZER_FOLDER,
    DatasetSummary,
)
from redco_flow.stages.encoded_splits import EncodedSplits
from redco_flow.stages.grouping import Batch
from redco_flow.stages.held_back import HeldBackRows
from redco_flow.stages.local_model import tokenizer_source
from redco_flow.stages.model_tokenizer import save_pretrained_tokenizer
from redco_flow.stages.pair_batches import read_pair_batches
from redco_flow.stages.parallel_encoding import EncodeCall, encode_batches
from redco_flow.stages.preprocess import Config, problem_of_texts
from redco_flow.stages.text_pairs import PairBatch
from redco_flow.stages.tokenizer_training import save_tokenizer, train_tokenizer


def encode_dataset(context: StageContext, config: Config) -> StageOutputs:
    """Write the dataset into the work directory.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used.
        ValueError: the tokenizer cannot be had or trained.
    """
    raw, dataset = _empty(context.work_dir / "raw"), _empty(context.work_dir / "dataset")
    tokenizer, bad_rows = dataset / TOKENIZER_FOLDER, BadRowLog(config.data.on_bad_row)
    is_there = _fetch_tokenizer(context, config, tokenizer)
    call = _encode_call(config, tokenizer)
    held_back = _held_back(config, raw, is_tokenizer_there=is_there)
    with EncodedSplits(dataset) as splits:
        phase = "reading and encoding" if is_there else "reading"
        pairs = read_pair_batches(context, config, bad_rows, phase)
        _encode(call, held_back.take_from(pairs), config.num_workers, splits)
        if not is_there:
            _train_tokenizer(context, config, held_back.pairs("train"), tokenizer)
        _encode(call, _reported(context, held_back, splits), config.num_workers, splits)
    skipped = dict(sorted(bad_rows.counts.items()))
    summary = _summary(config, TextTokenizer.load(tokenizer), splits, skipped)
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


def _fetch_tokenizer(context: StageContext, config: Config, directory: Path) -> bool:
    """Save the tokenizer that the pipeline names into the dataset; False where it names none."""
    source = tokenizer_source(config.model, config.data)
    if source is not None:
        context.report(phase="tokenizer")
        save_pretrained_tokenizer(source, directory)
    return source is not None


def _train_tokenizer(
    context: StageContext, config: Config, train: Iterable[PairBatch], directory: Path
) -> None:
    """Train a tokenizer on the training rows and save it into the dataset."""
    context.report(phase="tokenizer")
    asked = config.data.tokenizer.train if config.data.tokenizer else None
    if asked is None:
        raise ValueError(
            "there is no tokenizer: give data.tokenizer: {train: {vocab_size: 4096}}, or "
            "data.tokenizer.name_or_path, or a model.name_or_path that has one."
        )
    texts = _texts(context, train, config.data)
    save_tokenizer(train_tokenizer(texts, asked.vocab_size, asked.type), directory)


def _texts(context: StageContext, train: Iterable[PairBatch], data: DataSection) -> Iterator[str]:
    for batch in train:
        context.raise_if_stopped()
        if data.text_key is None:
            around = data.source_prefix, data.source_suffix
            yield from (around[0] + source + around[1] for source in batch["source"])
        yield from batch["target"]


def _encode_call(config: Config, tokenizer: Path) -> EncodeCall:
    recipe = find_recipe(config.recipe)
    if problem := problem_of_texts(config.data, recipe):
        raise ValueError(problem)
    return EncodeCall(
        module=recipe.__name__,
        tokenizer=str(tokenizer),
        is_plain_text=config.data.text_key is not None,
        source_prefix=config.data.source_prefix,
        source_suffix=config.data.source_suffix,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
    )


def _encode(
    call: EncodeCall, batches: Iterable[tuple[str, Batch]], num_workers: int, splits: EncodedSplits
) -> None:
    """Encode batches and write them; closes the pool also where writing fails."""
    with closing(encode_batches(call, batches, num_workers)) as encoded_batches:
        for split, batch, encoded in encoded_batches:
            splits.write(split, batch, encoded)


def _held_back(config: Config, raw: Path, *, is_tokenizer_there: bool) -> HeldBackRows:
    grouped = frozenset(SPLITS) - {"train"} if config.data.group_by_source else frozenset()
    return HeldBackRows(raw, grouped if is_tokenizer_there else frozenset(SPLITS), grouped)


def _reported(
    context: StageContext, held_back: HeldBackRows, splits: EncodedSplits
) -> Iterator[tuple[str, Batch]]:
    """Pass on what was held back, saying how far its encoding is."""
    for split, batch in held_back.examples():
        context.raise_if_stopped()
        context.report(
            phase=f"encoding {split}",
            step=splits.num_rows(split),
            total_steps=held_back.num_rows[split],
        )
        yield split, batch


def _summary(
    config: Config, tokenizer: TextTokenizer, splits: EncodedSplits, skipped: Mapping[str, int]
) -> DatasetSummary:
    return DatasetSummary(
        recipe=config.recipe,
        source_prefix=config.data.source_prefix,
        source_suffix=config.data.source_suffix,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        splits=splits.counts,
        skipped_rows=skipped,
        tokenizer={
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "pad_id": tokenizer.pad_id,
            "eos_id": tokenizer.eos_id,
        },
        most_frequent_target=splits.most_frequent_target,
    )
