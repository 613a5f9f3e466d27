"""What an encoder-decoder of two stacks and one embedding computes.

The one model of `encoder_decoder_model.py` is driven by it. Imports nothing heavy. Refuses to
know names in files.
"""

from __future__ import annotations

from dataclasses import dataclass

from redco_flow.models.stack_config import StackConfig


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Shape and constants of an encoder-decoder whose head is the embedding.

    Attributes:
        embedding_scale: what embeddings are multiplied by.
    """

    vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    embedding_scale: float = 1.0
