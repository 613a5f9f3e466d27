"""OPT: learned positions from row 2 on, layer norms before each sublayer or (350m) after it.

The config under Hugging Face's names and the tensors of transformers' OPTForCausalLM. What it
computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    activation_name,
)
from redco_flow.models.families.family_config import FamilyConfig, split_evenly
from redco_flow.models.hub.layouts import (
    TensorLayout,
    attention_layouts,
    mlp_layouts,
    norm_layouts,
    with_other_prefix,
)

_STACK = "model.decoder"
_LAYER = f"{_STACK}.layers.{{layer}}"
# The rows before it are the reference's padding, and no token stands there.
_POSITION_OFFSET = 2
_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class OPTConfig(FamilyConfig):
    """An OPT's shape and constants; `word_embed_proj_dim` is `hidden_size` unless given."""

    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    }

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    num_attention_heads: int = 12
    activation_function: str = "relu"
    init_std: float = 0.02
    enable_bias: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 2
    tie_word_embeddings: bool = True

    def derived(self) -> dict[str, Any]:
        """Return the embedding table's width."""
        return {"word_embed_proj_dim": self.hidden_size}

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        head_dim = split_evenly(
            "hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads
        )
        is_projected = self.word_embed_proj_dim != self.hidden_size
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.hidden_size,
            num_layers=self.num_hidden_layers,
            attention=AttentionConfig(
                num_heads=self.num_attention_heads,
                num_kv_heads=self.num_attention_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                has_input_bias=self.enable_bias,
                has_output_bias=self.enable_bias,
                dropout=self.attention_dropout,
            ),
            mlp=MlpConfig(
                self.ffn_dim,
                activation_name(self.activation_function),
                has_bias=self.enable_bias,
            ),
            norm=NormConfig("layer", _NORM_EPSILON),
            norm_placement="pre" if self.do_layer_norm_before else "post",
            has_final_norm=self.do_layer_norm_before,
            num_positions=self.max_position_embeddings + _POSITION_OFFSET,
            position_offset=_POSITION_OFFSET,
            embedding_width=self.word_embed_proj_dim if is_projected else None,
            tie_word_embeddings=self.tie_word_embeddings,
            residual_dropout=self.dropout,
            init_stddev=self.init_std,
            dtype=self.dtype,
            remat=self.remat,
            attention_kernel=self.attention,
            activations=self.activations,
            num_mlp_chunks=self.num_mlp_chunks,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        decoder = self.core
        layouts: dict[str, Any] = {
            "embedding": TensorLayout(
                "vocabulary token", "vocabulary token", f"{_STACK}.embed_tokens.weight"
            ),
            "positions": TensorLayout(
                "positions model", "positions model", f"{_STACK}.embed_positions.weight"
            ),
            "layers": _layer_layouts(decoder),
        }
        if decoder.embedding_width:
            layouts["project_in"] = TensorLayout(
                "token model", "model token", f"{_STACK}.project_in.weight"
            )
            layouts["project_out"] = TensorLayout(
                "model token", "token model", f"{_STACK}.project_out.weight"
            )
        if decoder.has_final_norm:
            layouts["final_norm"] = norm_layouts(f"{_STACK}.final_layer_norm", has_bias=True)
        if not self.tie_word_embeddings:
            layouts["lm_head"] = TensorLayout(
                "token vocabulary", "vocabulary token", "lm_head.weight"
            )
        # As the first ones were published: the decoder without what holds it.
        return with_other_prefix(layouts, f"{_STACK}.", "decoder.")


def _layer_layouts(decoder: DecoderConfig) -> dict[str, Any]:
    assert isinstance(decoder.mlp, MlpConfig)
    return {
        "attention_norm": norm_layouts(f"{_LAYER}.self_attn_layer_norm", has_bias=True),
        "attention": attention_layouts(
            decoder.attention,
            f"{_LAYER}.self_attn.{{part}}_proj",
            f"{_LAYER}.self_attn.out_proj",
            ("q", "k", "v"),
        ),
        "mlp_norm": norm_layouts(f"{_LAYER}.final_layer_norm", has_bias=True),
        "mlp": mlp_layouts(decoder.mlp, f"{_LAYER}.fc1", f"{_LAYER}.fc2"),
    }


Config = OPTConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
