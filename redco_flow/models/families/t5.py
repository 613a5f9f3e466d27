"""T5: an encoder-decoder whose positions are biases of the scores by distance.

v1.0 (relu, tied and scaled head) and v1.1/Flan (gated gelu, a head of its own): the config under
Hugging Face's names and the tensors of transformers' T5ForConditionalGeneration. What it computes
is in `encoder_decoder_model.py`.
Source: Raffel et al. 2020; Shazeer 2020 for the gates; checked against transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from redco_flow.models.config import EncoderDecoderConfig, RelativeConfig, StackConfig
from redco_flow.models.families.family_config import FamilyConfig
from redco_flow.models.hub.layouts import (
    attention_layouts,
    head_layout,
    mlp_layouts,
    norm_layouts,
    table_layout,
)
from redco_flow.models.layer_config import ACTIVATIONS, AttentionConfig, MlpConfig, NormConfig

if TYPE_CHECKING:
    from redco_flow.models.hub.tensors import TensorFiles
    from redco_flow.models.transformer.encoder_decoder_model import EncoderDecoderFamily


_HEAD = "lm_head.weight"
_EMBEDDING = "shared.weight"
# What transformers means by these names in T5: the tanh approximation only when gated.
_ACTIVATION_BY_NAME = {"gated-gelu": "gelu_new", "swish": "silu", "gated-swish": "silu"}


@dataclass(frozen=True)
class T5Config(FamilyConfig):
    """A T5's shape and constants.

    There are as many decoder layers as encoder layers, and logits are scaled exactly where the
    head is tied, unless they are given.
    """

    model_type: ClassVar[str] = "t5"
    architecture: ClassVar[str] = "T5ForConditionalGeneration"
    fixed: ClassVar[Mapping[str, Any]] = {"is_encoder_decoder": True}
    # The first published T5s have this bias, and no T5 uses it.
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        _HEAD,
    )

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    scale_decoder_outputs: bool | None = None
    pad_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    decoder_start_token_id: int = 0
    tie_word_embeddings: bool = True

    @classmethod
    @final
    def family(cls) -> EncoderDecoderFamily:
        """Return the family's functions; imports JAX."""
        from redco_flow.models.transformer.encoder_decoder_model import EncoderDecoderFamily

        return EncoderDecoderFamily(cls)

    def derived(self) -> dict[str, Any]:
        """Return the decoder's layers and whether logits are scaled."""
        return {
            "num_decoder_layers": self.num_layers,
            "scale_decoder_outputs": self.tie_word_embeddings,
        }

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer multiplies two projections."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> str:
        """One of ACTIVATIONS.

        Raises:
            ValueError: `feed_forward_proj` names none of them.
        """
        name = self.feed_forward_proj
        found = _ACTIVATION_BY_NAME.get(name, name.removeprefix("gated-"))
        if found not in ACTIVATIONS:
            raise ValueError(
                f"t5 config: feed_forward_proj is {name!r}; it must be one of "
                f"{', '.join(ACTIVATIONS)}, alone or after 'gated-'."
            )
        return found

    @property
    def core(self) -> EncoderDecoderConfig:
        """The same model as an `EncoderDecoderConfig`."""
        return EncoderDecoderConfig(
            vocab_size=self.vocab_size,
            encoder=self._stack("encoder"),
            decoder=self._stack("decoder"),
            embedding_stddev=self.initializer_factor,
            tie_word_embeddings=self.tie_word_embeddings,
            head_scale=self.d_model**-0.5 if self.scale_decoder_outputs else 1.0,
        )

    def _stack(self, side: str) -> StackConfig:
        is_decoder = side == "decoder"
        if self.relative_attention_num_buckets % 4:
            raise ValueError(
                "t5 config: relative_attention_num_buckets is "
                f"{self.relative_attention_num_buckets}; it must be a multiple of 4."
            )

        def attention(**kind: Any) -> AttentionConfig:
            return AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_heads,
                head_dim=self.d_kv,
                scale=1.0,
                dropout=self.dropout_rate,
                # Which replaces the scores' missing scale.
                query_init=self.d_kv**-0.5,
                **kind,
            )

        num_layers = self.num_decoder_layers if is_decoder else self.num_layers
        assert num_layers is not None
        return StackConfig(
            width=self.d_model,
            num_layers=num_layers,
            attention=attention(is_causal=is_decoder),
            cross_attention=attention(is_causal=False, is_cross=True) if is_decoder else None,
            mlp=MlpConfig(
                self.d_ff, self.activation, is_gated=self.is_gated, dropout=self.dropout_rate
            ),
            norm=NormConfig("rms", self.layer_norm_epsilon, self.initializer_factor),
            relative=RelativeConfig(
                self.relative_attention_num_buckets, self.relative_attention_max_distance
            ),
            has_final_norm=True,
            embedding_dropout=self.dropout_rate,
            residual_dropout=self.dropout_rate,
            final_dropout=self.dropout_rate,
            init_stddev=self.initializer_factor,
            init_by_fan_in=True,
            **self.how_computed,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        layouts: dict[str, Any] = {
            "embedding": table_layout(
                "vocabulary",
                _EMBEDDING,
                aliases=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
            ),
            "encoder": _stack_layouts(self._stack("encoder"), "encoder"),
            "decoder": _stack_layouts(self._stack("decoder"), "decoder"),
        }
        if not self.tie_word_embeddings:
            layouts["lm_head"] = head_layout(_HEAD)
        return layouts

    def of_tensors(self, files: TensorFiles) -> Self:
        """Return this config, untied where the checkpoint has a head that is not the embedding.

        transformers 5 writes `tie_word_embeddings: true` for every T5, v1.1 too, and goes by the
        tensors when it reads; so must we.
        """
        from redco_flow.models.hub.tensors import equal_tensors

        if not self.tie_word_embeddings or not {_HEAD, _EMBEDDING} <= files.names:
            return self
        if equal_tensors(files, _HEAD, _EMBEDDING):
            return self
        return self.updated(
            {"tie_word_embeddings": False, "scale_decoder_outputs": self.scale_decoder_outputs}
        )


def _stack_layouts(config: StackConfig, stack: str) -> dict[str, Any]:
    block = f"{stack}.block.{{layer}}.layer"
    first = f"{stack}.block.0.layer.0"
    assert isinstance(config.mlp, MlpConfig)

    def attended(name: str, attention: AttentionConfig) -> dict[str, Any]:
        return attention_layouts(attention, f"{name}.{{part}}", f"{name}.o", ("q", "k", "v"))

    last = 1 if config.cross_attention is None else 2
    mlp = f"{block}.{last}.DenseReluDense"
    gates = (f"{mlp}.wi_{{gate}}", f"{mlp}.wo", ("0", "1"))
    layers = {
        "attention_norm": norm_layouts(f"{block}.0.layer_norm", has_bias=False),
        "attention": attended(f"{block}.0.SelfAttention", config.attention),
        "mlp_norm": norm_layouts(f"{block}.{last}.layer_norm", has_bias=False),
        "mlp": mlp_layouts(config.mlp, *gates)
        if config.mlp.is_gated
        else mlp_layouts(config.mlp, f"{mlp}.wi", f"{mlp}.wo"),
    }
    if config.cross_attention is not None:
        layers["cross_attention_norm"] = norm_layouts(f"{block}.1.layer_norm", has_bias=False)
        layers["cross_attention"] = attended(f"{block}.1.EncDecAttention", config.cross_attention)
    return {
        "layers": layers,
        "final_norm": norm_layouts(f"{stack}.final_layer_norm", has_bias=False),
        "relative_bias": table_layout(
            "buckets", f"{first}.SelfAttention.relative_attention_bias.weight", width="heads"
        ),
    }
