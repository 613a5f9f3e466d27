"""Shapes and constants of a layer's parts: norms, attention, feed-forward, experts.

Imports nothing heavy, so that a login node can check a pipeline's `model` section.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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

REMAT_POLICIES = ("none", "full", "dots", "minimal", "auto")
ACTIVATION_CHOICES = ("keep", "recompute", "offload", "split")
# What every model shard has in full.
REPLICATED_ACTIVATIONS = ("layer_input", "attention_out", "mlp_input", "mlp_out")


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


@dataclass(frozen=True)
class Activations:
    """The treatment of a layer's intermediate results until its backward pass, by name.

    Each is `keep`, `recompute`, `offload` (to the host's pinned memory; on CPUs it is kept) or
    `split`: kept in parts of the sequence by the model shards, which gather them in the backward
    pass. None: as `remat` says. What else a layer computes is computed again.

    Attributes:
        layer_input: what the layer reads; never computed again.
        qkv: the products that give queries, keys and values, those of cross-attention too.
        attention: what attention's heads gather, and a ring's softmax statistics.
        attention_out: the product after it.
        mlp_input: what the feed-forward's norm reads; with `is_parallel` it is the layer's.
        mlp_in: the product that gives gate and up, a router's and its experts' too.
        mlp_out: the product after the activation.
        offload_share: of each device's tokens, whose part of what is offloaded goes to the host;
            the rest is kept on the device.
    """

    layer_input: str | None = None
    qkv: str | None = None
    attention: str | None = None
    attention_out: str | None = None
    mlp_input: str | None = None
    mlp_in: str | None = None
    mlp_out: str | None = None
    offload_share: float = 1.0

    @classmethod
    def from_json(cls, value: Any) -> Activations:
        """Read what a config says of them.

        Raises:
            ValueError: no mapping, a name that no result has, or something else to do with it.
        """
        if isinstance(value, cls):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        names = f"known names: {', '.join(known)}."
        if not isinstance(value, Mapping):
            raise ValueError(f"activations is {value!r}; it must be a mapping by name; {names}")
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"activations has no name {name!r}; {hint}{names}")
        return cls(**value)

    def __post_init__(self) -> None:
        for name, choice in self.choices.items():
            if choice not in ACTIVATION_CHOICES:
                allowed = ", ".join(ACTIVATION_CHOICES)
                raise ValueError(f"activations has {name} {choice!r}; it must be one of {allowed}.")
            if choice == "split" and name not in REPLICATED_ACTIVATIONS:
                allowed = ", ".join(REPLICATED_ACTIVATIONS)
                raise ValueError(
                    f"activations has {name} 'split'; model shards have their own parts of it "
                    f"anyway. What can be split: {allowed}."
                )
        if self.layer_input == "recompute":
            raise ValueError(
                "activations has layer_input 'recompute'; all else is computed again from it: "
                "keep or offload it."
            )
        self._check_share()

    def _check_share(self) -> None:
        share = self.offload_share
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ValueError(
                f"activations has offload_share {share!r}; it must be above 0 and at most 1."
            )
        if share < 1 and "offload" not in self.choices.values():
            raise ValueError(
                f"activations has offload_share {share}, and nothing is offloaded: leave it out, "
                "or say what is, as in {layer_input: offload, offload_share: 0.5}."
            )

    def share_offloaded(self, name: str) -> float:
        """Return the share of a result that is offloaded, where it is; else 1."""
        return self.offload_share if self.choices.get(name) == "offload" else 1.0

    @property
    def choices(self) -> dict[str, str]:
        """Those that are said, by name."""
        said = vars(self).items()
        return {name: kind for name, kind in said if kind is not None and name != "offload_share"}
