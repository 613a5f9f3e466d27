"""The LLaMA-like families, a class each: LLaMA, Mistral, Qwen, OLMo, Phi, SmolLM, Gemma, gpt-oss.

Each declares the keys of its `config.json` and, as class variables, what no key tells; see
`LlamaFamilyConfig`. What they compute is in `decoder_model.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.attention.rope import RopeScaling, RotaryConfig
from redco_flow.models.config import DecoderConfig
from redco_flow.models.families.decoder_family import (
    ExpertNames,
    HeadNorms,
    LlamaFamilyConfig,
    name_in_layer,
)
from redco_flow.models.families.family_config import above_zero, from_zero
from redco_flow.models.hub.layouts import TensorLayout, attention_layouts, mlp_layouts
from redco_flow.models.layer_config import (
    ClampedGate,
    MixtureConfig,
    MlpConfig,
    NormKind,
    NormPlacement,
)

# Of Qwen2 and its successors, where `use_sliding_window` is set without a window.
_QWEN_WINDOW = 4096
_GPT_OSS_YARN = RopeScaling("yarn", 32.0, original_max_position_embeddings=4096, truncate=False)


@dataclass(frozen=True)
class LlamaConfig(LlamaFamilyConfig):
    """LLaMA 1 to 3; 3.1 and later have `rope_scaling`."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2


