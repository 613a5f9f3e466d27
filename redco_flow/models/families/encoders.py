"""The encoders: BERT and RoBERTa of texts, ViT of images.

Their configs under Hugging Face's names and the tensors of transformers' BertForMaskedLM,
RobertaForMaskedLM and ViTForImageClassification, or of the bare models, with a pooler where there
is one; BERT's head for next sentences is not read. What they compute is in `encoder_model.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from redco_flow.models.config import EncoderConfig, ImageEncoderConfig, StackConfig
from redco_flow.models.families.family_config import (
    FamilyConfig,
    ModelConfig,
    attention_of_heads,
    split_evenly,
)
from redco_flow.models.hub.layouts import (
    TensorLayout,
    attention_layouts,
    linear_layouts,
    mlp_layouts,
    norm_layouts,
    table_layout,
    with_other_prefix,
)
from redco_flow.models.layer_config import MlpConfig, NormConfig, activation_name

if TYPE_CHECKING:
    from redco_flow.models.hub.tensors import TensorFiles
    from redco_flow.models.transformer.encoder_model import EncoderFamily


@dataclass(frozen=True)
class BertFamilyConfig(FamilyConfig):
    """The keys that BERT and its successors have: norms after sublayers, learned positions, types.

    `has_head` is false for a model published without the head for masked tokens, `has_pooler`
    true for one published with the layer that makes a text's vector of its first token.
    `classifier_dropout`, of a head of labels, is `hidden_dropout_prob` unless it is given.

    Class variables:
        prefix: what the encoder's tensors begin with.
        head: what files call the head's linear layer, its norm and its biases' layer.
        has_old_norms: whether the head's norm may be called gamma and beta, too.
        classifier_names: the tensors of a head of labels (`models.classifier`): of the pooler's
            replacement, None where it is the pooler itself, and of what scores the labels.
        drops_before_pooler: whether there is dropout before the first of them, too.
    """

    prefix: ClassVar[str]
    head: ClassVar[tuple[str, str, str]]
    has_old_norms: ClassVar[bool] = False
    classifier_names: ClassVar[tuple[str | None, str]] = (None, "classifier")
    drops_before_pooler: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": True,
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    tie_word_embeddings: bool = True
    has_head: bool = True
    has_pooler: bool = False

    @property
    def head_dropout(self) -> float:
        """The dropout of a head of labels."""
        given = self.classifier_dropout
        return self.hidden_dropout_prob if given is None else given

    @classmethod
    @final
    def family(cls) -> EncoderFamily:
        """Return the family's functions; imports JAX."""
        from redco_flow.models.transformer.encoder_model import EncoderFamily

        return EncoderFamily(cls)

    @final
    def architectures(self) -> tuple[str, ...]:
        """Return what transformers calls the class, with the head or without."""
        full = self.architecture
        return (full if self.has_head else full.replace("ForMaskedLM", "Model"),)

    @final
    def of_tensors(self, files: TensorFiles) -> Self:
        """Return this config with the head and the pooler whose tensors the checkpoint has.

        Models for embeddings are published without a head, those for masked tokens often without
        a pooler.
        """
        full = self.updated({"has_head": True, "has_pooler": True}).tensor_layouts()

        def has(part: str) -> bool:
            return not files.names.isdisjoint(full[part]["kernel"].names(()))

        return self.updated(
            {"has_head": self.has_head and has("head"), "has_pooler": has("pooler")}
        )

    @final
    def bert_encoder(
        self,
        head_activation: str,
        *,
        position_offset: int = 0,
        padding_token: int | None = None,
    ) -> EncoderConfig:
        """Return the encoder of this shape; see `EncoderConfig` for what differs."""
        stack = _encoder_stack(
            self,
            norm_placement="post",
            num_positions=self.max_position_embeddings,
            position_offset=position_offset,
            has_embedding_norm=True,
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
    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        tables, layer = f"{self.prefix}.embeddings", f"{self.prefix}.encoder.layer.{{layer}}"
        layers = _layer_layouts(self.core.stack, layer, f"{layer}.attention.self.{{part}}")
        layouts: dict[str, Any] = {
            "embedding": table_layout("vocabulary", f"{tables}.word_embeddings.weight"),
            "token_types": table_layout("types", f"{tables}.token_type_embeddings.weight"),
            "encoder": {
                "positions": table_layout("positions", f"{tables}.position_embeddings.weight"),
                "embedding_norm": _old_norm_layouts(f"{tables}.LayerNorm"),
                "layers": {
                    **layers,
                    "attention_norm": _old_norm_layouts(f"{layer}.attention.output.LayerNorm"),
                    "mlp_norm": _old_norm_layouts(f"{layer}.output.LayerNorm"),
                },
            },
        }
        if self.has_pooler:
            pooler = f"{self.prefix}.pooler.dense"
            layouts["pooler"] = linear_layouts(pooler, "model", "inner")
        # As models for embeddings are published: the bare encoder.
        layouts = with_other_prefix(layouts, f"{self.prefix}.", "")
        return {**layouts, "head": self._head_layouts()} if self.has_head else layouts

    def _head_layouts(self) -> dict[str, Any]:
        dense, norm, biases = self.head
        # Files have the one bias, the other or both.
        names = (f"{biases}.bias", f"{biases}.decoder.bias")
        bias = TensorLayout("vocabulary", "vocabulary", names[0], aliases=names[1:])
        old = _old_norm_layouts(norm) if self.has_old_norms else norm_layouts(norm, has_bias=True)
        return {
            **linear_layouts(dense, "model", "inner"),
            "norm": old,
            "vocabulary_bias": bias,
        }


@dataclass(frozen=True)
class BertConfig(BertFamilyConfig):
    """BERT, whose positions are indices."""

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertForMaskedLM"
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        "cls.seq_relationship.*",
        "cls.predictions.decoder.weight",
        "*embeddings.position_ids",
    )
    prefix: ClassVar[str] = "bert"
    head: ClassVar[tuple[str, str, str]] = (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions",
    )
    has_old_norms: ClassVar[bool] = True

    vocab_size: int = 30522
    pad_token_id: int | None = 0

    @property
    def core(self) -> EncoderConfig:
        """The same model as an `EncoderConfig`."""
        return self.bert_encoder(self.hidden_act)


