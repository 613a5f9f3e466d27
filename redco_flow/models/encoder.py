"""The face of every encoder family: what its module offers besides `Config`.

A family's file declares its config and hands these on. Imports nothing heavy until a function is
called.
Dims in this file: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "abstract_params",
    "apply",
    "config_of_tensors",
    "encode",
    "init_params",
    "pool",
    "tensor_layouts",
]

if TYPE_CHECKING:
    import jax

    from redco_flow.models.bert_family import BertFamilyConfig
    from redco_flow.models.encoder_model import Params
    from redco_flow.models.tensor_files import TensorFiles


def init_params(config: BertFamilyConfig, key: jax.Array) -> Params:
    """Draw float32 parameters; deviations are the family's."""
    from redco_flow.models import encoder_model

    params: Params = encoder_model.init_params(config.core, key)
    return params


def abstract_params(config: BertFamilyConfig) -> Params:
    """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, allocating nothing."""
    from redco_flow.models import encoder_model

    return encoder_model.abstract_params(config.core)


def apply(
    config: BertFamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    token_type_ids: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return float32 logits (B, T, V) of what stands at every place.

    Args:
        input_ids: (B, T); some of them the tokenizer's mask token.
        attention_mask: (B, T); 0 is padding, on either side. None: there is none.
        token_type_ids: (B, T); which of two texts a token belongs to. None: all to the first.
        rngs: (B,) keys, one per example, for dropout; None: no dropout.

    Raises:
        ValueError: the model has no head (`config.has_head`).
    """
    from redco_flow.models import encoder_model

    inputs = (input_ids, attention_mask, token_type_ids, rngs)
    return encoder_model.run(config.core, params, *inputs, method="__call__")


def encode(
    config: BertFamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    token_type_ids: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return the last layer's hidden states (B, T, D) in `config.dtype`; see `apply`.

    `pooling.mean_pool` makes one vector per text of them.
    """
    from redco_flow.models import encoder_model

    inputs = (input_ids, attention_mask, token_type_ids, rngs)
    return encoder_model.run(config.core, params, *inputs, method="encode")


def pool(
    config: BertFamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    token_type_ids: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return what the pooler makes of each text's first place (B, D), in `config.dtype`.

    Transformers calls it `pooler_output`; see `apply`.

    Raises:
        ValueError: the model has no pooler (`config.has_pooler`).
    """
    from redco_flow.models import encoder_model

    inputs = (input_ids, attention_mask, token_type_ids, rngs)
    return encoder_model.run(config.core, params, *inputs, method="pool")


def tensor_layouts(config: BertFamilyConfig) -> dict[str, Any]:
    """Return a tree like the parameters that says what each is made of."""
    return config.tensor_layouts()


def config_of_tensors(config: BertFamilyConfig, files: TensorFiles) -> BertFamilyConfig:
    """Return `config` with the head and the pooler whose tensors the checkpoint has.

    Models for embeddings are published without a head, those for masked tokens often without
    a pooler.
    """
    whole = config.updated({"has_head": True, "has_pooler": True}).tensor_layouts()

    def has(part: str) -> bool:
        kernel = whole[part]["kernel"]
        return not files.names.isdisjoint({kernel.name, *kernel.aliases})

    return config.updated(
        {"has_head": config.has_head and has("head"), "has_pooler": has("pooler")}
    )
