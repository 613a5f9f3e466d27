"""The config of every decoder-only family, and what LLaMA and its successors have in common.

A LLaMA-like family is a subclass of `LlamaFamilyConfig` that declares the keys of its `config.json`
as fields, and as class variables what no key tells; `decoders.py` has them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, final

import ml_dtypes

from redco_flow.models.attention.rope import RopeScaling, RotaryConfig
from redco_flow.models.config import DecoderConfig
from redco_flow.models.families.family_config import FamilyConfig, above_zero, split_evenly
from redco_flow.models.hub.layouts import (
    TensorLayout,
    attention_layouts,
    head_layout,
    mlp_layouts,
    norm_layouts,
    table_layout,
)
from redco_flow.models.layer_config import (
    AttentionConfig,
    MixtureConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    NormPlacement,
    activation_name,
)

if TYPE_CHECKING:
    from redco_flow.models.hub.tensors import TensorFiles
    from redco_flow.models.transformer.decoder_model import DecoderFamily

HeadNorms = Literal["none", "each", "joint"]

_HEAD = "lm_head.weight"
_LAYER = "model.layers.{layer}"
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class DecoderFamilyConfig(FamilyConfig):
    """The config of a decoder-only family."""

    # A tied head published beside the embedding; angles and masks that are computed, not learned.
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        _HEAD,
        "*.rotary_emb.inv_freq",
        "*h.*.attn.bias",
        "*h.*.attn.masked_bias",
    )

    @classmethod
    @final
    def family(cls) -> DecoderFamily:
        """Return the family's functions; imports JAX."""
        from redco_flow.models.transformer.decoder_model import DecoderFamily

        return DecoderFamily(cls)

    @final
    def of_tensors(self, files: TensorFiles) -> Self:
        """Return this config, untied where the checkpoint has a head that is not the embedding.

        transformers goes by the tensors when it reads, whatever `config.json` says; so must we.
        """
        from redco_flow.models.hub.tensors import equal_tensors

        layout = self.tensor_layouts()["embedding"]
        embedding = next((name for name in layout.names(()) if name in files.names), None)
        if not self.tie_word_embeddings or embedding is None or _HEAD not in files.names:
            return self
        if equal_tensors(files, _HEAD, embedding):
            return self
        return self.updated({"tie_word_embeddings": False})


class ExpertNames(NamedTuple):
    """Names of a mixture's tensors, whose experts are linear layers of their own.

    Attributes:
        mixture: its name in a layer, such as `mlp`.
        gates: an expert's activated product and the other.
        output: the product after them.
    """

    mixture: str
    gates: tuple[str, str] = ("gate_proj", "up_proj")
    output: str = "down_proj"


