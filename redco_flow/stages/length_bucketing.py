"""Batch examples by length for generation and scoring, in a few widths.

Everything follows from the examples' lengths and the batch size alone, so every process and every
attempt makes the same batches.
Dims in this file: N examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.recipes.recipe import Collate, Recipe

if TYPE_CHECKING:
    from redco_flow.recipes.recipe import Lengths

Examples = Sequence[Mapping[str, Any]]

_MAX_WIDTHS = 4
# A width's compilation takes as long as a few batches do.
_MIN_BATCHES_PER_WIDTH = 8
# Reading a prompt is a small part of generating: a few tokens of padding cost next to nothing.
_PROMPT_WIDTH_MULTIPLE = 64
_ROW_WIDTH_MULTIPLE = 8


def bucket_prompts(recipe: Recipe, examples: Examples, batch_size: int) -> Bucketing | None:
    """Choose the widths of batches of prompts; the widest is that of `recipe.collate_prompts`.

    Returns:
        None where one width does: the prompts are few, or the recipe has no other.
    """
    if recipe.collate_prompts is None:  # the same batches as for the loss
        return bucket_rows(recipe, examples, batch_size)
    num_widths = _num_widths(len(examples), batch_size)
    if num_widths < 2 or recipe.prompt_widths is None or recipe.collate_prompts_to is None:
        return None
    lengths = recipe.prompt_widths(lengths_of(examples, "source_ids"))
    buckets = choose_buckets(lengths, num_widths, multiple=_PROMPT_WIDTH_MULTIPLE)
    narrow = map(recipe.collate_prompts_to, buckets.widths[:-1])
    return Bucketing(buckets, (*narrow, recipe.collate_for_prediction))


def bucket_rows(recipe: Recipe, examples: Examples, batch_size: int) -> Bucketing | None:
    """Choose the widths of batches of sources with their targets.

    Returns:
        None where one width does: the examples are few, or the recipe has no other.
    """
    if not recipe.has_widths:
        return None
    lengths = recipe.widths_of(partial(lengths_of, examples))
    return bucket_lengths(lengths, recipe.collate_wide, batch_size)


def bucket_lengths(
    lengths: Lengths, collate_to: Callable[[Sequence[int]], Collate], batch_size: int
) -> Bucketing | None:
    """Choose the widths of batches of rows of these lengths (N, D).

    Args:
        collate_to: (D widths) -> a collate_fn that pads to those.

    Returns:
        None where one width does: the rows are few.
    """
    num_widths = _num_widths(len(lengths), batch_size)
    if num_widths < 2:
        return None
    buckets = choose_buckets(lengths, num_widths, multiple=_ROW_WIDTH_MULTIPLE)
    return Bucketing(buckets, tuple(map(collate_to, buckets.widths)))


def lengths_of(examples: Examples, column: str) -> Lengths:
    """Return how many token ids of a column each example has, (N,)."""
    return np.array([len(example[column]) for example in examples], np.int64)


def _num_widths(num_examples: int, batch_size: int) -> int:
    return min(_MAX_WIDTHS, num_examples // (batch_size * _MIN_BATCHES_PER_WIDTH))
