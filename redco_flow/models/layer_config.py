"""Shapes and constants of a layer's parts: norms, attention, feed-forward, experts.

Imports nothing heavy, so that a login node can check a pipeline's `model` section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
# Other names of transformers for the same functions.
_SAME_ACTIVATION = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_python": "gelu",
}
NormKind = Literal["layer", "rms", "rms_offset"]
NormPlacement = Literal["pre", "result", "both", "post"]


def activation_name(name: str) -> str:
    """Return which of ACTIVATIONS transformers means by `name`.

    Raises:
        ValueError: none of them.
    """
    known = _SAME_ACTIVATION.get(name, name)
    if known not in ACTIVATIONS:
        allowed = ", ".join((*ACTIVATIONS, *_SAME_ACTIVATION))
        raise ValueError(f"activation {name!r} is not known; it must be one of {allowed}.")
    return known


@dataclass(frozen=True)
class NormConfig:
    """A norm over the last dim.

    `layer`: mean and variance, scale and bias. `rms`: root mean square, scale.
    `rms_offset`: the same, but the stored scale is what is added to 1. Scales begin at
    `initial_scale`, those of `rms_offset` at 0.
    """

    kind: NormKind
    epsilon: float
    initial_scale: float = 1.0


@dataclass(frozen=True)
class LatentConfig:
    """Queries, keys and values made of few numbers of each token (multi-head latent attention).

    Attributes:
        query_rank: how many numbers queries are made of; None: of the token itself.
        rank: how many keys and values are made of.
        rotary_dims: last dims of each head, whose keys are the same in all heads.
        value_dim: of each head.
        norm: of those numbers.
    """

    query_rank: int | None
    rank: int
    rotary_dims: int
    value_dim: int
    norm: NormConfig


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of grouped queries; as many key-value heads as heads is the plain kind.

    Attributes:
        scale: what scores are multiplied by.
        has_sinks: whether each head has a learned score that no token has, to which weight goes
            that is lost to all tokens.
        cap: scores are squeezed into (-cap, cap) by tanh.
        is_cross: keys and values are those of another sequence, so their kernel is apart.
        norm: of queries and keys; None: there is none.
        is_norm_joint: whether all heads of a token are normalised together, not each by itself.
        dropout: of the attention weights.
        query_init: factor of the initial stddev of queries.
        latent: how queries, keys and values are made of few numbers; None: of the token itself.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    is_causal: bool = True
    is_cross: bool = False
    has_input_bias: bool = False
    has_output_bias: bool = False
    norm: NormConfig | None = None
    is_norm_joint: bool = False
    has_sinks: bool = False
    cap: float | None = None
    dropout: float = 0.0
    query_init: float = 1.0
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"there are {self.num_kv_heads} key-value heads; they must divide the "
                f"{self.num_heads} heads."
            )

    @property
    def value_dim(self) -> int:
        """Numbers that each head gathers."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def is_fused(self) -> bool:
        """Whether queries, keys and values are one kernel."""
        return self.num_heads == self.num_kv_heads and not self.is_cross


@dataclass(frozen=True)
class MlpConfig:
    """The position-wise layer; gated: the activation of one product times another."""

    mlp_dim: int
    activation: str
    is_gated: bool = False
    has_bias: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class ClampedGate:
    """gate · sigmoid(alpha · gate) · (up + 1), of gates up to `limit` and ups within ±`limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class GroupedRouting:
    """Routing as DeepSeek-V3's: by sigmoids, among the experts of a token's best groups.

    A bias that no gradient reaches counts in the choice, and not in the weights.

    Attributes:
        num_groups: that the experts are divided into.
        groups_per_token: the best ones, by the sum of their best two experts.
        scale: what weights are multiplied by.
    """

    num_groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True)
class MixtureConfig:
    """Gated feed-forward experts, of which a router picks some for each token.

    Attributes:
        is_normalised: whether the probabilities of those picked are scaled to a sum of 1.
        has_bias: of the router, and of all products of experts.
        clamp: gates as gpt-oss has them, in place of `activation`.
        routing: None: by the softmax of all experts.
        shared_dim: units of a feed-forward layer that every token goes through besides; 0: none.
    """

    num_experts: int
    experts_per_token: int
    mlp_dim: int
    activation: str
    is_normalised: bool = True
    has_bias: bool = False
    clamp: ClampedGate | None = None
    routing: GroupedRouting | None = None
    shared_dim: int = 0

    @property
    def shared(self) -> MlpConfig | None:
        """The layer that every token goes through besides."""
        if not self.shared_dim:
            return None
        return MlpConfig(self.shared_dim, self.activation, is_gated=True)
