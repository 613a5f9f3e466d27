"""drill: text_to_text whose training harms itself once, to see whether its run survives it.

Which harm is said by the variable of `FAULT_VARIABLE`; without it this is text_to_text. One process
does it while it makes a batch in the middle of the job's first start, so that neither a requeued
job nor a new attempt meets it again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redco_flow.launch.processes import ATTEMPT_VARIABLE, FAULT_VARIABLE, RankInfo
from redco_flow.recipes import text_to_text
from redco_flow.recipes.recipe import Batch, Collate, Example, Recipe
from redco_flow.recipes.text_to_text import encode
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["build", "encode"]

FAMILIES = text_to_text.FAMILIES
DEFAULT_FAMILY = text_to_text.DEFAULT_FAMILY
NUM_BATCHES_BEFORE = 40
SECONDS_PER_SLOW_BATCH = 4.0


def build(
    model: Mapping[str, Any], tokenizer: TextTokenizer, *, source_length: int, target_length: int
) -> Recipe:
    """Make text_to_text's recipe around a model, with the fault in what collates its batches.

    Raises:
        ValueError: as text_to_text's, or an unknown fault.
    """
    recipe = text_to_text.build(
        model, tokenizer, source_length=source_length, target_length=target_length
    )
    fault = os.environ.get(FAULT_VARIABLE)
    if fault is None or not _is_chosen(os.environ):
        return recipe
    if fault not in HARMS:
        raise ValueError(f"{FAULT_VARIABLE} is {fault!r}; it must be one of {', '.join(HARMS)}.")

    harm = _Harm(HARMS[fault])

    def collate_to(widths: Sequence[int]) -> Collate:
        return harm.before_batches_of(recipe.collate_wide(widths))

    return replace(recipe, collate_to=collate_to)


def _is_chosen(environ: Mapping[str, str]) -> bool:
    """Whether this is the second rank, or the only one, of a job that never started before."""
    rank = RankInfo.from_environment(environ)
    attempt = Path(environ.get(ATTEMPT_VARIABLE, "")).name
    return rank.rank == min(1, rank.num_processes - 1) and rank.restart == 0 and attempt == "1"


class _Harm:
    """Harm before one batch, of whatever width; a lasting one before each from there.

    Args:
        act: does it; returns whether to do it again for the next batch.
    """

    def __init__(self, act: Callable[[], bool]) -> None:
        self._act = act
        self._num_batches, self._goes_on = 0, False

    def before_batches_of(self, collate: Collate) -> Collate:
        """Return the collate function with the harm before its batches."""

        def harming(examples: Sequence[Example]) -> Batch:
            self._num_batches += 1
            if self._goes_on or self._num_batches == NUM_BATCHES_BEFORE:
                self._goes_on = self._act()
            return collate(examples)

        return harming


def _kill() -> bool:
    """Die as by the kernel's hand."""
    os.kill(os.getpid(), signal.SIGKILL)
    return False


def _stall() -> bool:
    """Stand still, all threads at once, as on a machine that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return False


def _preempt() -> bool:
    """Have the supervisor told what a cluster tells it that wants its host back."""
    os.kill(os.getppid(), signal.SIGTERM)
    return False


def _slow_down() -> bool:
    """Become too slow to finish in the job's time."""
    time.sleep(SECONDS_PER_SLOW_BATCH)
    return True


HARMS: Mapping[str, Callable[[], bool]] = {
    "preempt": _preempt,
    "kill": _kill,
    "stall": _stall,
    "timeout": _slow_down,
}
