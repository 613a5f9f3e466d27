"""What a layer is given besides its input: over whole sequences, or for one token.

Dims in this file: B batch, T sequence, S source, N beams, M cache slots, D model,
H heads, G key-value groups, K head dim.
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
        biases: what rows hide and positions add, each broadcasting to (B, H, T, T).
        rotation: rotary angles of the tokens.
        keys: raw dropout keys (B, 2).
        encoded: another sequence (B, S, D), for cross-attention.
        encoded_bias: what hides its padding, (B, 1, 1, S).
        order: in which the tokens lie; biases are told in the text's.
    """

    biases: Biases
    rotation: Rotation | None
    keys: jax.Array | None
    encoded: jax.Array | None = None
    encoded_bias: Bias | None = None
    order: SequenceOrder = SequenceOrder()


class StepShared(NamedTuple):
    """What all layers share while decoding a token.

    Attributes:
        slot: of the first beam's token in the cache.
        is_visible: (B, N, M) whether a slot may be attended to.
        back: (B, M) how many positions back it stands; needed for windows only.
        rotation: the token's rotary angles.
        encoded_bias: what hides another sequence's padding, (B, 1, 1, S).
        biases: what positions add, each broadcasting to (B, H, N, M).
    """

    slot: jax.Array
    is_visible: jax.Array
    back: jax.Array | None = None
    rotation: Rotation | None = None
    encoded_bias: jax.Array | None = None
    biases: tuple[jax.Array, ...] = ()


class StepLayer(NamedTuple):
    """What one layer has of its own while decoding a token.

    Attributes:
        window: how many tokens back it looks, where layers differ.
        source: keys and values (B, G, S, K) of another sequence.
    """

    window: jax.Array | None = None
    source: KeysValues | None = None
