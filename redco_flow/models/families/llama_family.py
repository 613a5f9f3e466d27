"""What LLaMA and the models made after it have in common: config keys and names of tensors.

Rotary positions, root-mean-square norms, gated feed-forward layers, grouped queries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from redco_flow.models.config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    activation_name,
)
from redco_flow.models.families.family_config import FamilyConfig, above_zero, split_evenly
from redco_flow.models.hub.layouts import TensorLayout, attention_layouts, mlp_layouts, norm_layouts
from redco_flow.models.rope import RopeScaling, RotaryConfig

_LAYER = "model.layers.{layer}"
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class LlamaFamilyConfig(FamilyConfig):
    """The keys that all of them have, under Hugging Face's names.

    `head_dim` is `hidden_size` over `num_attention_heads` and `num_key_value_heads` is
    `num_attention_heads` unless they are given.
    """

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

    @abstractmethod
    def derived(self) -> dict[str, Any]:
        """Return at least `derived_heads`."""

    @final
    def derived_heads(self) -> dict[str, Any]:
        """Return the head dims that follow the width and the number of heads."""
        follows: dict[str, Any] = {"num_key_value_heads": self.num_attention_heads}
        if self.head_dim is None or self.head_dim * self.num_attention_heads == self.hidden_size:
            follows["head_dim"] = split_evenly(
                "hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads
            )
        return follows

    @final
    def grouped_attention(self, **differing: Any) -> AttentionConfig:
        """Return plain grouped-query attention, but for what differs."""
        assert self.head_dim is not None
        assert self.num_key_value_heads is not None
        same: dict[str, Any] = {
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "scale": self.head_dim**-0.5,
            "dropout": self.attention_dropout,
        }
        return AttentionConfig(**{**same, **differing})

    @final
    def llama_decoder(self, activation: str, **differing: Any) -> DecoderConfig:
        """Return a plain LLaMA of this shape, but for what differs."""
        assert self.head_dim is not None
        same: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "width": self.hidden_size,
            "num_layers": self.num_hidden_layers,
            "attention": self.grouped_attention(),
            "mlp": MlpConfig(self.intermediate_size, activation_name(activation), is_gated=True),
            "norm": NormConfig("rms", self.rms_norm_eps),
            "tie_word_embeddings": self.tie_word_embeddings,
            "init_stddev": self.initializer_range,
            "dtype": self.dtype,
            "remat": self.remat,
            "attention_kernel": self.attention,
            "activations": self.activations,
            "num_mlp_chunks": self.num_mlp_chunks,
        }
        if "rotary" not in differing:
            same["rotary"] = self.rotary(self.head_dim)
        return DecoderConfig(**{**same, **differing})

    @final
    def rotary(self, num_dims: int) -> RotaryConfig:
        """Return rotary positions on so many dims of each head."""
        return RotaryConfig(num_dims, self.rope_theta, scaling=self.rope_scaling)

    @final
    def llama_layouts(self, **differing_layers: Any) -> dict[str, Any]:
        """Return the layouts of a plain LLaMA, but for the parts of a layer that differ.

        Args:
            differing_layers: parts of `layers` to replace or to add.
        """
        decoder = self.core
        layers: dict[str, Any] = {
            "attention_norm": norm_layouts(f"{_LAYER}.input_layernorm", has_bias=False),
            "attention": _attention_layouts(decoder.attention),
            "mlp_norm": norm_layouts(f"{_LAYER}.post_attention_layernorm", has_bias=False),
        }
        if isinstance(decoder.mlp, MlpConfig):
            layers["mlp"] = mlp_layouts(
                decoder.mlp,
                f"{_LAYER}.mlp.{{gate}}_proj",
                f"{_LAYER}.mlp.down_proj",
                ("gate", "up"),
            )
        layouts: dict[str, Any] = {
            "embedding": TensorLayout(
                "vocabulary model", "vocabulary model", "model.embed_tokens.weight"
            ),
            "layers": layers | differing_layers,
            "final_norm": norm_layouts("model.norm", has_bias=False),
        }
        if not self.tie_word_embeddings:
            layouts["lm_head"] = TensorLayout(
                "model vocabulary", "vocabulary model", "lm_head.weight"
            )
        return layouts


def _attention_layouts(config: AttentionConfig) -> dict[str, Any]:
    name = f"{_LAYER}.self_attn"
    layouts = attention_layouts(config, f"{name}.{{part}}_proj", f"{name}.o_proj", ("q", "k", "v"))
    if config.norm is None:
        return layouts
    for norm in ("q_norm", "k_norm"):
        layouts[norm] = norm_layouts(f"{name}.{norm}", has_bias=False)
        if config.is_norm_joint:
            scale = TensorLayout(
                "layer heads head_dim", "(heads head_dim)", f"{name}.{norm}.weight"
            )
            layouts[norm] = {"scale": scale}
    return layouts


def expert_layouts(name: str, gates: tuple[str, str], output: str) -> dict[str, Any]:
    """Return the layouts of a `MixtureOfExperts` whose experts are linear layers of their own.

    Args:
        name: of the mixture in a layer, such as `mlp`.
        gates: what an expert calls the activated product and the other.
        output: what it calls the product after them.
    """
    mixture = f"{_LAYER}.{name}"
    expert = f"{mixture}.experts.{{expert}}"
    return {
        "router": TensorLayout("layer model expert", "expert model", f"{mixture}.gate.weight"),
        "wi": TensorLayout(
            "layer expert model gate units",
            "units model",
            f"{expert}.{{gate}}.weight",
            {"gate": gates},
        ),
        "wo": TensorLayout("layer expert units model", "model units", f"{expert}.{output}.weight"),
    }


def name_in_layer(name: str) -> str:
    """Return the full name of one of a layer's parts."""
    return f"{_LAYER}.{name}"


def norms_around_sublayers() -> dict[str, Any]:
    """Return the layouts of norms before and after each sublayer, but for the very first."""
    names = {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    return {part: norm_layouts(name_in_layer(name), has_bias=False) for part, name in names.items()}


def layer_types(is_sliding: Sequence[bool]) -> tuple[str, ...]:
    """Write which layers slide a window as `config.json` does."""
    return tuple(_SLIDING if sliding else _FULL for sliding in is_sliding)


def without_null_window(values: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json`'s content, in which `sliding_window: null` switches windows off."""
    if "sliding_window" in values and values["sliding_window"] is None:
        return {**values, "use_sliding_window": False}
    return values


def windows(
    types: Sequence[str] | None, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window from `config.json`'s `layer_types`.

    Raises:
        ValueError: another number of layers, or a type that is not known.
    """
    types = types or ()
    if len(types) != num_layers or not set(types) <= {_SLIDING, _FULL}:
        raise ValueError(
            f"layer_types is {list(types)}; give {num_layers}, one per layer, each "
            f"{_SLIDING!r} or {_FULL!r}."
        )
    return tuple(window if kind == _SLIDING else None for kind in types)
