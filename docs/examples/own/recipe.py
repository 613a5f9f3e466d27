"""text_to_text in which every example counts the same, however many tokens it has."""

import dataclasses

from redco_flow.recipes import text_to_text
from redco_flow.recipes.text_to_text import DEFAULT_FAMILY, FAMILIES, encode

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "build", "encode"]


def build(model, tokenizer, *, source_length, target_length):
    """Take the bundled recipe and change its loss."""
    recipe = text_to_text.build(
        model, tokenizer, source_length=source_length, target_length=target_length
    )
    return dataclasses.replace(recipe, loss_fn=_per_example(recipe.loss_fn))


def _per_example(loss_fn):
    def mean_loss(params, batch, rngs, is_training):
        totals, weights = loss_fn(params, batch, rngs, is_training)[:2]
        counts = weights > 0  # rows that only fill a batch up weigh nothing
        return totals / weights.clip(min=1), counts.astype(totals.dtype)

    return mean_loss
