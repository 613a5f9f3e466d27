"""What determines a stage's result, its digest, and how two of them first differ.

Ingredients say nothing about where a stage runs. Pure: digests come in, a digest goes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from redco_flow.records import digest_json

# {"kind": str, "settings": {…}, "inputs": {slot: [artifact id]}, "data": {name: sha256 or
#  identity}, "code": {module: sha256}}
Ingredients = Mapping[str, Any]

ABSENT: Final = "(absent)"
_ORDER = ("kind", "settings", "data", "inputs", "code")  # what a person would suspect first


@dataclass(frozen=True)
class Difference:
    """One ingredient that differs.

    Args:
        key: its dotted path, such as `settings.learning_rate` or `code.my_package.my_recipe`.
        old: its value before, or ABSENT.
        new: its value now, or ABSENT.
    """

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} → {_shown(self.new)}"


def fingerprint(ingredients: Ingredients) -> str:
    """Return the digest of the ingredients, 64 hex digits.

    Raises:
        ValueError: a NaN or infinite setting.
        TypeError: something that is not JSON.
    """
    return digest_json(ingredients)


def first_difference(old: Ingredients, new: Ingredients) -> Difference | None:
    """Return the first ingredient that differs; None for equal fingerprints.

    Kind and settings come first, then data, inputs, code: a changed setting explains a changed
    input, not the reverse.
    """
    return next(differences(old, new), None)


def differences(old: Ingredients, new: Ingredients) -> Iterator[Difference]:
    """Yield every ingredient that differs, in the order of `first_difference`."""
    others = sorted((set(old) | set(new)) - set(_ORDER))
    for section in (*_ORDER, *others):
        yield from _compare(section, old.get(section, ABSENT), new.get(section, ABSENT))


def _compare(key: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in (*new, *(name for name in old if name not in new)):
            yield from _compare(f"{key}.{name}", old.get(name, ABSENT), new.get(name, ABSENT))
    elif digest_json(old) != digest_json(new):
        # By digest, as fingerprints are: 1 and 1.0 and true are equal to Python only.
        yield Difference(key, old, new)


def _shown(value: Any) -> str:
    """A value for people; a digest by its first 12 digits."""
    if isinstance(value, str):
        is_digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
        return value[:12] if is_digest else value
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return str(value)
