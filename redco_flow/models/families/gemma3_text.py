"""Gemma 3, the models of text alone: Gemma 2 with normed queries and keys in place of soft caps.

Five of six layers look a window back, and have rotary positions of their own.
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
from redco_flow.models.rope import RotaryConfig


@dataclass(frozen=True)
class Gemma3TextConfig(LlamaFamilyConfig):
    """A Gemma 3's shape and constants.

    All layers but every `sliding_window_pattern`th look `sliding_window` back, unless
    `layer_types` says which ones do; their rotary positions are of base `rope_local_base_freq`,
    and `rope_scaling` is of the others.
    """

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    }
    other_names: ClassVar[Mapping[str, str]] = {"_sliding_window_pattern": "sliding_window_pattern"}

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rope_theta: float = above_zero(1_000_000.0)
    rope_local_base_freq: float = above_zero(10_000.0)
    attention_bias: bool = False
    query_pre_attn_scalar: float = above_zero(256)
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = above_zero(None)
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    tie_word_embeddings: bool = True

    def derived(self) -> dict[str, Any]:
        """Return the head dims, and which layers look a window back."""
        layers = range(1, self.num_hidden_layers + 1)
        slides = [layer % self.sliding_window_pattern != 0 for layer in layers]
        return {**self.derived_heads(), "layer_types": layer_types(slides)}

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        assert self.head_dim is not None
        norm = NormConfig("rms_offset", self.rms_norm_eps)
        near = RotaryConfig(self.head_dim, self.rope_local_base_freq)
        far = self.rotary(self.head_dim)
        # A window of any size marks the layers that have one.
        slides = windows(self.layer_types, 1, self.num_hidden_layers)
        return self.llama_decoder(
            self.hidden_activation,
            attention=self.grouped_attention(
                scale=self.query_pre_attn_scalar**-0.5,
                has_input_bias=self.attention_bias,
                has_output_bias=self.attention_bias,
                norm=norm,
            ),
            norm=norm,
            norm_placement="both",
            rotary=far,
            rotaries=tuple(near if slide else far for slide in slides),
            windows=windows(self.layer_types, self.sliding_window, self.num_hidden_layers),
            embedding_scale=self.hidden_size**0.5,
            logit_cap=self.final_logit_softcapping,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts(**norms_around_sublayers())


Config = Gemma3TextConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
