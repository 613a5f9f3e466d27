"""RoBERTa: BERT whose positions count what is not padding, from the row after padding's on.

The config under Hugging Face's names and the tensors of transformers' RobertaForMaskedLM, or of the
bare RobertaModel, with its pooler where there is one. What it computes is `encoder_model.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redco_flow.models.families.bert_family import BertFamilyConfig, EncoderConfig, head_layouts
from redco_flow.models.hub.layouts import norm_layouts

_HEAD = "lm_head"
IGNORED_TENSORS = (
    f"{_HEAD}.decoder.weight",
    "*embeddings.position_ids",
)


@dataclass(frozen=True)
class RobertaConfig(BertFamilyConfig):
    """A RoBERTa's shape and constants.

    Its longest text has `max_position_embeddings` - `pad_token_id` - 1 tokens.
    """

    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaForMaskedLM"
    classifier_names: ClassVar[tuple[str | None, str]] = (
        "classifier.dense",
        "classifier.out_proj",
    )
    drops_before_pooler: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": True,
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }

    vocab_size: int = 50265
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2

    @property
    def core(self) -> EncoderConfig:
        """The same model in the words that all encoders share.

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

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        head = head_layouts(
            f"{_HEAD}.dense",
            norm_layouts(f"{_HEAD}.layer_norm", has_bias=True),
            f"{_HEAD}.bias",
            f"{_HEAD}.decoder.bias",
        )
        return self.bert_layouts("roberta", head)


Config = RobertaConfig


def __getattr__(name: str) -> Any:
    """Take the functions that all families of this kind share from their model, imported now."""
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(name)
    from redco_flow.models import encoder_model

    return getattr(encoder_model, name)
