"""Phi-3 and Phi-4: LLaMA whose queries, keys and values are one tensor, as are gate and up.

The config under Hugging Face's names; what it computes is `decoder_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import DecoderConfig, MlpConfig
from redco_flow.models.families.llama_family import LlamaFamilyConfig, name_in_layer
from redco_flow.models.hub.layouts import TensorLayout, attention_layouts, mlp_layouts

_QKV = name_in_layer("self_attn.qkv_proj")


@dataclass(frozen=True)
class Phi3Config(LlamaFamilyConfig):
    """A Phi-3's or Phi-4's shape and constants.

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

    def derived(self) -> dict[str, Any]:
        """Return the head dims that follow the width and the number of heads."""
        return self.derived_heads()

    @property
    def core(self) -> DecoderConfig:
        """The same model in the words that all families share."""
        assert self.head_dim is not None
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"phi3 config: partial_rotary_factor is {self.partial_rotary_factor}; it must be "
                "above 0 and at most 1."
            )
        num_turned = int(self.head_dim * self.partial_rotary_factor)
        return self.llama_decoder(
            self.hidden_act,
            rotary=self.rotary(num_turned),
            windows=(self.sliding_window,) * self.num_hidden_layers,
            residual_dropout=self.resid_pdrop,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        decoder = self.core
        assert isinstance(decoder.mlp, MlpConfig)
        mlp = name_in_layer("mlp")
        return self.llama_layouts(
            attention=self._attention_layouts(),
            mlp=mlp_layouts(decoder.mlp, f"{mlp}.gate_up_proj", f"{mlp}.down_proj"),
        )

    def _attention_layouts(self) -> dict[str, Any]:
        attention = self.core.attention
        out = name_in_layer("self_attn.o_proj")
        layouts = attention_layouts(attention, _QKV, out, ("", "", ""))
        of_queries, of_keys = (
            num * attention.head_dim for num in (attention.num_heads, attention.num_kv_heads)
        )
        whole = of_queries + 2 * of_keys
        parts: dict[str, tuple[str, tuple[int, int] | None]]
        if attention.is_fused:
            parts = {"qkv": ("part ", None)}
        else:
            parts = {"q": ("", (0, whole)), "kv": ("part ", (of_queries, whole))}
        for name, (dim, part) in parts.items():
            layouts[name] = TensorLayout(
                f"layer model {dim}heads head_dim",
                f"({dim}heads head_dim) model",
                f"{_QKV}.weight",
                part=part,
            )
        return layouts


Config = Phi3Config


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import decoder_model

    return getattr(decoder_model, name)
