"""Mistral: LLaMA whose layers look a window of tokens back.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig
from redco_flow.models.families.llama_family import LlamaFamilyConfig


@dataclass(frozen=True)
class MistralConfig(LlamaFamilyConfig):
    """A Mistral's shape and constants; without `sliding_window` layers look back all the way."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    hidden_act: str = "silu"
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    def derived(self) -> dict[str, Any]:
        """Return the head dims that follow the width and the number of heads."""
        return self.derived_heads()

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        return self.llama_decoder(
            self.hidden_act, windows=(self.sliding_window,) * self.num_hidden_layers
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts()


Config = MistralConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