@dataclass(frozen=True)
class MistralConfig(LlamaFamilyConfig):
    """Mistral: LLaMA whose layers look a window of tokens back; all the way without one."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    hidden_act: str = "silu"
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2


@dataclass(frozen=True)
class _QwenConfig(LlamaFamilyConfig):
    """Qwen's window; `use_sliding_window: false` or `sliding_window: null` means none."""

    @classmethod
    def standardised(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return a `config.json`'s content; `sliding_window: null` switches windows off."""
        if "sliding_window" in values and values["sliding_window"] is None:
            return {**values, "use_sliding_window": False}
        return values

    def derived(self) -> dict[str, Any]:
        """Return the head dims, the window, and which layers look a window back."""
        window = _QWEN_WINDOW if self._key("use_sliding_window") else None
        return {**super().derived(), "sliding_window": window}


@dataclass(frozen=True)
class Qwen2Config(_QwenConfig):
    """Qwen2 and 2.5: LLaMA with biases on queries, keys and values.

    With `use_sliding_window` the layers from `max_window_layers` on look a window back, unless
    `layer_types` says which ones do.
    """

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    has_qkv_bias: ClassVar[bool] = True

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = from_zero(28)
    layer_types: tuple[str, ...] | None = None

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer looks a window back where `layer_types` is not given."""
        return self.use_sliding_window and layer >= self.max_window_layers


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Qwen3: Qwen2 with norms on each head's queries and keys instead of biases."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    has_qkv_bias: ClassVar[bool] = False
    head_norms: ClassVar[HeadNorms] = "each"

    head_dim: int | None = 128
    attention_bias: bool = False


@dataclass(frozen=True)
class Qwen3MoeConfig(_QwenConfig):
    """Qwen3-MoE: Qwen3 with a mixture of many small experts for its feed-forward layer.

    Where `output_router_logits` is set, training adds `router_aux_loss_coef` times the
    load-balancing loss. `intermediate_size` is that of layers without experts, which no published
    model has.
    """

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    head_norms: ClassVar[HeadNorms] = "each"
    expert_names: ClassVar[ExpertNames | None] = ExpertNames("mlp")

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


@dataclass(frozen=True)
class Olmo2Config(LlamaFamilyConfig):
    """OLMo 2: norms on sublayers' results, and on the queries and keys of all heads together."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    norm_placement: ClassVar[NormPlacement] = "result"
    head_norms: ClassVar[HeadNorms] = "joint"
    norm_names: ClassVar[Mapping[str, str]] = {
        "attention_norm": "post_attention_layernorm",
        "mlp_norm": "post_feedforward_layernorm",
    }

    vocab_size: int = 50304
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1


@dataclass(frozen=True)
class Phi3Config(LlamaFamilyConfig):
    """Phi-3 and Phi-4: LLaMA whose queries, keys and values are one tensor, as are gate and up.

    Positions of `longrope` reach as far as `original_max_position_embeddings`.
    """

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    resid_pdrop: float = 0.0
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 32000
    pad_token_id: int | None = 32000

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        decoder, mlp = self.core, name_in_layer("mlp")
        assert isinstance(decoder.mlp, MlpConfig)
        return self.llama_layouts(
            attention=_one_tensor_layouts(decoder),
            mlp=mlp_layouts(decoder.mlp, f"{mlp}.gate_up_proj", f"{mlp}.down_proj"),
        )


def _one_tensor_layouts(decoder: DecoderConfig) -> dict[str, Any]:
    """Return the layouts of attention whose queries, keys and values are one tensor."""
    attention = decoder.attention
    name, out = name_in_layer("self_attn.qkv_proj"), name_in_layer("self_attn.o_proj")
    layouts = attention_layouts(attention, name, out, ("", "", ""))
    of_queries, of_keys = (
        num * attention.head_dim for num in (attention.num_heads, attention.num_kv_heads)
    )
    total = of_queries + 2 * of_keys
    parts: dict[str, tuple[str, tuple[int, int] | None]] = {"qkv": ("part ", None)}
    if not attention.is_fused:
        parts = {"q": ("", (0, total)), "kv": ("part ", (of_queries, total))}
    for kernel, (dim, part) in parts.items():
        dims = (f"layer model {dim}heads head_dim", f"({dim}heads head_dim) model")
        layouts[kernel] = TensorLayout(*dims, f"{name}.weight", part=part)
    return layouts


@dataclass(frozen=True)
class SmolLM3Config(LlamaFamilyConfig):
    """SmolLM3: LLaMA in which every fourth layer has no positions (NoPE).

    Layers with a 0 in `no_rope_layers` have no positions: by default every
    `no_rope_layer_interval`th. With `use_sliding_window` they look `sliding_window` back.
    """

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rope_theta: float = above_zero(2_000_000.0)
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 128000
    eos_token_id: int | tuple[int, ...] | None = 128001
    pad_token_id: int | None = 128004
    tie_word_embeddings: bool = True

    def derived(self) -> dict[str, Any]:
        """Return the head dims, which layers have positions, and which look a window back."""
        return {**super().derived(), "no_rope_layers": self._turned_by_interval()}

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer looks a window back where `layer_types` is not given."""
        turned = self.no_rope_layers or self._turned_by_interval()
        has_window = self.use_sliding_window and self.sliding_window is not None
        return has_window and not all(turned[layer : layer + 1])

    def rotaries(self) -> tuple[RotaryConfig | None, ...]:
        """Return each layer's rotary positions."""
        turned = self.no_rope_layers or ()
        if len(turned) != self.num_hidden_layers or not set(turned) <= {0, 1}:
            raise ValueError(
                f"no_rope_layers is {list(turned)}; give {self.num_hidden_layers}, one per layer, "
                "each 1, or 0 for a layer without positions."
            )
        return tuple(self.rotary() if is_turned else None for is_turned in turned)

    def _turned_by_interval(self) -> tuple[int, ...]:
        layers = range(1, self.num_hidden_layers + 1)
        return tuple(int(layer % self.no_rope_layer_interval != 0) for layer in layers)


@dataclass(frozen=True)
class _GemmaConfig(LlamaFamilyConfig):
    """Gemma's norms before and after each sublayer, and the keys that Gemma 2 and 3 share."""

    norm_kind: ClassVar[NormKind] = "rms_offset"
    norm_placement: ClassVar[NormPlacement] = "both"
    scales_embedding: ClassVar[bool] = True
    norm_names: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    query_pre_attn_scalar: float = above_zero(256)
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class Gemma2Config(_GemmaConfig):
    """Gemma 2: capped scores and logits, norms around each sublayer, windows in half the layers.

    Every second layer, the first included, looks `sliding_window` back, unless `layer_types`
    says which ones do.
    """

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"use_bidirectional_attention": False}

    vocab_size: int = 256000
    max_position_embeddings: int = 8192
    final_logit_softcapping: float | None = above_zero(30.0)
    attn_logit_softcapping: float | None = above_zero(50.0)

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer looks a window back where `layer_types` is not given."""
        return layer % 2 == 0


@dataclass(frozen=True)
class Gemma3TextConfig(_GemmaConfig):
    """Gemma 3, the models of text alone: Gemma 2 with normed queries and keys, not soft caps.

    All layers but every `sliding_window_pattern`th look `sliding_window` back, unless
    `layer_types` says which ones do; their rotary positions are of base `rope_local_base_freq`,
    and `rope_scaling` is of the others.
    """

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    classifier_architecture: ClassVar[str | None] = "Gemma3TextForSequenceClassification"
    fixed: ClassVar[Mapping[str, Any]] = {
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    }
    other_names: ClassVar[Mapping[str, str]] = {"_sliding_window_pattern": "sliding_window_pattern"}
    head_norms: ClassVar[HeadNorms] = "each"

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_theta: float = above_zero(1_000_000.0)
    rope_local_base_freq: float = above_zero(10_000.0)
    sliding_window_pattern: int = 6
    final_logit_softcapping: float | None = above_zero(None)

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer looks a window back where `layer_types` is not given."""
        return (layer + 1) % self.sliding_window_pattern != 0

    def rotaries(self) -> tuple[RotaryConfig | None, ...]:
        """Return each layer's rotary positions."""
        assert self.head_dim is not None
        near, far = RotaryConfig(self.head_dim, self.rope_local_base_freq), self.rotary()
        return tuple(near if slides else far for slides in self.sliding_layers)


