"""VisionEncoderDecoder: a ViT that encodes an image, and a GPT-2 that says what it shows.

The config under Hugging Face's names, with one of each model in it, and the tensors of
transformers' VisionEncoderDecoderModel. What it computes is in `encoder_decoder_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

from redco_flow.models.config import EncoderDecoderConfig
from redco_flow.models.families.encoders import ViTConfig
from redco_flow.models.families.family_config import ModelConfig
from redco_flow.models.families.gpt import GPT2Config
from redco_flow.models.hub.layouts import linear_layouts, with_prefix

if TYPE_CHECKING:
    from redco_flow.models.transformer.encoder_decoder_model import EncoderDecoderFamily


@dataclass(frozen=True)
class VisionEncoderDecoderConfig(ModelConfig):
    """The shapes and constants of both; how they are computed says this one."""

    model_type: ClassVar[str] = "vision-encoder-decoder"
    architecture: ClassVar[str] = "VisionEncoderDecoderModel"
    fixed: ClassVar[Mapping[str, Any]] = {"is_encoder_decoder": True}
    # The image's vector, which is not read, and the tied head, published beside the embedding.
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        "encoder.pooler.dense.*",
        "decoder.lm_head.weight",
    )
    module_renamings: ClassVar[Mapping[str, str]] = ViTConfig.module_renamings
    parts: ClassVar[Mapping[str, type[ModelConfig]]] = {"encoder": ViTConfig, "decoder": GPT2Config}

    encoder: ViTConfig = field(default_factory=ViTConfig)
    decoder: GPT2Config = field(default_factory=lambda: GPT2Config(add_cross_attention=True))
    decoder_start_token_id: int = 50256
    eos_token_id: int | tuple[int, ...] = 50256
    pad_token_id: int = 50256

    @classmethod
    @final
    def family(cls) -> EncoderDecoderFamily:
        """Return the family's functions; imports JAX."""
        from redco_flow.models.transformer.encoder_decoder_model import EncoderDecoderFamily

        return EncoderDecoderFamily(cls)

    @property
    def vocab_size(self) -> int:
        """The decoder's."""
        return self.decoder.vocab_size

    @property
    def core(self) -> EncoderDecoderConfig:
        """The same model as an `EncoderDecoderConfig`."""
        how: dict[str, Any] = {
            "dtype": self.dtype,
            "remat": self.remat,
            "attention": self.attention,
            "activations": self.activations,
            "num_mlp_chunks": self.num_mlp_chunks,
        }
        encoder = replace(self.encoder, has_classifier=False, has_pooler=False, **how)
        decoder = replace(self.decoder, add_cross_attention=True, **how)
        return EncoderDecoderConfig(
            vocab_size=self.decoder.vocab_size,
            encoder=encoder.core,
            decoder=decoder.core,
            embedding_stddev=self.decoder.initializer_range,
            tie_word_embeddings=self.decoder.tie_word_embeddings,
        )

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        encoder = replace(self.encoder, has_classifier=False, has_pooler=False).tensor_layouts()
        decoder = with_prefix(
            replace(self.decoder, add_cross_attention=True).tensor_layouts(), "decoder."
        )
        layouts: dict[str, Any] = {
            "embedding": decoder.pop("embedding"),
            "encoder": with_prefix(encoder, "encoder."),
        }
        if not self.decoder.tie_word_embeddings:
            layouts["lm_head"] = decoder.pop("lm_head")
        if self.encoder.hidden_size != self.decoder.n_embd:
            layouts["projection"] = linear_layouts("enc_to_dec_proj", "inner", "model")
        return {**layouts, "decoder": decoder}
