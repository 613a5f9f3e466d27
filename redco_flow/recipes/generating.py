"""The prediction function of any model that generates: what `Generation` asks for, per batch.

Dims in this file: B batch, S source or prompt, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax

from redco_flow.models.generation import Sampling, generate
from redco_flow.recipes.recipe import Generation


def make_pred_fn(
    module: ModuleType, config: Any, generation: Generation
) -> Callable[[Any, Mapping[str, jax.Array], jax.Array], jax.Array]:
    """Return (params, batch, rngs (B,)) -> token ids (B, T).

    Raises:
        ValueError: a number of sampling out of its range.
    """
    drawn = generation.sampling
    sampling = None
    if drawn is not None:
        sampling = Sampling(drawn.temperature, drawn.top_k, drawn.top_p)

    def pred_fn(params: Any, batch: Mapping[str, jax.Array], rngs: jax.Array) -> jax.Array:
        return generate(
            module,
            config,
            params,
            batch["input_ids"],
            batch["attention_mask"],
            max_new_tokens=generation.max_length,
            num_beams=generation.num_beams,
            length_penalty=generation.length_penalty,
            sampling=sampling,
            rngs=rngs,
        ).tokens

    return pred_fn
