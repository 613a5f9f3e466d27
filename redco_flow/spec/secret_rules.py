"""Find what looks like a secret by rules: a keyword, and a regular expression for the text near it.

The rules are Betterleaks' (`secret_rules.json`, written by docs/secret_rules.py) and a few of our
own. One automaton looks for all keywords at once; a rule is compiled when its keyword is first met.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[int, int]

_RULES = Path(__file__).with_name("secret_rules.json")
# How far a rule looks along a line that is longer: from its keyword back, and on.
_BYTES_BACK = 512
_BYTES_ON = 1 << 12
_LINE = re.compile(rb"[^\r\n]*")


@dataclass(frozen=True)
class SecretRule:
    """One kind of secret.

    Args:
        regex: over the bytes of one line; its `group`, or else its first group that is not
            empty, is the secret.
        keywords: in lower case; each match contains one of them.
        entropy: bits a byte; a match with no more is a word or a placeholder.
        is_at_keyword: whether each match begins with a keyword, so that it is tried only there.
    """

    regex: str
    keywords: tuple[str, ...]
    group: int = 0
    entropy: float = 0.0
    is_at_keyword: bool = False

    @functools.cached_property
    def pattern(self) -> re.Pattern[bytes]:
        """The compiled regex; most rules never need theirs."""
        return re.compile(self.regex.encode())

    def find_at(self, data: bytes, at: int, end: int) -> Iterator[Span]:
        """Yield where the secret of a keyword at `at` stands, whose line ends at `end`."""
        match = self.pattern.match(data, at, end)
        if match is not None:
            yield from self._secret(match)

    def find_in(self, data: bytes, start: int, end: int) -> Iterator[Span]:
        """Yield the spans of secrets in a line, which `start` and `end` bound."""
        for match in self.pattern.finditer(data, start, end):
            yield from self._secret(match)

    def _secret(self, match: re.Match[bytes]) -> Iterator[Span]:
        group = self.group or next((n for n, text in enumerate(match.groups(), 1) if text), 0)
        start, end = match.span(group)
        if start < end and (not self.entropy or _entropy(match[group]) > self.entropy):
            yield start, end


@dataclass(frozen=True)
class RuleSet:
    """Rules, and the automaton that finds their keywords."""

    rules_of: tuple[tuple[SecretRule, ...], ...]
    automaton: Any

    @classmethod
    def of(cls, rules: Iterable[SecretRule]) -> RuleSet:
        """Index the rules by their keywords."""
        from ahocorasick_rs import BytesAhoCorasick  # not before there is a text to look at

        by_keyword: dict[str, list[SecretRule]] = {}
        for rule in rules:
            for keyword in rule.keywords:
                by_keyword.setdefault(keyword, []).append(rule)
        automaton = BytesAhoCorasick([keyword.encode() for keyword in by_keyword])
        return cls(tuple(map(tuple, by_keyword.values())), automaton)

    def first_keyword(self, data: bytes) -> int:
        """Return where the first keyword begins; the data's length where none stands."""
        found = self.automaton.find_matches_as_indexes(data.lower(), overlapping=True)
        return min((at for _, at, _ in found), default=len(data))

    def find(self, data: bytes) -> list[Span]:
        """Return the spans of secrets in the data; they may overlap."""
        spans: list[Span] = []
        searched_to: dict[int, int] = {}  # rule by its identity, for lines with many keywords
        for number, at, _ in self.automaton.find_matches_as_indexes(data.lower(), overlapping=True):
            end = _end_of_line(data, at)
            for rule in self.rules_of[number]:
                if rule.is_at_keyword:
                    spans += rule.find_at(data, at, end)
                elif searched_to.get(id(rule), 0) <= at:
                    # Of a line that is longer, a secret may stand across the end.
                    searched_to[id(rule)] = end if end < at + _BYTES_ON else at + _BYTES_ON // 2
                    spans += rule.find_in(data, _start_of_line(data, at), end)
        return spans


def betterleaks_rules() -> Iterator[SecretRule]:
    """Yield the rules of the data file."""
    for entry in json.loads(_RULES.read_bytes())["rules"]:
        yield SecretRule(**(entry | {"keywords": tuple(entry["keywords"])}))


def _start_of_line(data: bytes, at: int) -> int:
    first = max(0, at - _BYTES_BACK)
    return max(data.rfind(b"\n", first, at) + 1, data.rfind(b"\r", first, at) + 1, first)


def _end_of_line(data: bytes, at: int) -> int:
    line = _LINE.match(data, at, at + _BYTES_ON)
    return line.end() if line else at


def _entropy(text: bytes) -> float:
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)
