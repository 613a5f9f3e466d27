"""The decoders before LLaMA: GPT-2, GPT-J and OPT, with layer norms and biases.

Their configs under Hugging Face's names and the tensors of transformers' GPT2LMHeadModel, whose
kernels are stored as (in, out), GPTJForCausalLM and OPTForCausalLM. What they compute is in
`decoder_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from redco_flow.models.attention.rope import RotaryConfig
from redco_flow.models.config import DecoderConfig
from redco_flow.models.families.decoder_family import DecoderFamilyConfig
from redco_flow.models.families.family_config import attention_of_heads
from redco_flow.models.hub.layouts import (
    TensorLayout,
    attention_layouts,
    head_layout,
    mlp_layouts,
    norm_layouts,
    table_layout,
    with_other_prefix,
)
from redco_flow.models.layer_config import MlpConfig, NormConfig, activation_name

_GPT_LAYER = "transformer.h.{layer}"
_OPT_STACK = "model.decoder"
_OPT_LAYER = f"{_OPT_STACK}.layers.{{layer}}"
# The rows before it are transformers' padding; no token has one of them.
_OPT_POSITION_OFFSET = 2
_OPT_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class GPT2Config(DecoderFamilyConfig):
    """GPT-2: learned positions, one kernel of queries, keys and values.

    `n_inner` is 4 `n_embd` unless it is given.

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
        """The same model as a `DecoderConfig`."""
        assert self.n_inner is not None
        unscaled = {} if self.scale_attn_weights else {"scale": 1.0}
        attention = attention_of_heads(
            self,
            "n_embd",
            "n_head",
            has_input_bias=True,
            has_output_bias=True,
            dropout=self.attn_pdrop,
            **unscaled,
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
            **self.how_computed,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        layouts: dict[str, Any] = {
            "embedding": table_layout("vocabulary", "transformer.wte.weight"),
            "positions": table_layout("positions", "transformer.wpe.weight"),
            "layers": {
                "attention_norm": norm_layouts(f"{_GPT_LAYER}.ln_1", has_bias=True),
                "attention": _gpt2_attention_layouts(f"{_GPT_LAYER}.attn"),
                "mlp_norm": norm_layouts(f"{_GPT_LAYER}.ln_2", has_bias=True),
                "mlp": _gpt2_mlp_layouts(f"{_GPT_LAYER}.mlp"),
            },
            "final_norm": norm_layouts("transformer.ln_f", has_bias=True),
        }
        if not self.tie_word_embeddings:
            layouts["lm_head"] = head_layout("lm_head.weight")
        if self.core.cross_attention is not None:
            layouts["layers"] |= {
                "cross_attention_norm": norm_layouts(f"{_GPT_LAYER}.ln_cross_attn", has_bias=True),
                "cross_attention": _cross_attention_layouts(f"{_GPT_LAYER}.crossattention"),
            }
        # As the first ones were published: the bare transformer, without its head.
        return with_other_prefix(layouts, "transformer.", "")


def _gpt2_attention_layouts(name: str) -> dict[str, TensorLayout]:
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
    own = _gpt2_attention_layouts(name)
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


def _gpt2_mlp_layouts(name: str) -> dict[str, TensorLayout]:
    return {
        "wi": TensorLayout("layer model gate units", "model (gate units)", f"{name}.c_fc.weight"),
        "wi_bias": TensorLayout("layer gate units", "(gate units)", f"{name}.c_fc.bias"),
        "wo": TensorLayout("layer units model", "units model", f"{name}.c_proj.weight"),
        "wo_bias": TensorLayout("layer model", "model", f"{name}.c_proj.bias"),
    }


@dataclass(frozen=True)
class GPTJConfig(DecoderFamilyConfig):
    """GPT-J: attention and feed-forward in parallel, rotary positions on part of each head.

    `n_inner` is 4 `n_embd` unless it is given.
    """

    model_type: ClassVar[str] = "gptj"
    architecture: ClassVar[str] = "GPTJForCausalLM"

    vocab_size: int = 50400
    n_positions: int = 2048
    n_embd: int = 4096
    n_layer: int = 28
    n_head: int = 16
    rotary_dim: int | None = 64
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256

    def derived(self) -> dict[str, Any]:
        """Return the feed-forward layer's width."""
        return {"n_inner": 4 * self.n_embd}

    @property
    def core(self) -> DecoderConfig:
        """The same model as a `DecoderConfig`."""
        assert self.n_inner is not None
        attention = attention_of_heads(self, "n_embd", "n_head", dropout=self.attn_pdrop)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.n_embd,
            num_layers=self.n_layer,
            attention=attention,
            mlp=MlpConfig(self.n_inner, activation_name(self.activation_function), has_bias=True),
            norm=NormConfig("layer", self.layer_norm_epsilon),
            is_parallel=True,
            rotary=RotaryConfig(self.rotary_dim or attention.head_dim, is_interleaved=True),
            tie_word_embeddings=self.tie_word_embeddings,
            has_head_bias=True,
            embedding_dropout=self.embd_pdrop,
            residual_dropout=self.resid_pdrop,
            init_stddev=self.initializer_range,
            **self.how_computed,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        decoder = self.core
        assert isinstance(decoder.mlp, MlpConfig)
        layouts: dict[str, Any] = {
            "embedding": table_layout("vocabulary", "transformer.wte.weight"),
            "layers": {
                "attention_norm": norm_layouts(f"{_GPT_LAYER}.ln_1", has_bias=True),
                "attention": attention_layouts(
                    decoder.attention,
                    f"{_GPT_LAYER}.attn.{{part}}_proj",
                    f"{_GPT_LAYER}.attn.out_proj",
                    ("q", "k", "v"),
                ),
                "mlp": mlp_layouts(
                    decoder.mlp, f"{_GPT_LAYER}.mlp.fc_in", f"{_GPT_LAYER}.mlp.fc_out"
                ),
            },
            "final_norm": norm_layouts("transformer.ln_f", has_bias=True),
            "lm_head_bias": TensorLayout("vocabulary", "vocabulary", "lm_head.bias"),
        }
        if not self.tie_word_embeddings:
            layouts["lm_head"] = head_layout("lm_head.weight")
        return with_other_prefix(layouts, "transformer.", "")


@dataclass(frozen=True)
class OPTConfig(DecoderFamilyConfig):
    """OPT: learned positions from row 2 on, norms before each sublayer or (350m) after it.

    `word_embed_proj_dim` is `hidden_size` unless it is given.
    """

    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
    }

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    num_attention_heads: int = 12
    activation_function: str = "relu"
    init_std: float = 0.02
    enable_bias: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 2
    tie_word_embeddings: bool = True

    def derived(self) -> dict[str, Any]:
        """Return the embedding table's width."""
        return {"word_embed_proj_dim": self.hidden_size}

    @property
    def core(self) -> DecoderConfig:
        """The same model as a `DecoderConfig`."""
        is_projected = self.word_embed_proj_dim != self.hidden_size
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.hidden_size,
            num_layers=self.num_hidden_layers,
            attention=attention_of_heads(
                self,
                "hidden_size",
                "num_attention_heads",
                has_input_bias=self.enable_bias,
                has_output_bias=self.enable_bias,
                dropout=self.attention_dropout,
            ),
            mlp=MlpConfig(
                self.ffn_dim,
                activation_name(self.activation_function),
                has_bias=self.enable_bias,
            ),
            norm=NormConfig("layer", _OPT_NORM_EPSILON),
            norm_placement="pre" if self.do_layer_norm_before else "post",
            has_final_norm=self.do_layer_norm_before,
            num_positions=self.max_position_embeddings + _OPT_POSITION_OFFSET,
            position_offset=_OPT_POSITION_OFFSET,
            embedding_width=self.word_embed_proj_dim if is_projected else None,
            tie_word_embeddings=self.tie_word_embeddings,
            residual_dropout=self.dropout,
            init_stddev=self.init_std,
            **self.how_computed,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        decoder = self.core
        layouts: dict[str, Any] = {
            "embedding": table_layout(
                "vocabulary", f"{_OPT_STACK}.embed_tokens.weight", width="token"
            ),
            "positions": table_layout("positions", f"{_OPT_STACK}.embed_positions.weight"),
            "layers": _opt_layer_layouts(decoder),
        }
        if decoder.embedding_width:
            layouts["project_in"] = TensorLayout(
                "token model", "model token", f"{_OPT_STACK}.project_in.weight"
            )
            layouts["project_out"] = TensorLayout(
                "model token", "token model", f"{_OPT_STACK}.project_out.weight"
            )
        if decoder.has_final_norm:
            layouts["final_norm"] = norm_layouts(f"{_OPT_STACK}.final_layer_norm", has_bias=True)
        if not self.tie_word_embeddings:
            layouts["lm_head"] = head_layout("lm_head.weight", width="token")
        # As the first ones were published: the decoder without what holds it.
        return with_other_prefix(layouts, f"{_OPT_STACK}.", "decoder.")


def _opt_layer_layouts(decoder: DecoderConfig) -> dict[str, Any]:
    assert isinstance(decoder.mlp, MlpConfig)
    return {
        "attention_norm": norm_layouts(f"{_OPT_LAYER}.self_attn_layer_norm", has_bias=True),
        "attention": attention_layouts(
            decoder.attention,
            f"{_OPT_LAYER}.self_attn.{{part}}_proj",
            f"{_OPT_LAYER}.self_attn.out_proj",
            ("q", "k", "v"),
        ),
        "mlp_norm": norm_layouts(f"{_OPT_LAYER}.final_layer_norm", has_bias=True),
        "mlp": mlp_layouts(decoder.mlp, f"{_OPT_LAYER}.fc1", f"{_OPT_LAYER}.fc2"),
    }