@dataclass(frozen=True)
class RobertaConfig(BertFamilyConfig):
    """RoBERTa: BERT whose positions count what is not padding, from the row after padding's on.

    Its longest text has `max_position_embeddings` - `pad_token_id` - 1 tokens.
    """

    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaForMaskedLM"
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        "lm_head.decoder.weight",
        "*embeddings.position_ids",
    )
    prefix: ClassVar[str] = "roberta"
    head: ClassVar[tuple[str, str, str]] = ("lm_head.dense", "lm_head.layer_norm", "lm_head")
    classifier_names: ClassVar[tuple[str | None, str]] = (
        "classifier.dense",
        "classifier.out_proj",
    )
    drops_before_pooler: ClassVar[bool] = True

    vocab_size: int = 50265
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2

    @property
    def core(self) -> EncoderConfig:
        """The same model as an `EncoderConfig`.

        Raises:
            ValueError: there is no padding token, or no position after its own.
        """
        padding = self.pad_token_id
        if padding is None or padding + 1 >= self.max_position_embeddings:
            raise ValueError(
                f"roberta config: pad_token_id is {padding!r}; positions begin after it, so it "
                f"must be a token below max_position_embeddings, {self.max_position_embeddings}."
            )
        # Its head's activation is gelu whatever its layers' is.
        return self.bert_encoder("gelu", position_offset=padding + 1, padding_token=padding)