@dataclass(frozen=True)
class LlamaFamilyConfig(DecoderFamilyConfig):
    """The keys that all LLaMA-like families have, under Hugging Face's names.

    `head_dim` is `hidden_size` over `num_attention_heads` and `num_key_value_heads` is
    `num_attention_heads` unless they are given. These keys take effect in a family that declares
    them: `hidden_act` or `hidden_activation`, `attention_bias`, `mlp_bias`,
    `query_pre_attn_scalar`, `attn_logit_softcapping`, `final_logit_softcapping`, `resid_pdrop`,
    `partial_rotary_factor`; `sliding_window`, `use_sliding_window`, `layer_types`; of a mixture of
    experts `num_experts` or `num_local_experts`, `num_experts_per_tok`, `moe_intermediate_size`
    and `norm_topk_prob`.

    Class variables tell the rest:
        norm_kind, norm_placement: of the layers' norms; see `NormConfig` and `StackConfig`.
        head_norms: whether queries and keys are normed, each head's or all heads' together.
        has_qkv_bias: whether queries, keys and values have biases, whatever the keys are.
        has_sinks: whether attention has sinks.
        scales_embedding: whether embeddings are multiplied by the square root of the width, rounded
            to the model's dtype.
        norm_names: the layers' norms and what files call them.
        expert_names: what files call a mixture's experts; None: there are none.
    """

    norm_kind: ClassVar[NormKind] = "rms"
    norm_placement: ClassVar[NormPlacement] = "pre"
    head_norms: ClassVar[HeadNorms] = "none"
    has_qkv_bias: ClassVar[bool] = False
    has_sinks: ClassVar[bool] = False
    scales_embedding: ClassVar[bool] = False
    norm_names: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    expert_names: ClassVar[ExpertNames | None] = None

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = above_zero(10_000.0)
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = 0.0

    def derived(self) -> dict[str, Any]:
        """Return the head dims that follow the width, and which layers look a window back."""
        follows: dict[str, Any] = {"num_key_value_heads": self.num_attention_heads}
        if self.head_dim is None or self.head_dim * self.num_attention_heads == self.hidden_size:
            follows["head_dim"] = split_evenly(
                "hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads
            )
        if hasattr(self, "layer_types"):
            slides = map(self.is_sliding, range(self.num_hidden_layers))
            follows["layer_types"] = tuple(_SLIDING if slide else _FULL for slide in slides)
        return follows

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer looks a window back where `layer_types` is not given."""
        del layer
        return False

    def rotaries(self) -> tuple[RotaryConfig | None, ...]:
        """Return each layer's rotary positions, where they differ."""
        return ()

    @property
    def core(self) -> DecoderConfig:
        """The same model as a `DecoderConfig`."""
        return self.llama_decoder()

    @final
    def llama_decoder(self, **differing: Any) -> DecoderConfig:
        """Return the decoder of these keys and class variables, but for what differs."""
        same: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "width": self.hidden_size,
            "num_layers": self.num_hidden_layers,
            "norm": NormConfig(self.norm_kind, self.rms_norm_eps),
            "norm_placement": self.norm_placement,
            "rotaries": self.rotaries(),
            "windows": self._windows(),
            "embedding_scale": self._embedding_scale(),
            "logit_cap": self._key("final_logit_softcapping"),
            "residual_dropout": self._key("resid_pdrop", 0.0),
            "tie_word_embeddings": self.tie_word_embeddings,
            "init_stddev": self.initializer_range,
            **self.how_computed,
        }
        # Not made where another replaces them: some of their keys decide nothing then.
        parts = {"attention": self._attention, "mlp": self._feed_forward, "rotary": self.rotary}
        made = {name: make() for name, make in parts.items() if name not in differing}
        return DecoderConfig(**{**same, **made, **differing})

    def _embedding_scale(self) -> float:
        root = self.hidden_size**0.5 if self.scales_embedding else 1.0
        # transformers rounds it to the model's dtype.
        return float(ml_dtypes.bfloat16(root)) if self.dtype == "bfloat16" else root

    @final
    @property
    def activation(self) -> str:
        """The feed-forward layer's, one of ACTIVATIONS."""
        return activation_name(self._key("hidden_act") or self._key("hidden_activation"))

    @final
    def rotary(self) -> RotaryConfig:
        """Return the rotary positions of `rope_theta` and `rope_scaling`."""
        assert self.head_dim is not None
        share = self._key("partial_rotary_factor", 1.0)
        if not 0 < share <= 1:
            raise ValueError(
                f"{self.model_type} config: partial_rotary_factor is {share}; it must be above 0 "
                "and at most 1."
            )
        return RotaryConfig(int(self.head_dim * share), self.rope_theta, scaling=self.rope_scaling)

    def _key(self, name: str, default: Any = None) -> Any:
        """Return the value of a key that only some of these families have."""
        return getattr(self, name, default)

    def _attention(self) -> AttentionConfig:
        assert self.head_dim is not None
        assert self.num_key_value_heads is not None
        has_bias = self._key("attention_bias", False)
        has_norm = self.head_norms != "none"
        return AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=self._key("query_pre_attn_scalar", self.head_dim) ** -0.5,
            has_input_bias=has_bias or self.has_qkv_bias,
            has_output_bias=has_bias,
            norm=NormConfig(self.norm_kind, self.rms_norm_eps) if has_norm else None,
            is_norm_joint=self.head_norms == "joint",
            has_sinks=self.has_sinks,
            cap=self._key("attn_logit_softcapping"),
            dropout=self.attention_dropout,
        )

    def _feed_forward(self) -> MlpConfig | MixtureConfig:
        num_experts = self._key("num_experts") or self._key("num_local_experts")
        if num_experts is None:
            has_bias = self._key("mlp_bias", False)
            return MlpConfig(
                self.intermediate_size, self.activation, is_gated=True, has_bias=has_bias
            )
        return MixtureConfig(
            num_experts=num_experts,
            experts_per_token=self._key("num_experts_per_tok"),
            mlp_dim=self._key("moe_intermediate_size", self.intermediate_size),
            activation=self.activation,
            is_normalised=self._key("norm_topk_prob", True),
        )

    def _windows(self) -> tuple[int | None, ...]:
        """Return each layer's window.

        Raises:
            ValueError: `layer_types` has another number of layers, or a type that is not known.
        """
        num_layers = self.num_hidden_layers
        if not hasattr(self, "sliding_window"):
            return ()
        window = self._key("sliding_window") if self._key("use_sliding_window", True) else None
        types = self.sliding_layers if hasattr(self, "layer_types") else (True,) * num_layers
        return tuple(window if slides else None for slides in types)

    @final
    @property
    def sliding_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it attends to a sliding window, from `layer_types`.

        Raises:
            ValueError: it has another number of layers, or a type that is not known.
        """
        types: Sequence[str] = self._key("layer_types") or ()
        if len(types) != self.num_hidden_layers or not set(types) <= {_SLIDING, _FULL}:
            raise ValueError(
                f"layer_types is {list(types)}; give {self.num_hidden_layers}, one per layer, each "
                f"{_SLIDING!r} or {_FULL!r}."
            )
        return tuple(kind == _SLIDING for kind in types)

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        return self.llama_layouts()

    @final
    def llama_layouts(self, **differing_layers: Any) -> dict[str, Any]:
        """Return the layouts by the class variables, but for the parts of a layer that differ.

        Args:
            differing_layers: parts of `layers` to replace or to add.
        """
        decoder = self.core
        layers: dict[str, Any] = {
            part: norm_layouts(name_in_layer(name), has_bias=False)
            for part, name in self.norm_names.items()
        }
        layers["attention"] = _attention_layouts(decoder.attention)
        if isinstance(decoder.mlp, MlpConfig):
            layers["mlp"] = dense_layouts(decoder.mlp, "mlp")
        elif self.expert_names is not None:
            layers["experts"] = _expert_layouts(self.expert_names)
        layouts: dict[str, Any] = {
            "embedding": table_layout("vocabulary", "model.embed_tokens.weight"),
            "layers": layers | differing_layers,
            "final_norm": norm_layouts("model.norm", has_bias=False),
        }
        if not self.tie_word_embeddings:
            layouts["lm_head"] = head_layout(_HEAD)
        return layouts


def name_in_layer(name: str) -> str:
    """Return the full name of one of a layer's parts."""
    return f"{_LAYER}.{name}"


