"""Qwen3: Qwen2 with norms on each head's queries and keys instead of biases.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from redco_flow.models.block_config import AttentionConfig
from redco_flow.models.family_config import lazy_functions
from redco_flow.models.qwen2 import Qwen2Config


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
        return self.attention(
            has_input_bias=self.attention_bias,
            has_output_bias=self.attention_bias,
            norm_epsilon=self.rms_norm_eps,
        )


Config = Qwen3Config
__getattr__ = lazy_functions("redco_flow.models.decoder_model")
