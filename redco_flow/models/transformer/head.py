"""The head of a language model: from hidden states to scores of the vocabulary.

It is separate from the modules, so that a loss can score a few tokens at a time.
Dims in this file: B batch, T sequence, D model, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from redco_flow.models.attention.grouped import cap
from redco_flow.models.projections import wide_product


class Head(NamedTuple):
    """A head's arrays.

    Attributes:
        kernel: (D, V) in the hidden states' dtype; of tied models the embedding, transposed.
        bias: (V,) or (1, V) float32, or None.
    """

    kernel: jax.Array
    bias: jax.Array | None


class Unscored(NamedTuple):
    """A model's results before its head.

    Attributes:
        hidden: (B, T, D), normalised and scaled as the head takes it.
        head: what `score` multiplies it by.
        router_logits: a mixture's, (L, B, T, E); None of other models.
    """

    hidden: jax.Array
    head: Head
    router_logits: jax.Array | None = None


def score(logit_cap: float | None, head: Head, hidden: jax.Array) -> jax.Array:
    """Score the vocabulary: (…, D) to (…, V), float32.

    Args:
        logit_cap: the soft cap of the scores; None: there is none.
    """
    scores = wide_product(hidden, head.kernel)
    if head.bias is not None:
        scores = scores + head.bias
    return cap(scores, logit_cap)
