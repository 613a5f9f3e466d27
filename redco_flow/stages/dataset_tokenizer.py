"""The tokenizer of a dataset that is being made: fetched or trained once, by one of the processes.

The others wait; if the one dies, the kernel hands its lock to the next. Equal training rows give
an equal tokenizer, whichever process trains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from redco_flow.launch.work_lock import acquire
from redco_flow.records import sync
from redco_flow.stages.context import StageContext
from redco_flow.stages.dataset_artifact import TOKENIZER_FOLDER
from redco_flow.stages.dataset_blocks import BlockStore
from redco_flow.stages.local_model import tokenizer_source
from redco_flow.stages.model_tokenizer import save_pretrained_tokenizer
from redco_flow.stages.pair_batches import KeptPairs, RawPairs
from redco_flow.stages.preprocess import Config
from redco_flow.stages.tokenizer_training import save_tokenizer, train_tokenizer


def ensure_tokenizer(
    context: StageContext, config: Config, store: BlockStore
) -> tuple[Path, KeptPairs | None]:
    """Return the directory of the dataset's tokenizer, which is made if it is not there.

    And the pairs, where all of them had to be read for it.

    Raises:
        BadRows, NoRows, DataChanged: a tokenizer is to be trained on data that cannot be used.
        ValueError: the tokenizer cannot be had or trained.
        Stopped: a stop was requested.
    """
    directory = store.dataset / TOKENIZER_FOLDER

    def while_waiting(holder: str) -> None:
        context.report(phase=f"waiting for the tokenizer of {holder}")
        context.raise_if_stopped()

    kept = None
    lock = acquire(context.work_dir / "tokenizer.lock", context.holder(), while_waiting)
    try:
        if not directory.exists():
            unfinished = store.new_file()
            kept = _make_tokenizer(context, config, store, unfinished)
            _put_in_place(unfinished, directory)
    finally:
        lock.release()
    return directory, kept


def _make_tokenizer(
    context: StageContext, config: Config, store: BlockStore, directory: Path
) -> KeptPairs | None:
    source = tokenizer_source(config.model, config.data)
    if source is not None:
        context.report(phase="tokenizer")
        of = config.data.tokenizer or config.model
        save_pretrained_tokenizer(source, directory, revision=of.revision)
        return None
    asked = config.data.tokenizer.train if config.data.tokenizer else None
    assert asked is not None  # Config sees to it
    kept = KeptPairs(context, RawPairs(context, config), store.new_file())
    texts = _training_texts(context, config, kept)
    save_tokenizer(train_tokenizer(texts, asked.vocab_size, asked.type), directory)
    return kept


def _training_texts(context: StageContext, config: Config, kept: KeptPairs) -> Iterator[str]:
    """Every text of the training rows, in reading order."""
    data = config.data
    for place, batch in kept.keep("reading for the tokenizer"):
        if place.split != "train":
            continue
        if data.text_key is None:
            around = data.source_prefix, data.source_suffix
            yield from (around[0] + source + around[1] for source in batch["source"])
        yield from batch["target"]
    context.report(phase="tokenizer")


def _put_in_place(unfinished: Path, directory: Path) -> None:
    for path in (*unfinished.iterdir(), unfinished):
        sync(path)
    unfinished.rename(directory)
    sync(directory.parent)
