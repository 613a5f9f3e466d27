"""Gemma 2: capped scores and logits, norms before and after each sublayer, windows in every
second layer.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig, NormConfig
from redco_flow.models.families.family_config import above_zero
from redco_flow.models.families.llama_family import (
    LlamaFamilyConfig,
    layer_types,
    norms_around_sublayers,
    windows,
)


@dataclass(frozen=True)
class Gemma2Config(LlamaFamilyConfig):
    """A Gemma 2's shape and constants.

    Every second layer, the first included, looks `sliding_window` back, unless `layer_types`
    says which ones do.
    """

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"use_bidirectional_attention": False}

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    query_pre_attn_scalar: float = above_zero(256)
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = above_zero(30.0)
    attn_logit_softcapping: float | None = above_zero(50.0)
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    tie_word_embeddings: bool = True

    def derived(self) -> dict[str, Any]:
        """Return the head dims, and which layers look a window back."""
        slides = [layer % 2 == 0 for layer in range(self.num_hidden_layers)]
        return {**self.derived_heads(), "layer_types": layer_types(slides)}

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        return self.llama_decoder(
            self.hidden_activation,
            attention=self.grouped_attention(
                scale=self.query_pre_attn_scalar**-0.5,
                cap=self.attn_logit_softcapping,
                has_input_bias=self.attention_bias,
                has_output_bias=self.attention_bias,
            ),
            norm=NormConfig("rms_offset", self.rms_norm_eps),
            norm_placement="both",
            windows=windows(self.layer_types, self.sliding_window, self.num_hidden_layers),
            embedding_scale=self.hidden_size**0.5,
            logit_cap=self.final_logit_softcapping,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts(**norms_around_sublayers())


Config = Gemma2Config


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
