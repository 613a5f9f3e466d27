"""Shapes and constants of transformers: stacks of layers, decoders, encoders, both.

A family's `core` is one of these. Imports nothing heavy, so that a login node can check a
pipeline's `model` section.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.attention.rope import RotaryConfig
from redco_flow.models.layer_config import (
    Activations,
    AttentionConfig,
    MixtureConfig,
    MlpConfig,
    NormConfig,
    NormPlacement,
)

DTYPES = ("float32", "bfloat16")
ATTENTION_KERNELS = ("auto", "xla", "splash", "cudnn", "triton")
# The window of a layer that looks all the way back, where others do not.
ENDLESS_WINDOW = 2**30
_AS_REMAT = Activations()


@dataclass(frozen=True)
class RelativeConfig:
    """A learned bias of the scores for each head and bucket of distances, shared by all layers."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Shape and constants of the layers and of their position encoding.

    Attributes:
        cross_attention: of each layer over another, encoded sequence; None: there is none.
        norm_placement: `pre` before each sublayer, `result` on its result, `both` before it and
            on its result, `post` on the sum after it.
        is_parallel: attention and feed-forward read the same normed input; their results are
            added together.
        num_positions: rows of a learned table of positions; 0: there is none.
        position_offset: the row of position 0.
        relative: biases of the scores by distance; None: there are none.
        has_embedding_norm: whether what the first layer reads is normalised.
        has_final_norm: whether what the last layer gives is.
        rotary: of all layers, or of the first of those that differ.
        rotaries: each layer's rotary positions, where they differ, of as many dims; None: the
            layer has none. One entry per layer, or none at all.
        windows: how many tokens back, itself included, each layer looks; None: all. One entry
            per layer, or none at all.
        embedding_dropout: of what the first layer reads.
        residual_dropout: of what each sublayer adds.
        final_dropout: of what the final norm gives.
        init_stddev: of kernels and tables; with `init_by_fan_in` that times the square root of
            the reciprocal of how many numbers a kernel adds up.
        residual_init: factor of the initial stddev of what each sublayer ends with.
        remat: what the backward pass computes again: `none`, `full` (each layer, but for what
            model shards can keep in parts at no cost), `dots` (all but products with parameters);
            `minimal` is MaxText's name of the same. A training takes the place of `auto` by one of
            these; where there is none, it is `none`.
        activations: what differs from `remat`, by name.
        num_mlp_chunks: parts of a device's tokens that dense feed-forward layers take one after
            another, so that their units are never all in memory; the backward pass computes
            those again.
        attention_kernel: what computes attention, one of ATTENTION_KERNELS; `auto` goes by the
            devices.
    """

    width: int
    num_layers: int
    attention: AttentionConfig
    mlp: MlpConfig | MixtureConfig
    norm: NormConfig
    cross_attention: AttentionConfig | None = None
    norm_placement: NormPlacement = "pre"
    is_parallel: bool = False
    num_positions: int = 0
    position_offset: int = 0
    relative: RelativeConfig | None = None
    has_embedding_norm: bool = False
    has_final_norm: bool = False
    rotary: RotaryConfig | None = None
    rotaries: tuple[RotaryConfig | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    final_dropout: float = 0.0
    init_stddev: float = 0.02
    init_by_fan_in: bool = False
    residual_init: float = 1.0
    dtype: str = "float32"
    remat: str = "none"
    attention_kernel: str = "auto"
    activations: Activations = _AS_REMAT
    num_mlp_chunks: int = 1

    def __post_init__(self) -> None:
        if self.num_mlp_chunks == 1:
            return
        chunks = f"num_mlp_chunks is {self.num_mlp_chunks}"
        if isinstance(self.mlp, MixtureConfig):
            raise ValueError(
                f"{chunks}; a mixture of experts takes all tokens at once: leave it out."
            )
        if (choice := self.activations.mlp_in) in ("keep", "offload"):
            raise ValueError(
                f"{chunks}, and activations has mlp_in {choice!r}, which is never whole then and "
                "is computed again: leave one of them out."
            )

    def choices_on(self, num_model_shards: int) -> dict[str, str]:
        """Return what becomes of a layer's results by their names; others are computed again."""
        if self.remat == "full":
            choices = {"layer_input": "keep"} | self._split_at_no_cost(num_model_shards)
        else:
            products = ("qkv", "attention_out", "mlp_in", "mlp_out")
            choices = dict.fromkeys(("layer_input", *products), "keep")
        choices |= self.activations.choices
        if num_model_shards > 1:
            return choices
        return {name: "keep" if kind == "split" else kind for name, kind in choices.items()}

    def _split_at_no_cost(self, num_model_shards: int) -> dict[str, str]:
        """Return what full rematerialisation keeps in parts, with as few bytes sent as without.

        Gathering a sublayer's result sends half of what reducing it again does, which pays for
        gathering the layer's input. Side by side the sublayers are not reduced again.
        """
        names = ("attention_out",) if self.norm_placement == "pre" else ("attention_out", "mlp_out")
        num_results = len(names) + (self.cross_attention is not None)
        if self.is_parallel or num_model_shards < 1 + num_results:
            return {}
        return dict.fromkeys(("layer_input", *names), "split")

    @property
    def max_length(self) -> float:
        """The longest sequence that the positions reach; infinity where they have no end."""
        if self.num_positions:
            return self.num_positions - self.position_offset
        scalings = [rotary.scaling for rotary in self.rotary_choices if rotary is not None]
        return min((scaling.max_length for scaling in scalings if scaling), default=math.inf)

    @property
    def rotary_choices(self) -> tuple[RotaryConfig | None, ...]:
        """The different rotary positions that layers have, the first layer's first."""
        return tuple(dict.fromkeys(self.rotaries or (self.rotary,)))

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
    def window_choices(self) -> tuple[int, ...]:
        """The numbers that a layer's window may have."""
        return tuple(sorted({window or ENDLESS_WINDOW for window in self.windows}))

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
        num_leading: layers before the `num_layers`, whose feed-forward is `leading_mlp`.
    """

    vocab_size: int
    has_final_norm: bool = True
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = True
    has_head_bias: bool = False
    logit_cap: float | None = None
    num_leading: int = 0
    leading_mlp: MlpConfig | None = None

    @property
    def leading(self) -> DecoderConfig | None:
        """The leading layers' config; None: there are none."""
        if self.leading_mlp is None or not self.num_leading:
            return None
        differing: dict[str, Any] = {"num_layers": self.num_leading, "mlp": self.leading_mlp}
        return dataclasses.replace(self, **differing, num_leading=0, leading_mlp=None)

    @property
    def token_width(self) -> int:
        """Width of the embedding table."""
        return self.embedding_width or self.width


