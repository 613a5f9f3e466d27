"""gpt-oss: attention sinks, windows in every second layer, experts with biases and clamped gates.

Published experts of four bits (MXFP4) are read as the numbers that they stand for.
The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import (
    ClampedGate,
    DecoderConfig,
    MixtureConfig,
    activation_name,
)
from redco_flow.models.families.family_config import above_zero
from redco_flow.models.families.llama_family import (
    LlamaFamilyConfig,
    layer_types,
    name_in_layer,
    windows,
)
from redco_flow.models.hub.layouts import TensorLayout
from redco_flow.models.rope import RopeScaling

_YARN = RopeScaling("yarn", 32.0, original_max_position_embeddings=4096, truncate=False)


@dataclass(frozen=True)
class GptOssConfig(LlamaFamilyConfig):
    """A gpt-oss' shape and constants.

    Every second layer, the first included, looks `sliding_window` back, unless `layer_types`
    says which ones do. Where `output_router_logits` is set, training adds `router_aux_loss_coef`
    times the load-balancing loss.
    """

    model_type: ClassVar[str] = "gpt_oss"
    architecture: ClassVar[str] = "GptOssForCausalLM"

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = above_zero(150_000.0)
    rope_scaling: RopeScaling | None = _YARN
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = above_zero(7.0)
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def derived(self) -> dict[str, Any]:
        """Return the head dims, and which layers look a window back."""
        slides = [layer % 2 == 0 for layer in range(self.num_hidden_layers)]
        return {**self.derived_heads(), "layer_types": layer_types(slides)}

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        if self.rope_scaling is None:
            raise ValueError(
                "gpt_oss config: rope_scaling is None; transformers would read the published "
                "models' instead. Give one, of rope_type yarn."
            )
        bias = self.attention_bias
        return self.llama_decoder(
            self.hidden_act,
            attention=self.grouped_attention(
                has_input_bias=bias, has_output_bias=bias, has_sinks=True
            ),
            mlp=MixtureConfig(
                num_experts=self.num_local_experts,
                experts_per_token=self.num_experts_per_tok,
                mlp_dim=self.intermediate_size,
                activation=activation_name(self.hidden_act),
                has_bias=True,
                clamp=ClampedGate(self.swiglu_alpha, self.swiglu_limit),
            ),
            windows=windows(self.layer_types, self.sliding_window, self.num_hidden_layers),
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        layouts = self.llama_layouts(experts=_expert_layouts())
        sinks = TensorLayout("layer heads", "heads", name_in_layer("self_attn.sinks"))
        layouts["layers"]["attention"]["sinks"] = sinks
        return layouts


def _expert_layouts() -> dict[str, Any]:
    """Return the layouts of a mixture whose experts are one tensor, gates beside each other."""
    router, experts = name_in_layer("mlp.router"), name_in_layer("mlp.experts")
    into, out = f"{experts}.gate_up_proj", f"{experts}.down_proj"
    return {
        "router": TensorLayout("layer model expert", "expert model", f"{router}.weight"),
        "router_bias": TensorLayout("layer expert", "expert", f"{router}.bias"),
        "wi": TensorLayout("layer expert model gate units", "expert model (units gate)", into),
        "wi_bias": TensorLayout("layer expert gate units", "expert (units gate)", f"{into}_bias"),
        "wo": TensorLayout("layer expert units model", "expert units model", out),
        "wo_bias": TensorLayout("layer expert model", "expert model", f"{out}_bias"),
    }


Config = GptOssConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
