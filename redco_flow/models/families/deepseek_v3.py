"""DeepSeek-V3: latent attention, and after some dense layers many small experts in groups.

Published kernels of 8 bits with scales (FP8) and the layers that predict several tokens ahead are
not read. The config under Hugging Face's names; what it computes is in `decoder_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.attention.rope import RotaryConfig, yarn_factor
from redco_flow.models.config import DecoderConfig
from redco_flow.models.families.decoder_family import (
    ExpertNames,
    LlamaFamilyConfig,
    dense_layouts,
    name_in_layer,
)
from redco_flow.models.families.family_config import from_zero
from redco_flow.models.hub.layouts import TensorLayout, norm_layouts, with_numbers
from redco_flow.models.layer_config import (
    AttentionConfig,
    GroupedRouting,
    LatentConfig,
    MixtureConfig,
    MlpConfig,
    NormConfig,
)


@dataclass(frozen=True)
class DeepseekV3Config(LlamaFamilyConfig):
    """A DeepSeek-V3's shape and constants.

    The first `first_k_dense_replace` layers have one feed-forward layer of `intermediate_size`, the
    others experts. `head_dim` is `qk_rope_head_dim`, and decides nothing.
    """

    model_type: ClassVar[str] = "deepseek_v3"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"attention_bias": False, "moe_layer_freq": 1}
    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    expert_names: ClassVar[ExpertNames | None] = ExpertNames("mlp")

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    first_k_dense_replace: int = from_zero(3)
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = from_zero(1)
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1

    def derived(self) -> dict[str, Any]:
        """Return what transformers writes of heads that are all alike."""
        return {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.qk_rope_head_dim,
        }

    @property
    def core(self) -> DecoderConfig:
        """The same model as a `DecoderConfig`."""
        self._check()
        activation, num_leading = self.activation, self.first_k_dense_replace
        return self.llama_decoder(
            num_layers=self.num_hidden_layers - num_leading,
            num_leading=num_leading,
            leading_mlp=MlpConfig(self.intermediate_size, activation, is_gated=True),
            rotary=RotaryConfig(
                self.qk_rope_head_dim,
                self.rope_theta,
                is_interleaved=self.rope_interleave,
                scaling=self.rope_scaling,
            ),
            mlp=MixtureConfig(
                num_experts=self.n_routed_experts,
                experts_per_token=self.num_experts_per_tok,
                mlp_dim=self.moe_intermediate_size,
                activation=activation,
                is_normalised=self.norm_topk_prob,
                routing=GroupedRouting(self.n_group, self.topk_group, self.routed_scaling_factor),
                shared_dim=self.n_shared_experts * self.moe_intermediate_size,
            ),
        )

    def _check(self) -> None:
        if not 0 <= self.first_k_dense_replace < self.num_hidden_layers:
            raise ValueError(
                f"deepseek_v3 config: first_k_dense_replace is {self.first_k_dense_replace}; at "
                f"least one of the {self.num_hidden_layers} layers must have experts."
            )
        if self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(
                f"deepseek_v3 config: v_head_dim is {self.v_head_dim}; it must be at most "
                "qk_nope_head_dim and qk_rope_head_dim together."
            )
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"deepseek_v3 config: n_group is {self.n_group}; it must divide the "
                f"{self.n_routed_experts} experts and be at least topk_group, {self.topk_group}."
            )

    def _attention(self) -> AttentionConfig:
        head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        scale, scaling = head_dim**-0.5, self.rope_scaling
        if scaling is not None and scaling.mscale_all_dim:
            scale *= yarn_factor(scaling.factor, scaling.mscale_all_dim) ** 2
        return AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_heads,
            head_dim=head_dim,
            scale=scale,
            dropout=self.attention_dropout,
            latent=LatentConfig(
                query_rank=self.q_lora_rank,
                rank=self.kv_lora_rank,
                rotary_dims=self.qk_rope_head_dim,
                value_dim=self.v_head_dim,
                norm=NormConfig("rms", 1e-6),  # as in transformers, whatever `rms_norm_eps` is
            ),
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        core, num_leading = self.core, self.first_k_dense_replace
        assert isinstance(core.mlp, MixtureConfig)
        layouts = self.llama_layouts(attention=_attention_layouts(self))
        layers = layouts["layers"]
        bias = name_in_layer("mlp.gate.e_score_correction_bias")
        layers["experts"]["choice_bias"] = TensorLayout("layer expert", "expert", bias)
        if core.mlp.shared is not None:
            layers["shared_experts"] = dense_layouts(core.mlp.shared, "mlp.shared_experts")
        if core.leading_mlp is None or not num_leading:
            return layouts
        apart = ("experts", "shared_experts")
        leading = {name: part for name, part in layers.items() if name not in apart}
        leading["mlp"] = dense_layouts(core.leading_mlp, "mlp")
        layouts["layers"] = with_numbers(layers, range(num_leading, self.num_hidden_layers))
        return {**layouts, "leading_layers": leading}


def _attention_layouts(config: DeepseekV3Config) -> dict[str, Any]:
    name = name_in_layer("self_attn")
    of_heads = ("layer latent heads head_dim", "(heads head_dim) latent")
    down = ("layer model latent", "latent model")
    layouts: dict[str, Any] = {
        "kv_down": TensorLayout(*down, f"{name}.kv_a_proj_with_mqa.weight"),
        "kv_norm": norm_layouts(f"{name}.kv_a_layernorm", has_bias=False),
        "kv_up": TensorLayout(*of_heads, f"{name}.kv_b_proj.weight"),
        "out": TensorLayout(
            "layer heads head_dim model", "model (heads head_dim)", f"{name}.o_proj.weight"
        ),
    }
    if config.q_lora_rank is None:
        dims = ("layer model heads head_dim", "(heads head_dim) model")
        return {**layouts, "q": TensorLayout(*dims, f"{name}.q_proj.weight")}
    return {
        **layouts,
        "q_down": TensorLayout(*down, f"{name}.q_a_proj.weight"),
        "q_norm": norm_layouts(f"{name}.q_a_layernorm", has_bias=False),
        "q_up": TensorLayout(*of_heads, f"{name}.q_b_proj.weight"),
    }
