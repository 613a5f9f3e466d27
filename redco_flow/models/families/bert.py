"""BERT: an encoder that predicts masked tokens, or turns texts into vectors.

The config under Hugging Face's names and the tensors of transformers' BertForMaskedLM, or of the
bare BertModel, with its pooler where there is one; the head for next sentences is not read. What it
computes is `encoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.families.bert_family import (
    BertFamilyConfig,
    EncoderConfig,
    head_layouts,
    old_norm_layouts,
)

_HEAD = "cls.predictions"
IGNORED_TENSORS = (
    "cls.seq_relationship.*",
    f"{_HEAD}.decoder.weight",
    "*embeddings.position_ids",
)


@dataclass(frozen=True)
class BertConfig(BertFamilyConfig):
    """A BERT's shape and constants."""

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertForMaskedLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": True,
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }

    vocab_size: int = 30522
    pad_token_id: int | None = 0

    @property
    def core(self) -> EncoderConfig:
        """The same model in the words that all encoders share."""
        return self.bert_encoder(self.hidden_act)

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        head = head_layouts(
            f"{_HEAD}.transform.dense",
            old_norm_layouts(f"{_HEAD}.transform.LayerNorm"),
            f"{_HEAD}.bias",
            f"{_HEAD}.decoder.bias",
        )
        return self.bert_layouts("bert", head)


Config = BertConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import encoder_model

    return getattr(encoder_model, name)
