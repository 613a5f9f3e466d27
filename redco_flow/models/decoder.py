"""The face of every decoder-only family: what its module offers besides `Config`.

A family's file declares its config and hands these on. Imports nothing heavy until a function
is called, so that a family's config can be checked where there is no JAX to wait for. Refuses
to know how anything is computed: that is `decoder_model.py`.
Dims in this file: B batch, T sequence, S prompt, V vocabulary, L layers, E experts, N beams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "IGNORED_TENSORS",
    "abstract_params",
    "apply",
    "apply_with_router",
    "config_of_tensors",
    "decode_step",
    "decoding_params",
    "init_params",
    "prefill",
    "tensor_layouts",
]

if TYPE_CHECKING:
    import jax

    from redco_flow.models.decoder_model import Cache, Params
    from redco_flow.models.family_config import FamilyConfig
    from redco_flow.models.tensor_files import TensorFiles

_HEAD = "lm_head.weight"
# A tied head published beside the embedding; angles and masks that are computed, not learned.
IGNORED_TENSORS = (
    _HEAD,
    "*.rotary_emb.inv_freq",
    "*h.*.attn.bias",
    "*h.*.attn.masked_bias",
)


def init_params(config: FamilyConfig, key: jax.Array) -> Params:
    """Draw float32 parameters; deviations are the family's."""
    from redco_flow.models import decoder_model

    params: Params = decoder_model.init_params(config.core, key)
    return params


def abstract_params(config: FamilyConfig) -> Params:
    """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, allocating nothing."""
    from redco_flow.models import decoder_model

    return decoder_model.abstract_params(config.core)


def apply(
    config: FamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return float32 logits (B, T, V) of every next token.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T); 0 is padding, on either side. None: there is none.
        position_ids: (B, T); None: counted from 0 over what is not padding, anew in every
            document.
        segment_ids: (B, T); which of the documents packed into a row each token belongs to, in
            runs. No token attends to another document. None: a row is one document.
        rngs: (B,) keys, one per example, for dropout; None: no dropout.
    """
    logits, _ = apply_with_router(
        config, params, input_ids, attention_mask, position_ids, segment_ids, rngs
    )
    return logits


def apply_with_router(
    config: FamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return what `apply` does, and every layer's router logits (L, B, T, E), float32.

    The second is None for a model without experts; `load_balancing.py` reads it.
    """
    from redco_flow.models import decoder_model

    return decoder_model.apply_with_router(
        config.core, params, input_ids, attention_mask, position_ids, segment_ids, rngs
    )


def tensor_layouts(config: FamilyConfig) -> dict[str, Any]:
    """Return a tree like the parameters that says what each is made of."""
    return config.tensor_layouts()


def config_of_tensors(config: FamilyConfig, files: TensorFiles) -> FamilyConfig:
    """Return `config`, untied where the checkpoint has a head that is not the embedding.

    transformers goes by the tensors when it reads, whatever `config.json` says; so must we.
    """
    from redco_flow.models.tensor_files import equal_tensors

    layout = config.tensor_layouts()["embedding"]
    embedding = next((name for name in layout.names(()) if name in files.names), None)
    if not config.tie_word_embeddings or embedding is None or _HEAD not in files.names:
        return config
    if equal_tensors(files, _HEAD, embedding):
        return config
    return config.updated({"tie_word_embeddings": False})


def decoding_params(config: FamilyConfig, params: Params) -> Params:
    """Return parameters from which `prefill` and `decode_step` give the same, faster.

    They are laid out once for all steps, as the platform at hand reads them best.
    """
    from redco_flow.models.layers_apart import with_faster_layers

    del config  # the face's interface
    return with_faster_layers(params)


def prefill(
    config: FamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    *,
    num_beams: int,
    max_length: int,
) -> Cache:
    """Read prompts; return the cache before the first step, with room for what follows.

    Args:
        input_ids, attention_mask: (B, S); mask 0 is padding, on either side. Every row has a
            token; its last one, the cache's `source.last_token`, is where decoding begins.
        max_length: how many tokens will be decoded at most.
    """
    from redco_flow.models import decoder_model

    sizes = {"num_beams": num_beams, "max_length": max_length}
    return decoder_model.prefill(config.core, params, input_ids, attention_mask, **sizes)


def decode_step(
    config: FamilyConfig, params: Params, cache: Cache, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return float32 logits (B, N, V) of the token after `tokens` (B, N), and the new cache.

    Args:
        position: number of the step, from 0, where `tokens` are the prompts' last ones.
    """
    from redco_flow.models import decoder_model

    return decoder_model.decode_step(config.core, params, cache, tokens, position)
