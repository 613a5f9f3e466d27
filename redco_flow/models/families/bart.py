"""BART: an encoder-decoder with learned positions and norms after each sublayer.

The config under Hugging Face's names and the tensors of transformers' BartForConditionalGeneration,
or of the bare BartModel. What it computes is in `encoder_decoder_model.py`.

Of the habits of generation that published `config.json` files name, the forced first and last
tokens are kept, which `generation.generate` sees to; numbers of beams, length limits and
n-grams not to be repeated are not read: who generates says what is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from redco_flow.models.config import EncoderDecoderConfig, StackConfig
from redco_flow.models.families.family_config import FamilyConfig, attention_of_heads
from redco_flow.models.hub.layouts import (
    TensorLayout,
    attention_layouts,
    mlp_layouts,
    norm_layouts,
    table_layout,
    with_other_prefix,
)
from redco_flow.models.layer_config import AttentionConfig, MlpConfig, NormConfig, activation_name

if TYPE_CHECKING:
    from redco_flow.models.transformer.encoder_decoder_model import EncoderDecoderFamily

# The rows before it are the reference's padding, and no token has these positions.
_POSITION_OFFSET = 2
_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class BartConfig(FamilyConfig):
    """A BART's shape and constants.

    `forced_eos_token_id`, with which a text ends at the latest, is `eos_token_id` unless it is
    given; `forced_bos_token_id`, with which it begins, is none.
    """

    model_type: ClassVar[str] = "bart"
    architecture: ClassVar[str] = "BartForConditionalGeneration"
    fixed: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        # Of early files: what is computed otherwise there.
        "normalize_before": False,
        "normalize_embedding": True,
        "add_final_layer_norm": False,
        "static_position_embeddings": False,
    }
    # The tied head, published beside the embedding.
    ignored_tensors: ClassVar[tuple[str, ...]] = ("lm_head.weight",)

    vocab_size: int = 50265
    d_model: int = 1024
    encoder_layers: int = 12
    decoder_layers: int = 12
    encoder_attention_heads: int = 16
    decoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    decoder_ffn_dim: int = 4096
    max_position_embeddings: int = 1024
    activation_function: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_std: float = 0.02
    scale_embedding: bool = False
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    decoder_start_token_id: int = 2
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    tie_word_embeddings: bool = True

    @classmethod
    @final
    def family(cls) -> EncoderDecoderFamily:
        """Return the family's functions; imports JAX."""
        from redco_flow.models.transformer.encoder_decoder_model import EncoderDecoderFamily

        return EncoderDecoderFamily(cls)

    def derived(self) -> dict[str, Any]:
        """Return the token that ends what has become too long."""
        return {"forced_eos_token_id": self.eos_token_id}

    @property
    def core(self) -> EncoderDecoderConfig:
        """The same model as an `EncoderDecoderConfig`."""
        return EncoderDecoderConfig(
            vocab_size=self.vocab_size,
            encoder=self._stack("encoder"),
            decoder=self._stack("decoder"),
            embedding_stddev=self.init_std,
            embedding_scale=self.d_model**0.5 if self.scale_embedding else 1.0,
            has_logits_bias=True,
        )

    def _stack(self, side: str) -> StackConfig:
        heads_name = f"{side}_attention_heads"
        is_decoder = side == "decoder"

        def attention(**kind: Any) -> AttentionConfig:
            return attention_of_heads(
                self,
                "d_model",
                heads_name,
                has_input_bias=True,
                has_output_bias=True,
                dropout=self.attention_dropout,
                **kind,
            )

        return StackConfig(
            width=self.d_model,
            num_layers=getattr(self, f"{side}_layers"),
            attention=attention(is_causal=is_decoder),
            cross_attention=attention(is_causal=False, is_cross=True) if is_decoder else None,
            mlp=MlpConfig(
                getattr(self, f"{side}_ffn_dim"),
                activation_name(self.activation_function),
                has_bias=True,
                dropout=self.activation_dropout,
            ),
            norm=NormConfig("layer", _NORM_EPSILON),
            norm_placement="post",
            num_positions=self.max_position_embeddings + _POSITION_OFFSET,
            position_offset=_POSITION_OFFSET,
            has_embedding_norm=True,
            embedding_dropout=self.dropout,
            residual_dropout=self.dropout,
            init_stddev=self.init_std,
            **self.how_computed,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        layouts: dict[str, Any] = {
            "embedding": table_layout(
                "vocabulary",
                "model.shared.weight",
                aliases=("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
            ),
            "encoder": _stack_layouts(self._stack("encoder"), "model.encoder"),
            "decoder": _stack_layouts(self._stack("decoder"), "model.decoder"),
        }
        # As the first ones were published: the bare model, which has no such bias.
        layouts = with_other_prefix(layouts, "model.", "")
        bias = TensorLayout(
            "one vocabulary", "one vocabulary", "final_logits_bias", is_optional=True
        )
        return {**layouts, "final_logits_bias": bias}


def _stack_layouts(config: StackConfig, stack: str) -> dict[str, Any]:
    layer = f"{stack}.layers.{{layer}}"
    assert isinstance(config.mlp, MlpConfig)

    def attended(sublayer: str, attention: AttentionConfig) -> dict[str, Any]:
        names = (f"{layer}.{sublayer}.{{part}}_proj", f"{layer}.{sublayer}.out_proj")
        return attention_layouts(attention, *names, ("q", "k", "v"))

    layers = {
        "attention_norm": norm_layouts(f"{layer}.self_attn_layer_norm", has_bias=True),
        "attention": attended("self_attn", config.attention),
        "mlp_norm": norm_layouts(f"{layer}.final_layer_norm", has_bias=True),
        "mlp": mlp_layouts(config.mlp, f"{layer}.fc1", f"{layer}.fc2"),
    }
    if config.cross_attention is not None:
        norm = norm_layouts(f"{layer}.encoder_attn_layer_norm", has_bias=True)
        layers["cross_attention_norm"] = norm
        layers["cross_attention"] = attended("encoder_attn", config.cross_attention)
    return {
        "positions": table_layout("positions", f"{stack}.embed_positions.weight"),
        "embedding_norm": norm_layouts(f"{stack}.layernorm_embedding", has_bias=True),
        "layers": layers,
    }
