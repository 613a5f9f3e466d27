"""Predictions of a batch as one JSON value for each row.

Dims in this file: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def rows_of(found: Any) -> list[Any]:
    """Cut a tree of arrays (B, ...) into B trees."""
    import jax

    count = len(jax.tree.leaves(found)[0])
    return [jax.tree.map(lambda x, row=row: x[row], found) for row in range(count)]


def as_json(value: Any) -> Any:
    """Return a prediction's arrays and NumPy numbers as lists and numbers."""
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value
