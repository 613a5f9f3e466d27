"""Encode batches in several processes, giving them back in order: the result does not depend
on how many there are.

Knows processes and order; the encoding itself is a recipe's `encode`. At most two batches per
process wait at a time, so memory stays flat.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from redco_flow.recipes.text_tokenizer import TextTokenizer
from redco_flow.stages.grouping import Batch

_WAITING_PER_WORKER = 2


@dataclass(frozen=True)
class EncodeCall:
    """What to encode with: plain values that travel to another process.

    Args:
        module: the recipe's dotted module.
        tokenizer: the tokenizer's directory.
    """

    module: str
    tokenizer: str
    source_prefix: str
    max_source_length: int
    max_target_length: int

    def __call__(self, sources: list[str], targets: list[str]) -> Any:
        """Return the recipe's `EncodedPairs`."""
        return importlib.import_module(self.module).encode(
            sources,
            targets,
            _load_tokenizer(self.tokenizer),
            source_prefix=self.source_prefix,
            max_source_length=self.max_source_length,
            max_target_length=self.max_target_length,
        )


def encode_batches(
    call: EncodeCall, batches: Iterator[Batch], num_workers: int
) -> Iterator[tuple[Batch, Any]]:
    """Yield each batch with its encoding, in order; targets are the first references."""
    if num_workers == 1:
        for batch in batches:
            yield batch, call(batch["source"], _first_references(batch))
        return
    # Spawned, not forked: a fork of a process with threads (Arrow's, the tokenizer's) can hang.
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=processes) as pool:
        waiting: deque[tuple[Batch, Future[Any]]] = deque()
        try:
            for batch in batches:
                future = pool.submit(call, batch["source"], _first_references(batch))
                waiting.append((batch, future))
                if len(waiting) >= _WAITING_PER_WORKER * num_workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _first_references(batch: Batch) -> list[str]:
    return [references[0] for references in batch["references"]]


@lru_cache(maxsize=1)
def _load_tokenizer(directory: str) -> TextTokenizer:
    """Load once per process: thousands of batches share it."""
    return TextTokenizer.load(Path(directory))
