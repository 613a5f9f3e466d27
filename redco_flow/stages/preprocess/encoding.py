"""Encode batches beside the caller, giving them back in order: the result does not depend on
how many processes there are.

One worker is this process itself, in threads: a tokenizer works without the interpreter's lock
and on all cores. Knows processes and order; the encoding itself is a recipe's `encode`. At most
two batches per worker wait at a time, so memory stays flat.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import multiprocessing
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from redco_flow.stages.preprocess.labels import Labels
from redco_flow.stages.preprocess.pairs import Batch, BlockSplit, PairBatch, ReadRow
from redco_flow.text.chat import ChatTemplate, OnTooLong, TrainOn
from redco_flow.text.pairs import TruncationSide, Windows
from redco_flow.text.tokenizer import TextTokenizer, as_flat

Batches = Iterable[tuple[BlockSplit, PairBatch]]
SplitCount = Mapping[str, Mapping[str, int]]


def in_windows(batch: Batch, windows: Windows) -> Batch:
    """Return one example per window; the second one of a row is "row#2"."""
    seen: Counter[int] = Counter()
    row_ids = []
    for row in windows.text_of:
        seen[row] += 1
        row_id = batch["row_id"][row]
        row_ids.append(row_id if seen[row] == 1 else f"{row_id}#{seen[row]}")
    sources = [batch["source"][row] for row in windows.text_of]
    return {
        "row_id": row_ids,
        "source": sources if windows.sources is None else windows.sources,
        "references": [[text] for text in windows.texts],
        "part": [batch["part"][row] for row in windows.text_of],
    }


logger = logging.getLogger(__name__)

_WAITING_PER_WORKER = 2
# One thread reads a batch's ids, which holds the interpreter, while the other's tokenizer works.
_NUM_THREADS = 2


@dataclass(frozen=True)
class EncodeCall:
    """Arguments of encoding pairs: plain values that travel to another process.

    Args:
        module: the recipe's dotted module.
        tokenizer: the tokenizer's directory.
        is_plain_text: whether the targets are texts without a source.
        are_labelled: whether the targets are no texts, of which nothing is encoded.
        truncation_side: which end of a source is cut off; None: its end.
    """

    module: str
    tokenizer: str
    is_plain_text: bool
    are_labelled: bool
    source_prefix: str
    source_suffix: str
    max_source_length: int
    max_target_length: int
    truncation_side: TruncationSide | None = None

    def prepare(self) -> None:
        """Load what the calls of a process share."""
        load_tokenizer(self.tokenizer)

    def __call__(self, sources: list[str], targets: list[str]) -> Any:
        """Return the recipe's `EncodedPairs`, whose ids are `FlatIds`."""
        encoded = self._encoded(sources, targets)
        source_ids, target_ids = as_flat(encoded.source_ids), as_flat(encoded.target_ids)
        return dataclasses.replace(encoded, source_ids=source_ids, target_ids=target_ids)

    def _encoded(self, sources: list[str], targets: list[str]) -> Any:
        recipe = importlib.import_module(self.module)
        tokenizer = load_tokenizer(self.tokenizer)
        if self.is_plain_text:
            return recipe.encode_texts(targets, tokenizer, max_length=self.max_target_length)
        return recipe.encode(
            sources,
            [] if self.are_labelled else targets,
            tokenizer,
            source_prefix=self.source_prefix,
            source_suffix=self.source_suffix,
            max_source_length=self.max_source_length,
            max_target_length=self.max_target_length,
            # A recipe of a user's own need not know it.
            **({"truncation_side": self.truncation_side} if self.truncation_side else {}),
        )


@dataclass(frozen=True)
class EncodeChats:
    """Arguments of encoding conversations: plain values that travel to another process.

    Args:
        module: the recipe's dotted module.
        tokenizer: the directory of a tokenizer with a chat template.
        template_kwargs: what the template gets besides the messages.
    """

    module: str
    tokenizer: str
    template_kwargs: tuple[tuple[str, Any], ...]
    train_on: TrainOn
    max_length: int
    on_too_long: OnTooLong

    def prepare(self) -> None:
        """Load what the calls of a process share."""
        template = load_template(self.tokenizer, self.template_kwargs)
        if template.asks_the_clock:
            logger.warning(
                "the chat template may write today's date (strftime_now): a dataset made on "
                "another day has other tokens. Give data.chat_template_kwargs: {date_string: …}, "
                "where the template takes one."
            )

    def __call__(self, sources: list[str], _targets: list[str]) -> Any:
        """Return the recipe's `EncodedPairs`."""
        recipe = importlib.import_module(self.module)
        return recipe.encode(
            sources,
            load_template(self.tokenizer, self.template_kwargs),
            train_on=self.train_on,
            max_length=self.max_length,
            on_too_long=self.on_too_long,
        )


