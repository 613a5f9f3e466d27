"""SmolLM3: LLaMA in which every fourth layer has no positions (NoPE).

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig, MlpConfig, activation_name
from redco_flow.models.families.family_config import above_zero
from redco_flow.models.families.llama_family import LlamaFamilyConfig, layer_types, windows


@dataclass(frozen=True)
class SmolLM3Config(LlamaFamilyConfig):
    """A SmolLM3's shape and constants.

    Layers with a 0 in `no_rope_layers` have no positions: by itself every
    `no_rope_layer_interval`th. With `use_sliding_window` they look `sliding_window` back.
    """

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rope_theta: float = above_zero(2_000_000.0)
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 128000
    eos_token_id: int | tuple[int, ...] | None = 128001
    pad_token_id: int | None = 128004
    tie_word_embeddings: bool = True

    def derived(self) -> dict[str, Any]:
        """Return the head dims, which layers have positions, and which look a window back."""
        every = self.no_rope_layer_interval
        by_interval = tuple(
            int((layer + 1) % every != 0) for layer in range(self.num_hidden_layers)
        )
        has_window = self.use_sliding_window and self.sliding_window is not None
        turned = by_interval if self.no_rope_layers is None else self.no_rope_layers
        return {
            **self.derived_heads(),
            "no_rope_layers": by_interval,
            "layer_types": layer_types([has_window and not is_turned for is_turned in turned]),
        }

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        assert self.head_dim is not None
        rotary = self.rotary(self.head_dim)
        turned = self.no_rope_layers or ()
        if len(turned) != self.num_hidden_layers or not set(turned) <= {0, 1}:
            raise ValueError(
                f"no_rope_layers is {list(turned)}; give {self.num_hidden_layers}, one per layer, "
                "each 1, or 0 for a layer without positions."
            )
        window = self.sliding_window if self.use_sliding_window else None
        bias = self.attention_bias
        return self.llama_decoder(
            self.hidden_act,
            attention=self.grouped_attention(has_input_bias=bias, has_output_bias=bias),
            mlp=MlpConfig(
                self.intermediate_size,
                activation_name(self.hidden_act),
                is_gated=True,
                has_bias=self.mlp_bias,
            ),
            rotary=rotary,
            rotaries=tuple(rotary if is_turned else None for is_turned in turned),
            windows=windows(self.layer_types, window, self.num_hidden_layers),
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts()


Config = SmolLM3Config


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
