"""Mixtral: Mistral with a mixture of experts for its feed-forward layer.

The second result of `apply_with_router` is what `experts.load_balancing_losses` reads.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig, MixtureConfig, activation_name
from redco_flow.models.families.family_config import above_zero
from redco_flow.models.families.llama_family import LlamaFamilyConfig, expert_layouts


@dataclass(frozen=True)
class MixtralConfig(LlamaFamilyConfig):
    """A Mixtral's shape and constants.

    Where `output_router_logits` is set, training adds `router_aux_loss_coef` times the
    load-balancing loss.
    """

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"router_jitter_noise": 0.0}

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = above_zero(1_000_000.0)
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    def derived(self) -> dict[str, Any]:
        """Return the head dims that follow the width and the number of heads."""
        return self.derived_heads()

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        return self.llama_decoder(
            self.hidden_act,
            mlp=MixtureConfig(
                num_experts=self.num_local_experts,
                experts_per_token=self.num_experts_per_tok,
                mlp_dim=self.intermediate_size,
                activation=activation_name(self.hidden_act),
            ),
            windows=(self.sliding_window,) * self.num_hidden_layers,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts(experts=expert_layouts("block_sparse_moe", ("w1", "w3"), "w2"))


Config = MixtralConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
