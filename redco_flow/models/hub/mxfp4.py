"""MXFP4: numbers of four bits in blocks of 32 that share a power of two, as gpt-oss is published.

Dims in this file: … leading dims, R rows, C columns.
Source: Open Compute Project, Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
# Sign, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
_EXPONENT_BIAS = 127


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of packed numbers, float32 (…, C); bfloat16 holds them exactly too.

    Args:
        blocks: uint8 (…, C / 32, 16), of each byte the low four bits first.
        scales: uint8 (…, C / 32), powers of two plus 127.
    """
    numbers = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)
    values = _VALUES[numbers].reshape(*blocks.shape[:-1], BLOCK)
    scaled = np.ldexp(values, scales.astype(np.int32)[..., None] - _EXPONENT_BIAS)
    return scaled.reshape(*blocks.shape[:-2], -1)