@dataclass(frozen=True)
class MixtralConfig(LlamaFamilyConfig):
    """Mixtral: Mistral with a mixture of experts for its feed-forward layer.

    Where `output_router_logits` is set, training adds `router_aux_loss_coef` times the
    load-balancing loss, which `experts.load_balancing_losses` computes.
    """

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"router_jitter_noise": 0.0}
    expert_names: ClassVar[ExpertNames | None] = ExpertNames("block_sparse_moe", ("w1", "w3"), "w2")

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


@dataclass(frozen=True)
class GptOssConfig(LlamaFamilyConfig):
    """gpt-oss: attention sinks, windows in half the layers, experts with biases and clamped gates.

    Published experts of four bits (MXFP4) are read as the numbers that they encode. Every second
    layer, the first included, looks `sliding_window` back, unless `layer_types` says which ones do.
    Where `output_router_logits` is set, training adds `router_aux_loss_coef` times the
    load-balancing loss.
    """

    model_type: ClassVar[str] = "gpt_oss"
    architecture: ClassVar[str] = "GptOssForCausalLM"
    has_sinks: ClassVar[bool] = True

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
    rope_scaling: RopeScaling | None = _GPT_OSS_YARN
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = above_zero(7.0)
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer looks a window back where `layer_types` is not given."""
        return layer % 2 == 0

    @property
    def core(self) -> DecoderConfig:
        """The same model as a `DecoderConfig`."""
        if self.rope_scaling is None:
            raise ValueError(
                "gpt_oss config: rope_scaling is None; transformers would read the published "
                "models' instead. Give one, of rope_type yarn."
            )
        core = self.llama_decoder()
        assert isinstance(core.mlp, MixtureConfig)
        clamp = ClampedGate(self.swiglu_alpha, self.swiglu_limit)
        mlp = dataclasses.replace(core.mlp, has_bias=True, clamp=clamp)
        return dataclasses.replace(core, mlp=mlp)

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts(experts=_stacked_expert_layouts())


def _stacked_expert_layouts() -> dict[str, Any]:
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
