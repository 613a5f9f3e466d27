"""Find secrets by their looks and by their names, so that they are never stored or shown.

Text in, text out: reads no environment. Light, for supervisors mask logs with it.
A secret is given by the name of an environment variable (`token_env: HF_TOKEN`), never by value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redco_flow.spec.secret_looks import NAMED_VALUES, OWN_RULES
from redco_flow.spec.secret_names import looks_secret_name
from redco_flow.spec.secret_rules import RuleSet, Span, betterleaks_rules

__all__ = [
    "PrivateKeys",
    "hide_secrets",
    "looks_secret_name",
    "looks_secret_value",
    "rule_set",
    "secret_values",
    "without",
]

_SHORTEST_SECRET = 8
_HIDDEN = b"<hidden>"

_KEY_BEGINS = re.compile(
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\bPrivate-Lines: [0-9]+"
)
_KEY_WORDS = (b"PRIVATE KEY", b"Private-Lines")  # looked for first: that is fast
_MAY_BEGIN = re.compile(rb"-----B|Private-L")
_KEY_ENDS = re.compile(rb"-----END|\bPrivate-MAC:")
_KEY_HEADER = re.compile(rb"[\s>+|'\"#-]*(?:Proc-Type|DEK-Info|Version|Comment|Hash): ")
_KEY_TEXT = re.compile(rb"(?:^[\s>+|'\"#-]*|[ \t:])([A-Za-z0-9+/=]+)(?:\\[nr])*['\",;\\ \t]*$")
_FULL_LINE = 40  # shorter ones stand at a key's end
_MOST_SHORT_LINES = 2
_MOST_LINES = 1000


@functools.cache
def rule_set() -> RuleSet:
    """Return all rules; made when first asked for."""
    return RuleSet.of([*OWN_RULES, *NAMED_VALUES, *betterleaks_rules()])


@dataclass
class PrivateKeys:
    """Find private keys of many lines, line by line: each key from its header to its end."""

    _lines_left: int = 0
    _short_lines: int = 0
    _has_prefixes: bool = False  # a logger's, before each line of the key

    @property
    def is_inside(self) -> bool:
        """Whether the next line may belong to a key."""
        return self._lines_left > 0

    def may_begin_at(self, line: bytes) -> int:
        """Return from where on a line that has not ended may be a key's; its length if nowhere."""
        if self.is_inside:
            return 0
        begins = _MAY_BEGIN.search(line)
        return begins.start() if begins else len(line)

    def find(self, data: bytes) -> list[Span]:
        """Return where keys stand in the next lines."""
        spans: list[Span] = []
        at = 0
        if not self._lines_left and not any(word in data for word in _KEY_WORDS):
            return spans
        while at < len(data):
            if not self._lines_left:
                begins = _KEY_BEGINS.search(data, at)
                if begins is None:
                    break
                at = begins.start()
                self._lines_left, self._short_lines = _MOST_LINES, 0
                self._has_prefixes = False
                end, inside = _end_of_line(data, at), begins.end()
            else:
                end, inside = _end_of_line(data, at), at
            ends = _KEY_ENDS.search(data, inside, end)
            if ends is not None:
                spans.append((at, ends.start()))
                self._lines_left, at = 0, ends.end()
                continue
            span = (at, end) if inside > at else self._inside(data, at, end)
            if span is None:
                self._lines_left = 0
                continue
            self._lines_left -= 1
            spans.append(span)
            at = end + 1
        return [(start, end) for start, end in spans if start < end]

    def _inside(self, data: bytes, start: int, end: int) -> Span | None:
        """Return what of a line is the key's; None when the line is of something else."""
        line = data[start:end]
        if not line.strip(b" \t+>|") or _KEY_HEADER.match(line):
            return start, start
        text = _KEY_TEXT.search(line)
        if text is None:
            return None
        if len(text[1]) >= _FULL_LINE:
            self._has_prefixes = text.start() > 0
        else:
            self._short_lines += 1
            has_place = text.start() == 0 or self._has_prefixes
            if self._short_lines > _MOST_SHORT_LINES or not has_place:
                return None
        return start + text.start(1), start + text.end(1)


def without(data: bytes, spans: Iterable[Span], placeholder: bytes) -> bytes:
    """Return the data with each span replaced; spans may overlap."""
    shown: list[bytes] = []
    covered_to = 0
    for start, end in sorted(spans):
        if start >= covered_to:
            shown += data[covered_to:start], placeholder
        covered_to = max(covered_to, end)
    return b"".join((*shown, data[covered_to:]))


def looks_secret_value(text: str) -> bool:
    """Tell whether a text contains what looks like a token, a private key or a URL's password."""
    return bool(_spans(text.encode("utf-8", "surrogatepass")))


def hide_secrets(text: str) -> str:
    """Return the text with everything that looks like a secret replaced."""
    data = text.encode("utf-8", "surrogatepass")
    spans = _spans(data)
    return without(data, spans, _HIDDEN).decode("utf-8", "surrogatepass") if spans else text


def _spans(data: bytes) -> list[Span]:
    return PrivateKeys().find(data) + rule_set().find(data)


def _end_of_line(data: bytes, at: int) -> int:
    ends = (data.find(b"\n", at), data.find(b"\r", at))
    return min((end for end in ends if end >= 0), default=len(data))


def secret_values(environ: Mapping[str, str]) -> list[bytes]:
    """Return the values of secret-named variables, longest first, for redacting logs.

    Values under 8 characters are left out: they would blank ordinary words.
    """
    values = {
        value.encode("utf-8", "surrogateescape")
        for name, value in environ.items()
        if looks_secret_name(name) and len(value) >= _SHORTEST_SECRET
    }
    return sorted(values, key=lambda value: (-len(value), value))
