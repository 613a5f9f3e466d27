"""OLMo 2: norms on what each sublayer gives, and on the queries and keys of all heads together.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig, NormConfig
from redco_flow.models.families.llama_family import LlamaFamilyConfig, name_in_layer
from redco_flow.models.hub.layouts import norm_layouts


@dataclass(frozen=True)
class Olmo2Config(LlamaFamilyConfig):
    """An OLMo 2's shape and constants."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"

    vocab_size: int = 50304
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1

    def derived(self) -> dict[str, Any]:
        """Return the head dims that follow the width and the number of heads."""
        return self.derived_heads()

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        norm = NormConfig("rms", self.rms_norm_eps)
        return self.llama_decoder(
            self.hidden_act,
            attention=self.grouped_attention(
                has_input_bias=self.attention_bias,
                has_output_bias=self.attention_bias,
                norm=norm,
                is_norm_joint=True,
            ),
            norm=norm,
            norm_placement="result",
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        names = {
            "attention_norm": "post_attention_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        }
        return self.llama_layouts(
            **{
                part: norm_layouts(name_in_layer(name), has_bias=False)
                for part, name in names.items()
            }
        )


Config = Olmo2Config


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
