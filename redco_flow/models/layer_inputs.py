"""What a layer is given besides its input: over whole sequences, or for one token.

Refuses to know what it does with it.
Dims in this file: B batch, T sequence, S source or prompt, D model, G key-value groups, K head
dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from redco_flow.models.balanced_order import SequenceOrder
from redco_flow.models.blockwise_bias import Bias, Biases
from redco_flow.models.rotary import Rotation

KeysValues = tuple[jax.Array, jax.Array]


class WholeShared(NamedTuple):
    """What all layers share over whole sequences.

    Attributes:
        biases: what rows hide, each broadcasting to (B, 1, T, T).
        turn: rotary angles of the tokens.
        keys: raw dropout keys (B, 2).
        encoded: another sequence (B, S, D), for cross-attention.
        encoded_bias: what hides its padding, (B, 1, 1, S).
        order: in which the tokens lie; biases are told in the text's.
    """

    biases: Biases
    turn: Rotation | None
    keys: jax.Array | None
    encoded: jax.Array | None = None
    encoded_bias: Bias | None = None
    order: SequenceOrder = SequenceOrder()


class StepShared(NamedTuple):
    """What all layers share while decoding a token.

    Attributes:
        step: number of the token, from 0.
        turn: its rotary angles.
        is_visible: (B, S) whether a token of the prompt may be attended to.
        back: (B, S) how many positions back it stands.
        encoded_bias: what hides another sequence's padding, (B, 1, 1, S).
    """

    step: jax.Array
    turn: Rotation | None = None
    is_visible: jax.Array | None = None
    back: jax.Array | None = None
    encoded_bias: Bias | None = None


class StepLayer(NamedTuple):
    """What one layer has of its own while decoding a token.

    Attributes:
        layer: its number.
        window: how many tokens back it looks, where layers differ.
        prompt, source: keys and values (B, S, G, K) of the prompt and of another sequence.
    """

    layer: jax.Array
    window: jax.Array | None = None
    prompt: KeysValues | None = None
    source: KeysValues | None = None


class Source(NamedTuple):
    """Another sequence as cross-attention reads it: keys, values (B, S, G, K), its mask's bias."""

    keys: jax.Array
    values: jax.Array
    bias: Bias
