"""Qwen3: Qwen2 with norms on each head's queries and keys instead of biases.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import AttentionConfig, NormConfig
from redco_flow.models.families.qwen2 import Qwen2Config


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """A Qwen3's shape and constants; windows as Qwen2 has them."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    head_dim: int | None = 128
    attention_bias: bool = False

    @property
    def own_attention(self) -> AttentionConfig:
        """What each layer attends with."""
        return self.grouped_attention(
            has_input_bias=self.attention_bias,
            has_output_bias=self.attention_bias,
            norm=NormConfig("rms", self.rms_norm_eps),
        )


Config = Qwen3Config


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
