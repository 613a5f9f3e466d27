"""Optimizers by name, as the published recipes for finetuning set them.

Anything that is an optax.GradientTransformation works with the Trainer; these are for those who
write a name in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

OPTIMIZER_TYPES = ("adamw", "adafactor", "lion", "sgd")


def make_optimizer(
    type: str,
    learning_rate: float | Callable[[Any], Any],
    *,
    weight_decay: float = 0.0,
    decay_mask: Any = None,
    b1: float = 0.9,
    b2: float | None = None,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Return an optax optimizer.

    Args:
        type: adamw, adafactor (relative updates off, as for finetuning T5), lion or sgd.
        learning_rate: a number, or a function of the optimizer step.
        weight_decay: decoupled, times the learning rate; of sgd, added to the gradient.
        decay_mask: a tree of bools, True where the decay applies; see `weight_decay_mask`.
        b1: momentum, of all but adafactor.
        b2: second decay; 0.999 for adamw, 0.99 for lion.
        eps: of adamw.

    Raises:
        ValueError: an unknown type.
    """
    if type == "adamw":
        b2 = 0.999 if b2 is None else b2
        return optax.adamw(
            learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask
        )
    if type == "lion":
        b2 = 0.99 if b2 is None else b2
        return optax.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask)
    if type == "adafactor":
        # optax.adafactor adds the decay after the learning rate, so that no schedule reaches it.
        return optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(weight_decay, decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    if type == "sgd":
        return optax.chain(
            optax.add_decayed_weights(weight_decay, decay_mask),
            optax.sgd(learning_rate, momentum=b1 or None),
        )
    raise ValueError(f"optimizer {type!r} is unknown; allowed: {', '.join(OPTIMIZER_TYPES)}.")