Encode = EncodeCall | EncodeChats


def encode_batches(
    call: Encode, batches: Iterable[tuple[BlockSplit, Batch]], num_workers: int
) -> Generator[tuple[BlockSplit, Batch, Any], None, None]:
    """Yield each block's split, batch and encoding, in order; targets are the first references.

    Batches are drawn, and their encodings used, in the caller's thread while others are encoded.
    """
    with _collecting_only_what_is_new(), _pool(call, num_workers) as pool:
        waiting: deque[tuple[BlockSplit, Batch, Future[Any]]] = deque()
        try:
            for block_split, batch in batches:
                future = pool.submit(
                    call, batch["source"], [texts[0] for texts in batch["references"]]
                )
                waiting.append((block_split, batch, future))
                if len(waiting) >= _WAITING_PER_WORKER * max(num_workers, _NUM_THREADS):
                    yield _finished(waiting)
            while waiting:
                yield _finished(waiting)
        finally:
            for _, _, future in waiting:
                future.cancel()


@contextmanager
def _collecting_only_what_is_new() -> Iterator[None]:
    """Keep what is there now out of the garbage collector's sight.

    Each batch makes thousands of objects, and for them it would look through those of every
    imported module again and again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _pool(call: Encode, num_workers: int) -> Executor:
    if num_workers == 1:
        call.prepare()  # not by every thread at the same time
        return ThreadPoolExecutor(_NUM_THREADS)
    # Spawned, not forked: a fork of a process with threads (Arrow's, the tokenizer's) can hang.
    return ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))


def _finished(
    waiting: deque[tuple[BlockSplit, Batch, Future[Any]]],
) -> tuple[BlockSplit, Batch, Any]:
    """Wait for the oldest batch and take it out."""
    block_split, batch, future = waiting.popleft()
    encoded = future.result()
    windows = encoded.windows
    unusable = [(batch["row_id"][row], *why) for row, *why in encoded.unusable]
    encoded = dataclasses.replace(encoded, unusable=unusable)
    return block_split, batch if windows is None else in_windows(batch, windows), encoded


@lru_cache(maxsize=1)
def load_tokenizer(directory: str) -> TextTokenizer:
    """Load a dataset's tokenizer once per process: thousands of batches share it."""
    return TextTokenizer.load(Path(directory))


@lru_cache(maxsize=1)
def load_template(directory: str, kwargs: tuple[tuple[str, Any], ...]) -> ChatTemplate:
    """Load a dataset's chat template once per process."""
    return ChatTemplate.load(Path(directory), dict(kwargs))


@dataclass(frozen=True)
class Encoded:
    """A batch of examples as they are written.

    Args:
        columns: of the examples, at least `row_id`.
        types: of the columns that are written.
        counts: of the batch: see `DatasetSummary.splits`.
        unusable: rows that could not be encoded: where they are, reason and detail.
    """

    columns: Mapping[str, Any]
    types: Mapping[str, str]
    counts: Mapping[str, int]
    unusable: Sequence[tuple[str, str, str]] = ()


class ExampleEncoder(Protocol):
    """Makes a recipe's examples from rows."""

    @property
    def phase(self) -> str:
        """The phase that the stage reports meanwhile."""
        ...

    @property
    def read_row(self) -> ReadRow:
        """Checks a row and makes of it what is encoded."""
        ...

    @property
    def labels(self) -> Labels | None:
        """Reads the targets that are classes or numbers; None of others."""
        ...

    def encode(self, batches: Batches) -> Generator[tuple[BlockSplit, Encoded], None, None]:
        """Yield each batch's block and split with its examples, in order."""
        ...

    def encode_grouped(self, batches: Batches) -> Generator[tuple[BlockSplit, Encoded], None, None]:
        """Do so with batches of examples that have several references each."""
        ...

    def summary(self, counts: SplitCount, paths: Mapping[str, list[Path]]) -> dict[str, Any]:
        """Return the fields of a `DatasetSummary` that only this encoder knows.

        Args:
            counts: of all blocks by split.
            paths: the dataset's files by split.
        """
        ...

    def first_targets(self, paths: Sequence[Path]) -> list[Any]:
        """Return the targets of the first training examples, at most MAX_COUNTED_TARGETS.

        Args:
            paths: the training split's files.
        """
        ...


MAX_COUNTED_TARGETS = 100_000
