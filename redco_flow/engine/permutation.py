"""Shuffles that are computed place by place: no table, no state, the same on every machine.

A permutation is named by (seed, epoch, stream).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 8


def permuted(
    places: NDArray[np.int64], count: int, seed: int, epoch: int, *, stream: str = ""
) -> NDArray[np.int64]:
    """Return what stands at some places of a permutation of 0 … count - 1.

    A keyed Feistel network over the next even number of bits, walked until it falls inside the
    range: its time depends on `places` only, there is no table of `count` entries, and it is the
    same on every NumPy version (whose own shuffles are only promised within one).

    Args:
        stream: tells the permutations of one seed and epoch apart.
    """
    # At least 3: over 16 values the network prefers some orders of 4 rows by several per cent.
    num_half_bits = max(3, (int(count - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch, stream)
    found = _feistel(places.astype(np.uint64), num_half_bits, keys)
    outside = np.flatnonzero(found >= count)
    while outside.size:
        found[outside] = _feistel(found[outside], num_half_bits, keys)
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def _round_keys(seed: int, epoch: int, stream: str) -> NDArray[np.uint64]:
    name = f"redco-flow epoch order {seed} {epoch}{' ' if stream else ''}{stream}"
    digest = hashlib.sha512(name.encode()).digest()
    return np.frombuffer(digest, dtype="<u8")[:_NUM_ROUNDS].astype(np.uint64)


def _feistel(
    values: NDArray[np.uint64], num_half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute the numbers below 4**num_half_bits."""
    shift, mask = np.uint64(num_half_bits), np.uint64((1 << num_half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finaliser: every input bit changes every output bit with probability 1/2."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
