"""The parts that decoder-only models and encoder-decoders share: embedding, head, cached decoding.

Dims in this file: B batch, T sequence, V vocabulary, D model, N beams.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax

from redco_flow.models.attention.cache import with_room_for
from redco_flow.models.attention.grouped import cap
from redco_flow.models.families.family_config import ModelConfig
from redco_flow.models.family import ModelFamily, Params
from redco_flow.models.numerics import scaled
from redco_flow.models.projections import wide_product
from redco_flow.models.transformer.decoding_layers import without_layers

ConfigT = TypeVar("ConfigT", bound=ModelConfig)
CacheT = TypeVar("CacheT")


class LanguageModel(nn.Module):
    """A Flax module with the table `embedding` and a method `before_head`."""

    config: Any

    def look_up(self, ids: jax.Array, dtype: str) -> jax.Array:
        """Look tokens up, (…) to (…, D); ids outside the vocabulary read its nearest end."""
        hidden: jax.Array = self.embedding.at[ids].get(mode="clip").astype(dtype)
        scale = self.config.embedding_scale
        return hidden if scale == 1 else scaled(hidden, scale)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Score the vocabulary: the layers' result (B, T, D) to (B, T, V), float32."""
        hidden, head, _ = self.before_head(hidden)
        return score(self.config.logit_cap, head, hidden)


@dataclass(frozen=True)
class LanguageModelFamily(ModelFamily[ConfigT]):
    """A family whose models score the next token, whole sequences or one token with a cache."""

    def apply(self, config: ConfigT, params: Params, *inputs: Any, **named: Any) -> jax.Array:
        """Return float32 logits (B, T, V) of every next token; see `apply_before_head`."""
        hidden, head, _ = self.apply_before_head(config, params, *inputs, **named)
        return self.score(config, head, hidden)

    @abstractmethod
    def apply_before_head(
        self, config: ConfigT, params: Params, *args: Any, **kwargs: Any
    ) -> Unscored:
        """Return the hidden states and the head, from which `score` computes the logits."""

    def score(self, config: ConfigT, head: Head, hidden: jax.Array) -> jax.Array:
        """Return float32 logits (…, V) of any tokens' hidden states (…, D)."""
        return score(config.core.logit_cap, head, hidden)

    def grow_cache(self, cache: CacheT, num_tokens: int) -> CacheT:
        """Return the cache with room for this number of new tokens."""
        grown: CacheT = with_room_for(cache, num_tokens)
        return grown

    def decode_step(
        self, config: ConfigT, params: Params, cache: CacheT, tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, CacheT]:
        """Return float32 logits (B, N, V) of the token after `tokens` (B, N), and the new cache.

        Args:
            position: number of the step, from 0, where `tokens` are the prompts' last ones or
                `decoder_start_token_id`.
        """
        inputs = (cache, tokens, position)
        result: tuple[jax.Array, CacheT]
        result = self._run_with_layers(config, params, *inputs, method="step")
        return result

    def _run_with_layers(self, config: ConfigT, params: Params, *inputs: Any, method: str) -> Any:
        """Call a method that takes the decoder layers' parameters, stacked or not."""
        rest, layers = self._without_layers(params)
        return self._run(config, rest, layers, *inputs, method=method)

    def _without_layers(self, params: Params) -> tuple[Params, Any]:
        """Return the parameters without the decoder's layers, and the layers."""
        return without_layers(params)


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