def dense_layouts(config: MlpConfig, name: str) -> dict[str, Any]:
    """Return the layouts of a gated feed-forward layer of that name in a layer."""
    dense = name_in_layer(name)
    gates = ("gate", "up")
    return mlp_layouts(config, f"{dense}.{{gate}}_proj", f"{dense}.down_proj", gates)


def _attention_layouts(config: AttentionConfig) -> dict[str, Any]:
    name = name_in_layer("self_attn")
    if config.latent is not None:
        return {}
    layouts = attention_layouts(config, f"{name}.{{part}}_proj", f"{name}.o_proj", ("q", "k", "v"))
    if config.has_sinks:
        layouts["sinks"] = TensorLayout("layer heads", "heads", f"{name}.sinks")
    if config.norm is None:
        return layouts
    for norm in ("q_norm", "k_norm"):
        layouts[norm] = norm_layouts(f"{name}.{norm}", has_bias=False)
        if config.is_norm_joint:
            dims = ("layer heads head_dim", "(heads head_dim)")
            layouts[norm] = {"scale": TensorLayout(*dims, f"{name}.{norm}.weight")}
    return layouts


def _expert_layouts(names: ExpertNames) -> dict[str, Any]:
    mixture = name_in_layer(names.mixture)
    expert = f"{mixture}.experts.{{expert}}"
    gate = f"{expert}.{{gate}}.weight"
    output = f"{expert}.{names.output}.weight"
    into = ("layer expert model gate units", "units model")
    return {
        "router": TensorLayout("layer model expert", "expert model", f"{mixture}.gate.weight"),
        "wi": TensorLayout(*into, gate, {"gate": names.gates}),
        "wo": TensorLayout("layer expert units model", "model units", output),
    }
