"""The one encoder with a head for masked tokens: hidden states, or logits of every token.

Driven by an `EncoderConfig`; layers are scanned; parameters are a plain nested dict of float32
arrays, products are in the stack's dtype. Knows no devices.

Parameters (L layers, D model, H heads, K head dim, F feed-forward, V vocabulary, Y token types,
P positions; norms have `scale` and `bias`):
  embedding (V, D) · token_types (Y, D) · encoder/positions (P, D) · encoder/embedding_norm
  encoder/layers/{attention_norm, attention/{qkv (L, D, 3, H, K), out (L, H, K, D)},
    mlp_norm, mlp/{wi (L, D, 1, F), wo (L, F, D)}}, biases beside their kernels
  head/{kernel (D, D), bias (D), norm, vocabulary_bias (V)} · pooler/{kernel (D, D), bias (D)}
Further dims in this file: B batch, T sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Biases, row_biases
from redco_flow.models.blocks import Norm, activate, normal, zeros
from redco_flow.models.config import EncoderConfig, StackConfig
from redco_flow.models.families.family_config import FamilyConfig
from redco_flow.models.family import ModelFamily, Params
from redco_flow.models.projections import product, wide_product
from redco_flow.models.random import example_keys
from redco_flow.models.stack import Stack


class MaskedHead(nn.Module):
    """What turns a hidden state into the vocabulary's scores, but for the embedding itself."""

    config: EncoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config.stack
        self.kernel = self.param("kernel", normal(c.init_stddev), (c.width, c.width))
        self.bias = self.param("bias", zeros, (c.width,))
        self.norm = Norm(c.norm, c.width)
        self.vocabulary_bias = self.param("vocabulary_bias", zeros, (self.config.vocab_size,))

    def __call__(self, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        """Map (B, T, D) to (B, T, V), float32."""
        assert self.config.head_activation is not None
        dtype = hidden.dtype
        inner = product(hidden, self.kernel.astype(dtype)) + self.bias.astype(dtype)
        hidden = self.norm(activate(inner[..., None, :], self.config.head_activation))
        return wide_product(hidden, embedding.astype(dtype).T) + self.vocabulary_bias


class Pooler(nn.Module):
    """What turns the first token's hidden state into the vector of all."""

    config: StackConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        self.kernel = self.param("kernel", normal(c.init_stddev), (c.width, c.width))
        self.bias = self.param("bias", zeros, (c.width,))

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Map (B, T, D) to (B, D)."""
        dtype = hidden.dtype
        inner = product(hidden[:, 0], self.kernel.astype(dtype)) + self.bias.astype(dtype)
        return jnp.tanh(inner)


class Encoder(nn.Module):
    """The whole model; the functions of `EncoderFamily` call it."""

    config: EncoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        c, width = self.config, self.config.stack.width
        init = normal(c.stack.init_stddev)
        self.embedding = self.param("embedding", init, (c.vocab_size, width))
        self.token_types = self.param("token_types", init, (c.num_token_types, width))
        self.encoder = Stack(c.stack)
        if c.head_activation is not None:
            self.head = MaskedHead(c)
        if c.has_pooler:
            self.pooler = Pooler(c.stack)

    def encode(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array,
        biases: Biases,
        keys: jax.Array | None,
    ) -> jax.Array:
        """Return (B, T, D); ids outside a table read its nearest end."""
        embedded = self.embedding.at[input_ids].get(mode="clip")
        embedded = embedded + self.token_types.at[token_type_ids].get(mode="clip")
        positions = _positions(self.config, input_ids)
        encoded: jax.Array = self.encoder(
            embedded.astype(self.config.stack.dtype), positions, biases, keys
        )
        return encoded

    def __call__(self, *inputs: Any) -> jax.Array:
        """Return logits (B, T, V), float32."""
        encoded = self.encode(*inputs)
        if self.config.head_activation is None:
            raise ValueError(
                "this model was published without a head for masked tokens: it encodes only."
            )
        logits: jax.Array = self.head(encoded, self.embedding)
        return logits

    def pool(self, *inputs: Any) -> jax.Array:
        """Return the texts' vectors (B, D)."""
        encoded = self.encode(*inputs)
        if not self.config.has_pooler:
            raise ValueError(
                "this model was published without a pooler: take the mean of what it encodes "
                "over the tokens that are not padding."
            )
        pooled: jax.Array = self.pooler(encoded)
        return pooled

    def declare(self) -> None:
        """Use every parameter that there is."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        encoded = self.encode(tokens, tokens, (), None)
        if self.config.head_activation is not None:
            self.head(encoded, self.embedding)
        if self.config.has_pooler:
            self.pooler(encoded)


def _positions(config: EncoderConfig, input_ids: jax.Array) -> jax.Array:
    """Return each token's position, (T) or (B, T); padding is before the first."""
    if config.padding_token is None:
        return jnp.arange(input_ids.shape[1])
    is_token = (input_ids != config.padding_token).astype(jnp.int32)
    return jnp.cumsum(is_token, axis=1) * is_token - 1


@dataclass(frozen=True)
class EncoderFamily(ModelFamily[FamilyConfig]):
    """A family of encoders of texts."""

    module = Encoder

    def apply(
        self,
        config: FamilyConfig,
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
        inputs = (input_ids, attention_mask, token_type_ids, rngs)
        return _run(config, params, *inputs, method="__call__")

    def encode(
        self,
        config: FamilyConfig,
        params: Params,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        rngs: jax.Array | None = None,
    ) -> jax.Array:
        """Return the last layer's hidden states (B, T, D) in `config.dtype`; see `apply`.

        Their mean over the tokens that are not padding is one vector per text.
        """
        inputs = (input_ids, attention_mask, token_type_ids, rngs)
        return _run(config, params, *inputs, method="encode")

    def pool(
        self,
        config: FamilyConfig,
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
        inputs = (input_ids, attention_mask, token_type_ids, rngs)
        return _run(config, params, *inputs, method="pool")


def _run(
    config: FamilyConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array | None,
    token_type_ids: jax.Array | None,
    rngs: jax.Array | None,
    *,
    method: str,
) -> jax.Array:
    if token_type_ids is None:
        token_type_ids = jnp.zeros_like(input_ids)
    keys = example_keys(rngs, input_ids.shape[0])
    biases = row_biases(attention_mask, None)
    inputs = (input_ids, token_type_ids, biases, keys)
    result: Any = Encoder(config.core).apply({"params": params}, *inputs, method=method)
    found: jax.Array = result
    return found
