"""Conditions of a promotion on scores, and their syntax."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from redco_flow.errors import UsageError

_CONDITION = re.compile(r"\s*(?P<key>[^\s<>=]+)\s*(?P<sign>[<>])\s*(?P<than>[^\s<>=]+)\s*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Condition:
    """`rougeL > production`, `perplexity < @other/production`, `exact_match > 80`.

    Args:
        key: the score.
        sign: `>` where the metric's larger scores are better, else `<`.
        than: an alias, or a number.
    """

    key: str
    sign: Literal[">", "<"]
    than: str | float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            UsageError: it is none; says what one looks like.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{text!r} is no condition: write METRIC > ALIAS or METRIC < ALIAS, with a number "
                "in the alias's place if you like, such as 'rougeL > production'."
            )
        than = found["than"]
        value = float(than) if _NUMBER.fullmatch(than) else than
        return cls(found["key"], ">" if found["sign"] == ">" else "<", value)

    def __str__(self) -> str:
        than = f"{self.than:g}" if isinstance(self.than, float) else self.than
        return f"{self.key} {self.sign} {than}"


@dataclass(frozen=True)
class Rule:
    """The conditions of a promotion.

    Args:
        conditions: all of them have to hold.
        min_gain: how much better each score has to be, in the metric's own unit.
        confidence: of the bootstrap's interval of a gain over another checkpoint, which must lie
            above 0.
    """

    conditions: tuple[Condition, ...] = ()
    min_gain: float = 0.0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.min_gain < 0:
            raise UsageError(f"min-gain is {self.min_gain:g}; a gain is 0 or more.")
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence:g}; it is between 0 and 1.")
