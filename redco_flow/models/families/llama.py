"""LLaMA 1 to 3: the plain kind of its family.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig, MlpConfig, activation_name
from redco_flow.models.families.llama_family import LlamaFamilyConfig


@dataclass(frozen=True)
class LlamaConfig(LlamaFamilyConfig):
    """A LLaMA's shape and constants; LLaMA 3.1 and later have `rope_scaling`."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    def derived(self) -> dict[str, Any]:
        """Return the head dims that follow the width and the number of heads."""
        return self.derived_heads()

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
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
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts()


Config = LlamaConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
