"""GPT-J: attention and feed-forward side by side, rotary positions on part of each head.

The config under Hugging Face's names and the tensors of transformers' GPTJForCausalLM. What it
computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    activation_name,
)
from redco_flow.models.families.family_config import FamilyConfig, split_evenly
from redco_flow.models.hub.layouts import (
    TensorLayout,
    attention_layouts,
    mlp_layouts,
    norm_layouts,
    with_other_prefix,
)
from redco_flow.models.rope import RotaryConfig

_LAYER = "transformer.h.{layer}"


@dataclass(frozen=True)
class GPTJConfig(FamilyConfig):
    """A GPT-J's shape and constants; `n_inner` is 4 `n_embd` unless it is given."""

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
        """The same model in the words that all families share."""
        assert self.n_inner is not None
        head_dim = split_evenly("n_embd", self.n_embd, "n_head", self.n_head)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.n_embd,
            num_layers=self.n_layer,
            attention=AttentionConfig(
                num_heads=self.n_head,
                num_kv_heads=self.n_head,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                dropout=self.attn_pdrop,
            ),
            mlp=MlpConfig(self.n_inner, activation_name(self.activation_function), has_bias=True),
            norm=NormConfig("layer", self.layer_norm_epsilon),
            is_parallel=True,
            rotary=RotaryConfig(self.rotary_dim or head_dim, is_interleaved=True),
            tie_word_embeddings=self.tie_word_embeddings,
            has_head_bias=True,
            embedding_dropout=self.embd_pdrop,
            residual_dropout=self.resid_pdrop,
            init_stddev=self.initializer_range,
            dtype=self.dtype,
            remat=self.remat,
            attention_kernel=self.attention,
            activations=self.activations,
            num_mlp_chunks=self.num_mlp_chunks,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        decoder = self.core
        assert isinstance(decoder.mlp, MlpConfig)
        layouts: dict[str, Any] = {
            "embedding": TensorLayout(
                "vocabulary model", "vocabulary model", "transformer.wte.weight"
            ),
            "layers": {
                "attention_norm": norm_layouts(f"{_LAYER}.ln_1", has_bias=True),
                "attention": attention_layouts(
                    decoder.attention,
                    f"{_LAYER}.attn.{{part}}_proj",
                    f"{_LAYER}.attn.out_proj",
                    ("q", "k", "v"),
                ),
                "mlp": mlp_layouts(decoder.mlp, f"{_LAYER}.mlp.fc_in", f"{_LAYER}.mlp.fc_out"),
            },
            "final_norm": norm_layouts("transformer.ln_f", has_bias=True),
            "lm_head_bias": TensorLayout("vocabulary", "vocabulary", "lm_head.bias"),
        }
        if not self.tie_word_embeddings:
            layouts["lm_head"] = TensorLayout(
                "model vocabulary", "vocabulary model", "lm_head.weight"
            )
        return with_other_prefix(layouts, "transformer.", "")


Config = GPTJConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
