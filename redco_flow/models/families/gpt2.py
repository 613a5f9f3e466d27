"""GPT-2: learned positions, layer norms, one fused kernel of queries, keys and values.

The config under Hugging Face's names and the tensors of transformers' GPT2LMHeadModel, whose
kernels are stored as (in, out). What it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from redco_flow.models.config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    activation_name,
)
from redco_flow.models.families.family_config import FamilyConfig, split_evenly
from redco_flow.models.hub.layouts import TensorLayout, norm_layouts, with_other_prefix

_LAYER = "transformer.h.{layer}"


@dataclass(frozen=True)
class GPT2Config(FamilyConfig):
    """A GPT-2's shape and constants; `n_inner` is 4 `n_embd` unless it is given.

    With `add_cross_attention` it is the decoder of another model, which encodes what it reads.
    """

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    fixed: ClassVar[Mapping[str, Any]] = {"scale_attn_by_inverse_layer_idx": False}

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    add_cross_attention: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    tie_word_embeddings: bool = True

    def derived(self) -> dict[str, Any]:
        """Return the feed-forward layer's width."""
        return {"n_inner": 4 * self.n_embd}

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        assert self.n_inner is not None
        head_dim = split_evenly("n_embd", self.n_embd, "n_head", self.n_head)
        attention = AttentionConfig(
            num_heads=self.n_head,
            num_kv_heads=self.n_head,
            head_dim=head_dim,
            scale=head_dim**-0.5 if self.scale_attn_weights else 1.0,
            has_input_bias=True,
            has_output_bias=True,
            dropout=self.attn_pdrop,
        )
        cross_attention = None
        if self.add_cross_attention:
            cross_attention = replace(attention, is_causal=False, is_cross=True)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.n_embd,
            num_layers=self.n_layer,
            attention=attention,
            cross_attention=cross_attention,
            mlp=MlpConfig(self.n_inner, activation_name(self.activation_function), has_bias=True),
            norm=NormConfig("layer", self.layer_norm_epsilon),
            num_positions=self.n_positions,
            tie_word_embeddings=self.tie_word_embeddings,
            embedding_dropout=self.embd_pdrop,
            residual_dropout=self.resid_pdrop,
            init_stddev=self.initializer_range,
            residual_init=(2 * self.n_layer) ** -0.5,
            dtype=self.dtype,
            remat=self.remat,
            attention_kernel=self.attention,
            activations=self.activations,
            num_mlp_chunks=self.num_mlp_chunks,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        layouts: dict[str, Any] = {
            "embedding": TensorLayout(
                "vocabulary model", "vocabulary model", "transformer.wte.weight"
            ),
            "positions": TensorLayout(
                "positions model", "positions model", "transformer.wpe.weight"
            ),
            "layers": {
                "attention_norm": norm_layouts(f"{_LAYER}.ln_1", has_bias=True),
                "attention": _attention_layouts(f"{_LAYER}.attn"),
                "mlp_norm": norm_layouts(f"{_LAYER}.ln_2", has_bias=True),
                "mlp": _mlp_layouts(f"{_LAYER}.mlp"),
            },
            "final_norm": norm_layouts("transformer.ln_f", has_bias=True),
        }
        if not self.tie_word_embeddings:
            layouts["lm_head"] = TensorLayout(
                "model vocabulary", "vocabulary model", "lm_head.weight"
            )
        if self.core.cross_attention is not None:
            layouts["layers"] |= {
                "cross_attention_norm": norm_layouts(f"{_LAYER}.ln_cross_attn", has_bias=True),
                "cross_attention": _cross_attention_layouts(f"{_LAYER}.crossattention"),
            }
        # As the first ones were published: the bare transformer, without its head.
        return with_other_prefix(layouts, "transformer.", "")


def _attention_layouts(name: str) -> dict[str, TensorLayout]:
    return {
        "qkv": TensorLayout(
            "layer model part heads head_dim",
            "model (part heads head_dim)",
            f"{name}.c_attn.weight",
        ),
        "qkv_bias": TensorLayout(
            "layer part heads head_dim", "(part heads head_dim)", f"{name}.c_attn.bias"
        ),
        "out": TensorLayout(
            "layer heads head_dim model", "(heads head_dim) model", f"{name}.c_proj.weight"
        ),
        "out_bias": TensorLayout("layer model", "model", f"{name}.c_proj.bias"),
    }


def _cross_attention_layouts(name: str) -> dict[str, TensorLayout]:
    """Return the same where keys and values are another sequence's."""
    own = _attention_layouts(name)
    return {
        "q": TensorLayout(
            "layer model heads head_dim", "model (heads head_dim)", f"{name}.q_attn.weight"
        ),
        "q_bias": TensorLayout("layer heads head_dim", "(heads head_dim)", f"{name}.q_attn.bias"),
        "kv": own["qkv"],
        "kv_bias": own["qkv_bias"],
        "out": own["out"],
        "out_bias": own["out_bias"],
    }


def _mlp_layouts(name: str) -> dict[str, TensorLayout]:
    return {
        "wi": TensorLayout("layer model gate units", "model (gate units)", f"{name}.c_fc.weight"),
        "wi_bias": TensorLayout("layer gate units", "(gate units)", f"{name}.c_fc.bias"),
        "wo": TensorLayout("layer units model", "units model", f"{name}.c_proj.weight"),
        "wo_bias": TensorLayout("layer model", "model", f"{name}.c_proj.bias"),
    }


Config = GPT2Config


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
