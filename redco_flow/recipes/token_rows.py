"""Rows of token ids as one array: checked against the vocabulary, padded on either side.

Dims in this file: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from redco_flow.recipes.recipe import Example

Row = NDArray[np.int32]


def checked_ids(example: Example, key: str, length: int, vocab_size: int) -> Row:
    """Return an example's ids.

    Raises:
        ValueError: a token id outside the vocabulary, or more than `length` tokens.
    """
    ids = np.asarray(example[key], np.int32)
    name = example.get("row_id", "an example")
    if len(ids) > length:
        raise ValueError(f"{name}: {key} has {len(ids)} tokens; batches are {length} wide.")
    # JAX reads the nearest row of a table for an id outside it, silently.
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(
            f"{name}: {key} holds token id {bad}, outside the model's vocabulary of {vocab_size}: "
            "was the data preprocessed with another tokenizer?"
        )
    return ids


def padded(
    rows: Sequence[Row], length: int, fill: int, *, on_the_left: bool = False
) -> NDArray[np.int32]:
    """Return the rows as (B, T) of `length`."""
    found = np.full((len(rows), length), fill, np.int32)
    for row, ids in zip(found, rows, strict=True):
        start = length - len(ids) if on_the_left else 0
        row[start : start + len(ids)] = ids
    return found
