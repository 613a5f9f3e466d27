"""The face of every encoder-decoder family over `encoder_decoder_model.py`, besides `Config`.

A family's file declares its config and hands these on. Imports nothing heavy until a function is
called.
Dims in this file: B batch, S source, T target, N beams, D model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "IGNORED_TENSORS",
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

if TYPE_CHECKING:
    import jax

    from redco_flow.models.encoder_decoder_model import Params
    from redco_flow.models.family_config import FamilyConfig
    from redco_flow.models.key_value_cache import SourceCache
    from redco_flow.models.tensor_files import TensorFiles

# The tied head, published beside the embedding.
IGNORED_TENSORS = ("lm_head.weight",)


def init_params(config: FamilyConfig, key: jax.Array) -> Params:
    """Draw float32 parameters; deviations are the family's."""
    from redco_flow.models import encoder_decoder_model

    params: Params = encoder_decoder_model.init_params(config.core, key)
    return params


def abstract_params(config: FamilyConfig) -> Params:
    """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, allocating nothing."""
    from redco_flow.models import encoder_decoder_model

    return encoder_decoder_model.abstract_params(config.core)


def apply(
    config: FamilyConfig,
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

    Raises:
        ValueError: sequences longer than the model's positions reach.
    """
    from redco_flow.models import encoder_decoder_model

    inputs = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, rngs)
    return encoder_decoder_model.apply(config.core, params, *inputs)


def encode(
    config: FamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return the encoder's output (B, S, D) in `config.dtype`."""
    from redco_flow.models import encoder_decoder_model

    return encoder_decoder_model.encode(config.core, params, input_ids, attention_mask, rngs)


def decoding_params(config: FamilyConfig, params: Params) -> Params:
    """Return parameters from which `init_cache` and `decode_step` give the same, faster.

    They are laid out once for all steps, as the platform at hand reads them best.
    """
    from redco_flow.models.layers_apart import with_faster_layers

    del config  # the face's interface
    return with_faster_layers(params, "decoder")


def init_cache(
    config: FamilyConfig,
    params: Params,
    encoded: jax.Array,
    attention_mask: jax.Array,
    *,
    num_beams: int,
    max_length: int,
) -> SourceCache:
    """Return the cache before the first token; cross-attention's keys and values are made here.

    Args:
        encoded: (B, S, D), `encode`'s result.
        max_length: how many tokens will be decoded at most.

    Raises:
        ValueError: more tokens than the model's positions reach.
    """
    from redco_flow.models import encoder_decoder_model

    inputs = (encoded, attention_mask, num_beams, max_length)
    cache: SourceCache = encoder_decoder_model.run_with_layers(
        config.core, params, *inputs, method="start"
    )
    return cache


def decode_step(
    config: FamilyConfig, params: Params, cache: SourceCache, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, SourceCache]:
    """Return float32 logits (B, N, V) of the token after `tokens` (B, N), and the new cache.

    Args:
        position: of `tokens`, from 0, where they are `decoder_start_token_id`.
    """
    from redco_flow.models import encoder_decoder_model

    result: tuple[jax.Array, SourceCache] = encoder_decoder_model.run_with_layers(
        config.core, params, cache, tokens, position, method="step"
    )
    return result


def tensor_layouts(config: FamilyConfig) -> dict[str, Any]:
    """Return a tree like the parameters that says what each is made of."""
    return config.tensor_layouts()


def config_of_tensors(config: FamilyConfig, files: TensorFiles) -> FamilyConfig:
    """Return `config`: nothing in it is known better from the tensors."""
    del files  # the face's interface
    return config
