"""What every family's config does alike: read, check, change and write itself.

A family declares its fields under the names that Hugging Face's `config.json` has; their
annotations say what values they take. Imports nothing heavy, so that a login node can check a
pipeline's model section.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
DTYPES = ("float32", "bfloat16")
REMAT_POLICIES = ("none", "full", "dots")
ROPE_TYPES = ("linear", "llama3")
# Other names of transformers for the same functions.
_SAME_ACTIVATION = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_python": "gelu",
}

NormKind = Literal["layer", "rms", "rms_offset"]


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
class AttentionConfig:
    """Attention of grouped queries; as many key-value heads as heads is the plain kind.

    Attributes:
        scale: what scores are multiplied by.
        cap: scores are squeezed into (-cap, cap) by tanh.
        is_cross: keys and values are those of another sequence, so their kernel is apart.
        norm_epsilon: of root-mean-square norms on each head's queries and keys; None: no norms.
        dropout: of the attention weights.
        query_init: factor of the initial stddev of queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    is_causal: bool = True
    is_cross: bool = False
    has_input_bias: bool = False
    has_output_bias: bool = False
    norm_epsilon: float | None = None
    cap: float | None = None
    dropout: float = 0.0
    query_init: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"there are {self.num_kv_heads} key-value heads; they must divide the "
                f"{self.num_heads} heads."
            )

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
class MixtureConfig:
    """Gated feed-forward experts, of which a router picks some for each token."""

    num_experts: int
    experts_per_token: int
    mlp_dim: int
    activation: str


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length of pretraining.

    The names are those of Hugging Face's `rope_scaling`. `linear`: all by `factor`. `llama3`:
    long wavelengths by `factor`, short ones not, those between gradually.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_json(cls, value: Any) -> RopeScaling:
        """Read what a config says of it.

        Raises:
            ValueError: no mapping, or one with other keys or values.
        """
        if isinstance(value, cls):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(value, Mapping) or not {"rope_type", "factor"} <= {*value} <= {*known}:
            raise ValueError(
                f"rope_scaling is {value!r}; it must be none or a mapping with rope_type and "
                f"factor. Known keys: {', '.join(known)}."
            )
        return cls(**value)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            number = getattr(self, field.name)
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise ValueError(
                    f"rope_scaling has {field.name} {number!r}; it must be a number above 0."
                )
        if self.rope_type not in ROPE_TYPES:
            allowed = ", ".join(ROPE_TYPES)
            raise ValueError(
                f"rope_scaling has rope_type {self.rope_type!r}; it must be one of {allowed}, "
                "or rope_scaling none for unscaled positions."
            )


@dataclass(frozen=True)
class RelativeConfig:
    """A learned bias of the scores for each head and bucket of distances, shared by all layers."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions on the first `num_dims` of each head.

    `is_interleaved`: rotated pairs are neighbours (GPT-J); otherwise halves apart.
    """

    num_dims: int
    theta: float = 10_000.0
    is_interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Shape and constants of the layers and of the positions they are told.

    Attributes:
        cross_attention: of each layer over another, encoded sequence; None: there is none.
        norm_placement: `pre` before each sublayer, `post` on the sum after it, `both` before it
            and on its result.
        is_parallel: attention and feed-forward read the same normed input; their results are
            added together.
        num_positions: rows of a learned table of positions; 0: there is none.
        position_offset: the row of position 0.
        relative: biases of the scores by distance; None: there are none.
        has_embedding_norm: whether what the first layer reads is normalised.
        has_final_norm: whether what the last layer gives is.
        windows: how many tokens back, itself included, each layer looks; None: all. One entry
            per layer, or none at all.
        embedding_dropout: of what the first layer reads.
        residual_dropout: of what each sublayer adds.
        final_dropout: of what the final norm gives.
        init_stddev: of kernels and tables; with `init_by_fan_in` that times the square root of
            the reciprocal of how many numbers a kernel adds up.
        residual_init: factor of the initial stddev of what each sublayer ends with.
        remat: what the backward pass computes again: `none`, `full` (each layer), `dots` (all
            but products with parameters).
    """

    width: int
    num_layers: int
    attention: AttentionConfig
    mlp: MlpConfig | MixtureConfig
    norm: NormConfig
    cross_attention: AttentionConfig | None = None
    norm_placement: Literal["pre", "post", "both"] = "pre"
    is_parallel: bool = False
    num_positions: int = 0
    position_offset: int = 0
    relative: RelativeConfig | None = None
    has_embedding_norm: bool = False
    has_final_norm: bool = False
    rotary: RotaryConfig | None = None
    windows: tuple[int | None, ...] = ()
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    final_dropout: float = 0.0
    init_stddev: float = 0.02
    init_by_fan_in: bool = False
    residual_init: float = 1.0
    dtype: str = "float32"
    remat: str = "none"

    @property
    def max_length(self) -> float:
        """The longest sequence that the positions reach; infinity where they are not learned."""
        return self.num_positions - self.position_offset if self.num_positions else math.inf

    def stddev(self, fan_in: int) -> float:
        """Return the initial stddev of a kernel that adds up `fan_in` numbers."""
        return self.init_stddev * (fan_in**-0.5 if self.init_by_fan_in else 1.0)

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        inner = self.mlp.dropout if isinstance(self.mlp, MlpConfig) else 0.0
        outer = (self.embedding_dropout, self.residual_dropout, self.final_dropout)
        return any((*outer, self.attention.dropout, inner))

    @property
    def common_window(self) -> int | None:
        """The window of all layers, where they have the same one."""
        return self.windows[0] if self.has_common_window and self.windows else None

    @property
    def has_common_window(self) -> bool:
        """Whether no layer's window differs from another's."""
        return len(set(self.windows)) <= 1


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(StackConfig):
    """Shape and constants of a decoder-only transformer: its layers, and what is around them.

    Attributes:
        embedding_width: the table's, where it is not the model's; projected in and out.
        embedding_scale: what embeddings are multiplied by.
        logit_cap: logits are squeezed into (-cap, cap) by tanh.
    """

    vocab_size: int
    has_final_norm: bool = True
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = True
    has_head_bias: bool = False
    logit_cap: float | None = None

    @property
    def token_width(self) -> int:
        """Width of the embedding table."""
        return self.embedding_width or self.width


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Shape and constants of an encoder-decoder.

    Attributes:
        embedding_stddev: of the embedding, when it is drawn.
        embedding_scale: what embeddings are multiplied by.
        tie_word_embeddings: whether the head is the embedding.
        head_scale: what the head's input is multiplied by.
        has_logits_bias: whether a constant of the checkpoint is added to the logits.
    """

    vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    embedding_stddev: float
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = True
    head_scale: float = 1.0
    has_logits_bias: bool = False
