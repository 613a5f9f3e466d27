"""Perplexity: the exponential of the mean loss per token of the references, in nats.

The mean is over the tokens of all examples together; it depends on the tokenizer, so models with
different ones are not to be compared by it, but by `bits_per_byte`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

KEYS = {"perplexity": "min"}

# What the exponential of a larger mean is said to be: scores are finite.
_LARGEST_EXPONENT = math.log(sys.float_info.max)


def perplexity(mean_loss: float) -> float:
    """Return the exponential of a mean loss per token, in nats."""
    return math.exp(min(mean_loss, _LARGEST_EXPONENT))


def of_likelihoods(losses: Sequence[float], counts: Sequence[int]) -> dict[str, list[float]]:
    """Return each example's perplexity."""
    means = (loss / count for loss, count in zip(losses, counts, strict=True))
    return {"perplexity": [perplexity(mean) for mean in means]}


def likelihood_statistics(losses: Sequence[float], counts: Sequence[int]) -> list[list[float]]:
    """Return each example's summed loss and its count, of tokens here."""
    return [[loss, count] for loss, count in zip(losses, counts, strict=True)]


def from_statistics(totals: Sequence[float]) -> dict[str, float]:
    """Return the perplexity of examples with these summed losses and tokens."""
    loss, num_tokens = totals
    return {"perplexity": perplexity(loss / num_tokens)}
