"""T5 in Flax: encoder, decoder, cached decoding; the public face of the family.

v1.0 (relu, tied and scaled head) and v1.1/Flan (gated gelu, a head of its own). Layers are scanned,
so every layer parameter has a leading layer dim; parameters are a plain nested dict of float32
arrays, products are in `config.dtype`. Knows no devices: shard the parameters and the compiler
spreads the rest.

Parameters (L layers, D model, H heads, K head dim, F feed-forward, G 1 or 2 gates, V vocabulary):
  embedding (V, D) · lm_head (D, V), untied models only
  {encoder,decoder}/relative_bias (buckets, H) · {encoder,decoder}/final_norm (D)
  {encoder,decoder}/layers/self_attention/{norm (L, D), qkv (L, D, 3, H, K), out (L, H, K, D)}
  decoder/layers/cross_attention/{norm (L, D), q (L, D, H, K), kv (L, D, 2, H, K), out}
  {encoder,decoder}/layers/feed_forward/{norm (L, D), wi (L, D, G, F), wo (L, F, D)}
Further dims in this file: B batch, S source, T target or new tokens, N beams.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.models.dropout import example_keys
from redco_flow.models.key_value_cache import SourceCache as Cache
from redco_flow.models.layers_apart import with_faster_layers, without_layers
from redco_flow.models.t5_config import T5Config
from redco_flow.models.t5_model import T5, Params
from redco_flow.models.t5_tensors import IGNORED_TENSORS, config_of_tensors, tensor_layouts

__all__ = [
    "IGNORED_TENSORS",
    "Cache",
    "Config",
    "Params",
    "abstract_params",
    "apply",
    "config_of_tensors",
    "decode_step",
    "decoding_params",
    "encode",
    "init_cache",
    "init_params",
    "tensor_layouts",
]

Config = T5Config


def decoding_params(config: T5Config, params: Params) -> Params:
    """Return parameters from which `init_cache` and `decode_step` give the same, faster.

    The decoder's layers are laid out once for all steps, as the platform at hand reads them best.
    """
    del config  # the face's interface
    return with_faster_layers(params, "decoder")


def _run(config: T5Config, params: Params, *inputs: Any, method: str = "__call__") -> Any:
    """Call one of the module's methods on `params`."""
    return T5(config).apply({"params": params}, *inputs, method=method)


def _run_with_layers(config: T5Config, params: Params, *inputs: Any, method: str) -> Any:
    """Call a method that is given the decoder layers' parameters, stacked or apart."""
    rest, layers = without_layers(params, "decoder")
    return _run(config, rest, layers, *inputs, method=method)


@partial(jax.jit, static_argnums=0)
def init_params(config: T5Config, key: jax.Array) -> Params:
    """Draw float32 parameters; deviations are transformers', but for an untied head's."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params: Params = T5(config).init(key, tokens, tokens, tokens, None, None)["params"]
    return params


def abstract_params(config: T5Config) -> Params:
    """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, allocating nothing."""
    shapes: Params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return shapes


def apply(
    config: T5Config,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    decoder_input_ids: jax.Array,
    decoder_attention_mask: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return float32 logits (B, T, V) of every next target token.

    Args:
        input_ids, attention_mask: (B, S); mask 0 is padding, on either side.
        decoder_input_ids: (B, T), shifted right: begins with `decoder_start_token_id`.
        decoder_attention_mask: (B, T); not needed for padding at the end, which no token sees.
        rngs: (B,) keys, one per example, for dropout; None: no dropout.
    """
    keys = example_keys(rngs, input_ids.shape[0])
    logits: jax.Array = _run(
        config,
        params,
        input_ids,
        attention_mask,
        decoder_input_ids,
        decoder_attention_mask,
        keys,
    )
    return logits


def encode(
    config: T5Config,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return the encoder's output (B, S, D) in `config.dtype`."""
    keys = example_keys(rngs, input_ids.shape[0])
    encoded: jax.Array = _run(config, params, input_ids, attention_mask, keys, method="encode")
    return encoded


def init_cache(
    config: T5Config,
    params: Params,
    encoded: jax.Array,
    attention_mask: jax.Array,
    *,
    num_beams: int,
    max_length: int,
) -> Cache:
    """Return the cache before the first token; cross-attention's keys and values are made here.

    Args:
        encoded: (B, S, D), `encode`'s result.
        max_length: how many tokens will be decoded at most.
    """
    inputs = (encoded, attention_mask, num_beams, max_length)
    cache: Cache = _run_with_layers(config, params, *inputs, method="start")
    return cache


def decode_step(
    config: T5Config, params: Params, cache: Cache, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return float32 logits (B, N, V) of the token after `tokens` (B, N), and the new cache.

    Args:
        position: of `tokens`, from 0, where they are `decoder_start_token_id`.
    """
    inputs = (cache, tokens, position)
    result: tuple[jax.Array, Cache] = _run_with_layers(config, params, *inputs, method="step")
    return result
