"""Qwen3-MoE: Qwen3 with a mixture of many small experts for its feed-forward layer.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig, MixtureConfig, NormConfig, activation_name
from redco_flow.models.families.llama_family import (
    LlamaFamilyConfig,
    expert_layouts,
    without_null_window,
)

_DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class Qwen3MoeConfig(LlamaFamilyConfig):
    """A Qwen3-MoE's shape and constants.

    Where `output_router_logits` is set, training adds `router_aux_loss_coef` times the
    load-balancing loss. `intermediate_size` is that of layers without experts, which no published
    model has.
    """

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    @classmethod
    def standardised(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Where a file says that there is no window, no layer looks a window back."""
        return without_null_window(values)

    def derived(self) -> dict[str, Any]:
        """Return the head dims and the window."""
        window = _DEFAULT_WINDOW if self.use_sliding_window else None
        return {**self.derived_heads(), "sliding_window": window}

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        window = self.sliding_window if self.use_sliding_window else None
        return self.llama_decoder(
            self.hidden_act,
            attention=self.grouped_attention(
                has_input_bias=self.attention_bias,
                has_output_bias=self.attention_bias,
                norm=NormConfig("rms", self.rms_norm_eps),
            ),
            mlp=MixtureConfig(
                num_experts=self.num_experts,
                experts_per_token=self.num_experts_per_tok,
                mlp_dim=self.moe_intermediate_size,
                activation=activation_name(self.hidden_act),
                is_normalised=self.norm_topk_prob,
            ),
            windows=(window,) * self.num_hidden_layers,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts(
            experts=expert_layouts("mlp", ("gate_proj", "up_proj"), "down_proj")
        )


Config = Qwen3MoeConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