@dataclass(frozen=True)
class ViTConfig(ModelConfig):
    """ViT: an encoder of images, which classifies them or turns them into vectors.

    `has_classifier` is false for a model published without one, `num_labels` its classes;
    `has_pooler` is true for one published with the layer that makes an image's vector.
    """

    model_type: ClassVar[str] = "vit"
    architecture: ClassVar[str] = "ViTForImageClassification"
    fixed: ClassVar[Mapping[str, Any]] = {"pooler_act": "tanh"}
    # Of masked image modelling, and the pooler that a model with a classifier does not use.
    ignored_tensors: ClassVar[tuple[str, ...]] = ("*embeddings.mask_token", "*pooler.dense.*")
    module_renamings: ClassVar[Mapping[str, str]] = {
        "encoder.layer.": "layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    qkv_bias: bool = True
    num_labels: int = 2
    has_classifier: bool = True
    has_pooler: bool = False

    @classmethod
    @final
    def family(cls) -> EncoderFamily:
        """Return the family's functions; imports JAX."""
        from redco_flow.models.transformer.encoder_model import EncoderFamily

        return EncoderFamily(cls)

    def architectures(self) -> tuple[str, ...]:
        """Return what transformers calls the class, with the classifier or without."""
        return (self.architecture if self.has_classifier else "ViTModel",)

    def of_tensors(self, files: TensorFiles) -> Self:
        """Return this config with the classifier and the pooler that the checkpoint has."""
        full = self.updated({"has_classifier": True, "has_pooler": True}).tensor_layouts()

        def found(part: str) -> str | None:
            names = full[part]["kernel"].names(())
            return next((name for name in names if name in files.names), None)

        changes: dict[str, Any] = {"has_pooler": found("pooler") is not None}
        kernel = found("classifier")
        changes["has_classifier"] = kernel is not None
        if kernel is not None:
            changes["num_labels"] = files.shape(kernel)[0]
        return self.updated(changes)

    @property
    def core(self) -> ImageEncoderConfig:
        """The same model as an `ImageEncoderConfig`."""
        side = split_evenly("image_size", self.image_size, "patch_size", self.patch_size)
        return ImageEncoderConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            num_channels=self.num_channels,
            stack=_encoder_stack(
                self,
                has_qkv_bias=self.qkv_bias,
                num_positions=side**2 + 1,
                has_final_norm=True,
            ),
            num_classes=self.num_labels if self.has_classifier else 0,
            has_pooler=self.has_pooler,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of.

        Names begin with `vit.` where there is a classifier; either is read.
        """
        prefix, other = ("vit.", "") if self.has_classifier else ("", "vit.")
        layouts = with_other_prefix(self._layouts(prefix), prefix, other)
        if self.has_classifier:
            layouts["classifier"] = linear_layouts("classifier", "model", "classes")
        return layouts

    def _layouts(self, prefix: str) -> dict[str, Any]:
        tables, layer = f"{prefix}embeddings", f"{prefix}encoder.layer.{{layer}}"
        layers = _layer_layouts(self.core.stack, layer, f"{layer}.attention.attention.{{part}}")
        kernel = ("rows columns channels model", "model channels rows columns")
        patches = f"{tables}.patch_embeddings.projection"
        positions = f"{tables}.position_embeddings"
        layouts: dict[str, Any] = {
            "patches": {
                "kernel": TensorLayout(*kernel, f"{patches}.weight"),
                "bias": TensorLayout("model", "model", f"{patches}.bias"),
            },
            "class_token": TensorLayout("model", "() () model", f"{tables}.cls_token"),
            "encoder": {
                "positions": TensorLayout("positions model", "() positions model", positions),
                "layers": {
                    **layers,
                    "attention_norm": norm_layouts(f"{layer}.layernorm_before", has_bias=True),
                    "mlp_norm": norm_layouts(f"{layer}.layernorm_after", has_bias=True),
                },
                "final_norm": norm_layouts(f"{prefix}layernorm", has_bias=True),
            },
        }
        if self.has_pooler:
            layouts["pooler"] = linear_layouts(f"{prefix}pooler.dense", "model", "inner")
        return layouts


def _encoder_stack(
    config: BertFamilyConfig | ViTConfig, *, has_qkv_bias: bool = True, **differing: Any
) -> StackConfig:
    """Return the layers of these keys, which encoders of texts and of images share."""
    return StackConfig(
        width=config.hidden_size,
        num_layers=config.num_hidden_layers,
        attention=attention_of_heads(
            config,
            "hidden_size",
            "num_attention_heads",
            is_causal=False,
            has_input_bias=has_qkv_bias,
            has_output_bias=True,
            dropout=config.attention_probs_dropout_prob,
        ),
        mlp=MlpConfig(config.intermediate_size, activation_name(config.hidden_act), has_bias=True),
        norm=NormConfig("layer", config.layer_norm_eps),
        embedding_dropout=config.hidden_dropout_prob,
        residual_dropout=config.hidden_dropout_prob,
        init_stddev=config.initializer_range,
        **config.how_computed,
        **differing,
    )


def _layer_layouts(stack: StackConfig, layer: str, inputs: str) -> dict[str, Any]:
    """Return the layouts of a layer's attention, whose inputs are named, and feed-forward."""
    assert isinstance(stack.mlp, MlpConfig)
    labels = ("query", "key", "value")
    output = f"{layer}.attention.output.dense"
    dense = (f"{layer}.intermediate.dense", f"{layer}.output.dense")
    return {
        "attention": attention_layouts(stack.attention, inputs, output, labels),
        "mlp": mlp_layouts(stack.mlp, *dense),
    }


def _old_norm_layouts(name: str) -> dict[str, Any]:
    """Return the layouts of a `Norm`; the first ones published call it gamma and beta."""
    layouts = norm_layouts(name, has_bias=True)
    old_names = {"scale": f"{name}.gamma", "bias": f"{name}.beta"}
    return {
        part: dataclasses.replace(layout, aliases=(old_names[part],))
        for part, layout in layouts.items()
    }
