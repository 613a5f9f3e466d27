"""ViT: an encoder of images, which classifies them or turns them into vectors.

The config under Hugging Face's names and the tensors of transformers' ViTForImageClassification,
or of the bare ViTModel, with its pooler where there is one. What it computes is
`image_encoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.config import (
    AttentionConfig,
    ImageEncoderConfig,
    MlpConfig,
    NormConfig,
    StackConfig,
    activation_name,
)
from redco_flow.models.families.family_config import ModelConfig, split_evenly
from redco_flow.models.hub.layouts import (
    TensorLayout,
    attention_layouts,
    mlp_layouts,
    norm_layouts,
    with_other_prefix,
)

# Of masked image modelling, and what a model that classifies does without.
IGNORED_TENSORS = ("*embeddings.mask_token", "*pooler.dense.*")


@dataclass(frozen=True)
class ViTConfig(ModelConfig):
    """A ViT's shape and constants.

    `has_classifier` is false for a model published without one, `num_labels` its classes;
    `has_pooler` is true for one published with the layer that makes an image's vector.
    """

    model_type: ClassVar[str] = "vit"
    architecture: ClassVar[str] = "ViTForImageClassification"
    fixed: ClassVar[Mapping[str, Any]] = {"pooler_act": "tanh"}
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

    def derived(self) -> dict[str, Any]:
        """Return nothing: every field stands for itself."""
        return {}

    def architectures(self) -> tuple[str, ...]:
        """Return what transformers calls the class, with the classifier or without."""
        return (self.architecture if self.has_classifier else "ViTModel",)

    @property
    def core(self) -> ImageEncoderConfig:
        """The same model in the words that all encoders of images share."""
        num_patches = (
            split_evenly("image_size", self.image_size, "patch_size", self.patch_size) ** 2
        )
        return ImageEncoderConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            num_channels=self.num_channels,
            stack=self._stack(num_positions=num_patches + 1),
            num_classes=self.num_labels if self.has_classifier else 0,
            has_pooler=self.has_pooler,
        )

    def _stack(self, num_positions: int) -> StackConfig:
        num_heads = self.num_attention_heads
        head_dim = split_evenly("hidden_size", self.hidden_size, "num_attention_heads", num_heads)
        return StackConfig(
            width=self.hidden_size,
            num_layers=self.num_hidden_layers,
            attention=AttentionConfig(
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                is_causal=False,
                has_input_bias=self.qkv_bias,
                has_output_bias=True,
                dropout=self.attention_probs_dropout_prob,
            ),
            mlp=MlpConfig(self.intermediate_size, activation_name(self.hidden_act), has_bias=True),
            norm=NormConfig("layer", self.layer_norm_eps),
            num_positions=num_positions,
            has_final_norm=True,
            embedding_dropout=self.hidden_dropout_prob,
            residual_dropout=self.hidden_dropout_prob,
            init_stddev=self.initializer_range,
            dtype=self.dtype,
            remat=self.remat,
            attention_kernel=self.attention,
            activations=self.activations,
            num_mlp_chunks=self.num_mlp_chunks,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of.

        Names begin with `vit.` where there is a classifier; either is read.
        """
        prefix, other = ("vit.", "") if self.has_classifier else ("", "vit.")
        layouts = with_other_prefix(self._layouts(prefix), prefix, other)
        if self.has_classifier:
            layouts["classifier"] = _linear_layouts("classifier", "classes")
        return layouts

    def _layouts(self, prefix: str) -> dict[str, Any]:
        stack, tables = self.core.stack, f"{prefix}embeddings"
        layer = f"{prefix}encoder.layer.{{layer}}"
        assert isinstance(stack.mlp, MlpConfig)
        projection = f"{tables}.patch_embeddings.projection"
        layouts: dict[str, Any] = {
            "patches": {
                "kernel": TensorLayout(
                    "rows columns channels model",
                    "model channels rows columns",
                    f"{projection}.weight",
                ),
                "bias": TensorLayout("model", "model", f"{projection}.bias"),
            },
            "class_token": TensorLayout("model", "() () model", f"{tables}.cls_token"),
            "encoder": {
                "positions": TensorLayout(
                    "positions model", "() positions model", f"{tables}.position_embeddings"
                ),
                "layers": {
                    "attention_norm": norm_layouts(f"{layer}.layernorm_before", has_bias=True),
                    "attention": attention_layouts(
                        stack.attention,
                        f"{layer}.attention.attention.{{part}}",
                        f"{layer}.attention.output.dense",
                        ("query", "key", "value"),
                    ),
                    "mlp_norm": norm_layouts(f"{layer}.layernorm_after", has_bias=True),
                    "mlp": mlp_layouts(
                        stack.mlp, f"{layer}.intermediate.dense", f"{layer}.output.dense"
                    ),
                },
                "final_norm": norm_layouts(f"{prefix}layernorm", has_bias=True),
            },
        }
        if self.has_pooler:
            layouts["pooler"] = _linear_layouts(f"{prefix}pooler.dense", "inner")
        return layouts


def _linear_layouts(name: str, outputs: str) -> dict[str, Any]:
    return {
        "kernel": TensorLayout(f"model {outputs}", f"{outputs} model", f"{name}.weight"),
        "bias": TensorLayout(outputs, outputs, f"{name}.bias"),
    }


Config = ViTConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import image_encoder_model

    return getattr(image_encoder_model, name)
