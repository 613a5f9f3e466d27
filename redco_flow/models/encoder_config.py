"""What an encoder with a head for masked tokens computes, whatever its family calls it.

The one model of `encoder_model.py` is driven by it. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from redco_flow.models.stack_config import StackConfig


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
