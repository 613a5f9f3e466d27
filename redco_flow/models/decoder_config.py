"""What a decoder-only model computes, whatever its family calls it.

Each family turns its `config.json` into this; the one model of `decoder_model.py` is driven by it.
Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from redco_flow.models.config import StackConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(StackConfig):
    """Shape and constants of a decoder-only transformer: its layers, and what is around them.

    Attributes:
        embedding_width: the table's, where it is not the model's; projected in and out.
        embedding_scale: what embeddings are multiplied by.
        logit_cap: logits are squeezed into (-cap, cap) by tanh.
    """

    vocab_size: int
    has_final_norm: bool = True
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = True
    has_head_bias: bool = False
    logit_cap: float | None = None

    @property
    def token_width(self) -> int:
        """Width of the embedding table."""
        return self.embedding_width or self.width
