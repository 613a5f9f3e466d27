"""Encode Python values as JSON between the process that tests and the one that runs an answer.

Numbers, texts and containers arrive as plain copies: subclasses lose what their classes define,
`__eq__` included. Any other object stays in its process and is sent as a number. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_SMALL_INTEGER = 1 << 64  # longer ones are sent in base 16, which has no limit of digits


def encode(value: Any, other: Callable[[Any], int]) -> Any:
    """Return what JSON can carry.

    Args:
        other: gives the number of an object that is not plain data, or raises TypeError.
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _SMALL_INTEGER else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(k, other), encode(v, other)] for k, v in value.items()]}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):  # type: ignore[arg-type]
            return {name: [encode(one, other) for one in value]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), other)
    return {"object": other(value)}


def decode(value: Any, other: Callable[[int], Any]) -> Any:
    """Return the value that was encoded.

    Args:
        other: gives the object of a number.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: `encode` does not write this.
    """
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without its kind")
        return value
    ((kind, content),) = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(k, other): decode(v, other) for k, v in content}
    if kind == "object":
        return other(int(content))
    return _CONTAINERS[kind]([decode(one, other) for one in content])
