"""Qwen2 and 2.5: LLaMA with biases on queries, keys and values.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import AttentionConfig, DecoderConfig
from redco_flow.models.families.family_config import from_zero
from redco_flow.models.families.llama_family import (
    LlamaFamilyConfig,
    layer_types,
    windows,
    without_null_window,
)

_DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class Qwen2Config(LlamaFamilyConfig):
    """A Qwen2's shape and constants.

    With `use_sliding_window` the layers from `max_window_layers` on look a window back, unless
    `layer_types` says which ones do.
    """

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = from_zero(28)
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def standardised(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Where a file says that there is no window, no layer looks a window back."""
        return without_null_window(values)

    def derived(self) -> dict[str, Any]:
        """Return the head dims, the window, and which layers look a window back."""
        slides = [
            self.use_sliding_window and layer >= self.max_window_layers
            for layer in range(self.num_hidden_layers)
        ]
        return {
            **self.derived_heads(),
            "sliding_window": _DEFAULT_WINDOW if self.use_sliding_window else None,
            "layer_types": layer_types(slides),
        }

    @property
    def own_attention(self) -> AttentionConfig:
        """What each layer attends with."""
        return self.grouped_attention(has_input_bias=True)

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        window = self.sliding_window if self.use_sliding_window else None
        return self.llama_decoder(
            self.hidden_act,
            attention=self.own_attention,
            windows=windows(self.layer_types, window, self.num_hidden_layers),
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts()


Config = Qwen2Config


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