@dataclass(frozen=True)
class EncoderConfig:
    """Shape and constants of an encoder of texts.

    Attributes:
        num_token_types: rows of the table of token types.
        padding_token: positions count the tokens that are not this one, and padding is before the
            first; None: positions are indices, whatever the tokens.
        head_activation: between the head's kernel and its norm; None: no head.
        has_pooler: whether there is a layer that makes a text's vector of its first token.
    """

    vocab_size: int
    num_token_types: int
    stack: StackConfig
    padding_token: int | None = None
    head_activation: str | None = "gelu"
    has_pooler: bool = False

    @property
    def has_scores(self) -> bool:
        """Whether there is a head for masked tokens."""
        return self.head_activation is not None


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Shape and constants of an encoder-decoder.

    Attributes:
        encoder: of texts, or of images; the first shares the embedding with the decoder.
        embedding_stddev: of the embedding, when it is drawn.
        embedding_scale: what embeddings are multiplied by.
        tie_word_embeddings: whether the head is the embedding.
        head_scale: what the head's input is multiplied by.
        has_logits_bias: whether a constant of the checkpoint is added to the logits.
    """

    vocab_size: int
    encoder: StackConfig | ImageEncoderConfig
    decoder: StackConfig
    embedding_stddev: float
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = True
    head_scale: float = 1.0
    has_logits_bias: bool = False
    # Of its head; only decoder-only models have one.
    logit_cap: ClassVar[None] = None


@dataclass(frozen=True)
class ImageEncoderConfig:
    """Shape and constants of an encoder of images, which reads them as a sequence of patches.

    Attributes:
        image_size, patch_size: sides of the square images and patches, in pixels.
        num_classes: that the first token is classified into; 0: there is no classifier.
        has_pooler: whether there is a layer that makes an image's vector of its first token.
    """

    image_size: int
    patch_size: int
    num_channels: int
    stack: StackConfig
    num_classes: int = 0
    has_pooler: bool = False

    @property
    def has_scores(self) -> bool:
        """Whether there is a classifier."""
        return self.num_classes > 0

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def width(self) -> int:
        """Of what it encodes."""
        return self.stack.width
