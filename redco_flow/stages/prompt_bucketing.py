"""Which prompts are generated from together: those of like length, in a few widths.

Everything follows from the prompts' lengths and the batch size alone, so every process and every
attempt chooses alike.
Dims in this file: N examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from redco_flow.engine.length_buckets import Bucketing, choose_buckets
from redco_flow.recipes.recipe import Recipe

_MAX_WIDTHS = 4
# A width's compilation takes as long as generating a few batches does.
_MIN_BATCHES_PER_WIDTH = 8
# Reading a prompt is a small part of generating: a few tokens of padding cost next to nothing.
_WIDTH_MULTIPLE = 64


def bucket_prompts(
    recipe: Recipe, examples: Sequence[Mapping[str, Any]], batch_size: int
) -> Bucketing | None:
    """Choose the widths of batches of prompts; the widest is that of `recipe.collate_prompts`.

    Returns:
        None where one width does: the prompts are few, or the recipe has no other.
    """
    num_widths = min(_MAX_WIDTHS, len(examples) // (batch_size * _MIN_BATCHES_PER_WIDTH))
    if num_widths < 2 or recipe.prompt_widths is None or recipe.collate_prompts_to is None:
        return None
    lengths = np.array([len(example["source_ids"]) for example in examples], np.int64)
    buckets = choose_buckets(recipe.prompt_widths(lengths), num_widths, multiple=_WIDTH_MULTIPLE)
    narrow = map(recipe.collate_prompts_to, buckets.widths[:-1])
    return Bucketing(buckets, (*narrow, recipe.collate_prompts))
