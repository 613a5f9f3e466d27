"""What BERT and the encoders made after it have in common: fields, layers, tensor names.

Norms after each sublayer, learned positions, token types.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, final

from redco_flow.models.config import (
    AttentionConfig,
    MlpConfig,
    NormConfig,
    StackConfig,
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


@dataclass(frozen=True)
class EncoderConfig:
    """Shape and constants of an encoder.

    Attributes:
        num_token_types: rows of the table of token types.
        padding_token: positions count the tokens that are not this one, and padding stands
            before the first; None: positions are places, whatever stands there.
        head_activation: between the head's kernel and its norm; None: no head.
        has_pooler: whether there is a layer that makes a text's vector of its first token.
    """

    vocab_size: int
    num_token_types: int
    stack: StackConfig
    padding_token: int | None = None
    head_activation: str | None = "gelu"
    has_pooler: bool = False


@dataclass(frozen=True)
class BertFamilyConfig(FamilyConfig):
    """The shape and constants that all of them have.

    `has_head` is false for a model published without the head for masked tokens, `has_pooler`
    true for one published with the layer that makes a text's vector of its first token.
    `classifier_names` are the tensors of a head of labels (`models.classifier`): of what stands in
    the pooler's place, None where it is the pooler itself, and of what scores the labels;
    `drops_before_pooler` says whether there is dropout before the first of them, too.
    """

    classifier_names: ClassVar[tuple[str | None, str]] = (None, "classifier")
    drops_before_pooler: ClassVar[bool] = False

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    tie_word_embeddings: bool = True
    has_head: bool = True
    has_pooler: bool = False

    @final
    def derived(self) -> dict[str, Any]:
        """Return nothing: every field stands for itself."""
        return {}

    @final
    def architectures(self) -> tuple[str, ...]:
        """Return what transformers calls the class, with the head or without."""
        whole = self.architecture
        return (whole if self.has_head else whole.replace("ForMaskedLM", "Model"),)

    @final
    def bert_encoder(
        self,
        head_activation: str,
        *,
        position_offset: int = 0,
        padding_token: int | None = None,
    ) -> EncoderConfig:
        """Return the encoder of this shape; see `EncoderConfig` for what differs."""
        num_heads = self.num_attention_heads
        head_dim = split_evenly("hidden_size", self.hidden_size, "num_attention_heads", num_heads)
        stack = StackConfig(
            width=self.hidden_size,
            num_layers=self.num_hidden_layers,
            attention=AttentionConfig(
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                is_causal=False,
                has_input_bias=True,
                has_output_bias=True,
                dropout=self.attention_probs_dropout_prob,
            ),
            mlp=MlpConfig(self.intermediate_size, activation_name(self.hidden_act), has_bias=True),
            norm=NormConfig("layer", self.layer_norm_eps),
            norm_placement="post",
            num_positions=self.max_position_embeddings,
            position_offset=position_offset,
            has_embedding_norm=True,
            embedding_dropout=self.hidden_dropout_prob,
            residual_dropout=self.hidden_dropout_prob,
            init_stddev=self.initializer_range,
            dtype=self.dtype,
            remat=self.remat,
            attention_kernel=self.attention,
            activations=self.activations,
            num_mlp_chunks=self.num_mlp_chunks,
        )
        return EncoderConfig(
            vocab_size=self.vocab_size,
            num_token_types=self.type_vocab_size,
            stack=stack,
            padding_token=padding_token,
            head_activation=activation_name(head_activation) if self.has_head else None,
            has_pooler=self.has_pooler,
        )

    @final
    def bert_layouts(self, outer: str, head: dict[str, Any]) -> dict[str, Any]:
        """Return the layouts of the encoder whose tensors begin with `outer`, with that head."""
        core, tables = self.core, f"{outer}.embeddings"
        layer = f"{outer}.encoder.layer.{{layer}}"
        attention, mlp = core.stack.attention, core.stack.mlp
        assert isinstance(mlp, MlpConfig)
        layouts: dict[str, Any] = {
            "embedding": _table("vocabulary", f"{tables}.word_embeddings.weight"),
            "token_types": _table("types", f"{tables}.token_type_embeddings.weight"),
            "encoder": {
                "positions": _table("positions", f"{tables}.position_embeddings.weight"),
                "embedding_norm": old_norm_layouts(f"{tables}.LayerNorm"),
                "layers": {
                    "attention_norm": old_norm_layouts(f"{layer}.attention.output.LayerNorm"),
                    "attention": attention_layouts(
                        attention,
                        f"{layer}.attention.self.{{part}}",
                        f"{layer}.attention.output.dense",
                        ("query", "key", "value"),
                    ),
                    "mlp_norm": old_norm_layouts(f"{layer}.output.LayerNorm"),
                    "mlp": mlp_layouts(mlp, f"{layer}.intermediate.dense", f"{layer}.output.dense"),
                },
            },
        }
        if self.has_pooler:
            layouts["pooler"] = {
                "kernel": TensorLayout(
                    "model inner", "inner model", f"{outer}.pooler.dense.weight"
                ),
                "bias": TensorLayout("inner", "inner", f"{outer}.pooler.dense.bias"),
            }
        # As models for embeddings are published: the bare encoder.
        layouts = with_other_prefix(layouts, f"{outer}.", "")
        return {**layouts, "head": head} if self.has_head else layouts


def head_layouts(dense: str, norm: dict[str, Any], bias: str, other_bias: str) -> dict[str, Any]:
    """Return the layouts of a `MaskedHead`.

    Args:
        dense: name of its linear layer.
        bias, other_bias: names of the vocabulary's bias; files have the one, the other or both.
    """
    return {
        "kernel": TensorLayout("model inner", "inner model", f"{dense}.weight"),
        "bias": TensorLayout("inner", "inner", f"{dense}.bias"),
        "norm": norm,
        "vocabulary_bias": TensorLayout("vocabulary", "vocabulary", bias, aliases=(other_bias,)),
    }


def old_norm_layouts(name: str) -> dict[str, Any]:
    """Return the layouts of a `Norm`; the first ones published call it gamma and beta."""
    layouts = norm_layouts(name, has_bias=True)
    old_names = {"scale": f"{name}.gamma", "bias": f"{name}.beta"}
    return {
        part: dataclasses.replace(layout, aliases=(old_names[part],))
        for part, layout in layouts.items()
    }


def _table(dim: str, name: str) -> TensorLayout:
    return TensorLayout(f"{dim} model", f"{dim} model", name)
