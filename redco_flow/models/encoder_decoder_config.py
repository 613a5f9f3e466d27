"""What an encoder-decoder of two stacks and one embedding computes.

The one model of `encoder_decoder_model.py` is driven by it. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from redco_flow.models.stack_config import StackConfig


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Shape and constants of an encoder-decoder.

    Attributes:
        embedding_stddev: of the embedding, when it is drawn.
        embedding_scale: what embeddings are multiplied by.
        tie_word_embeddings: whether the head is the embedding.
        head_scale: what the head's input is multiplied by.
        has_logits_bias: whether a constant of the checkpoint is added to the logits.
    """

    vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    embedding_stddev: float
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = True
    head_scale: float = 1.0
    has_logits_bias: bool = False
