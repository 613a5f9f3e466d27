"""Bits per byte: the loss of the references in bits, over the bytes of their texts as UTF-8.

Unlike perplexity it does not depend on how a text is cut into tokens, so models with different
tokenizers are to be compared by it, unless a tokenizer has a token for what it does not know, which
stands for any text at all. What ends a text counts as loss and has no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from redco_flow.metrics.perplexity import likelihood_statistics

__all__ = ["COUNTS", "KEYS", "from_statistics", "likelihood_statistics", "of_likelihoods"]

KEYS = {"bits_per_byte": "min"}
COUNTS = "bytes"


def of_likelihoods(losses: Sequence[float], counts: Sequence[int]) -> dict[str, list[float]]:
    """Return each example's bits per byte; its bits where it has no bytes, or a count below 0."""
    pairs = zip(losses, counts, strict=True)
    return {"bits_per_byte": [_bits_per_byte(loss, count) for loss, count in pairs]}


def from_statistics(totals: Sequence[float]) -> dict[str, float]:
    """Return the bits per byte of examples with these summed losses and bytes."""
    return {"bits_per_byte": _bits_per_byte(*totals)}


def _bits_per_byte(loss: float, num_bytes: float) -> float:
    return loss / math.log(2) / max(num_bytes, 1)
