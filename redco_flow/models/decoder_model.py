"""What every decoder-only family computes, as functions of a config and a plain dict of parameters.

The parameters and what they compute are `decoder_module.py`'s; here stand rows with padding and
several texts, prompts and caches.
Dims in this file: L layers, B batch, T sequence or new tokens, S prompt, V vocabulary, E experts,
N beams.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.models.decoder_config import DecoderConfig
from redco_flow.models.decoder_module import Cache, Decoder, Params, Prompt
from redco_flow.models.dropout import example_keys
from redco_flow.models.key_value_cache import no_writers
from redco_flow.models.layers_apart import without_layers
from redco_flow.models.visibility import default_positions, row_biases

__all__ = [
    "Cache",
    "Params",
    "abstract_params",
    "apply_with_router",
    "decode_step",
    "init_params",
    "prefill",
]


def _run(config: DecoderConfig, params: Params, *inputs: Any, method: str = "__call__") -> Any:
    return Decoder(config).apply({"params": params}, *inputs, method=method)


@partial(jax.jit, static_argnums=0)
def init_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Draw float32 parameters."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params: Params = Decoder(config).init(key, tokens, tokens, (), None)["params"]
    return params


def abstract_params(config: DecoderConfig) -> Params:
    """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, allocating nothing."""
    shapes: Params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return shapes


def apply_with_router(
    config: DecoderConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return logits (B, T, V) and router logits (L, B, T, E), None without experts; float32."""
    keys = example_keys(rngs, input_ids.shape[0])
    if position_ids is None:
        position_ids = default_positions(input_ids.shape, attention_mask, segment_ids)
    biases = row_biases(attention_mask, segment_ids)
    result: tuple[jax.Array, jax.Array | None] = _run(
        config, params, input_ids, position_ids, biases, keys
    )
    return result


def prefill(
    config: DecoderConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    *,
    num_beams: int,
    max_length: int,
) -> Cache:
    """Read prompts (B, S), padded on either side; see `decoder.prefill`."""
    is_token = attention_mask != 0
    positions = default_positions(input_ids.shape, attention_mask, None)
    places = jnp.arange(input_ids.shape[1])
    last = jnp.max(jnp.where(is_token, places, 0), axis=1)[:, None]
    biases = row_biases(attention_mask, None)
    inputs = (input_ids, positions, biases, num_beams * max_length)
    prompt = Prompt(
        is_visible=is_token & (places != last),
        positions=positions,
        last_token=jnp.take_along_axis(input_ids, last, axis=1)[:, 0].astype(jnp.int32),
        last_position=jnp.take_along_axis(positions, last, axis=1)[:, 0],
    )
    heads = _run_with_layers(config, params, *inputs, method="prefill")
    return Cache(prompt, no_writers(len(input_ids), num_beams, max_length), heads)


def decode_step(
    config: DecoderConfig, params: Params, cache: Cache, tokens: jax.Array, step: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return logits (B, N, V) of the token after `tokens` (B, N), and the new cache."""
    result: tuple[jax.Array, Cache] = _run_with_layers(
        config, params, cache, tokens, step, method="step"
    )
    return result


def _run_with_layers(config: DecoderConfig, params: Params, *inputs: Any, method: str) -> Any:
    """Call a method that is given the layers' parameters, stacked or apart."""
    rest, layers = without_layers(params)
    return _run(config, rest, layers, *inputs, method=method)
