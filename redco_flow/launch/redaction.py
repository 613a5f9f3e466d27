"""Mask secrets in a byte stream, also across chunk boundaries.

Two kinds: values that are known (the environment's), and what looks like a secret by the rules of
`redco_flow.spec.secrets`. Of an unfinished line only the bytes that a rule might need are
held back, and never more than a bounded number.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from redco_flow.spec.secrets import SHORTEST_SECRET, PrivateKeys, rule_set, without

PLACEHOLDER = b"[redacted]"
_SHORTEST_LINE = 8  # shorter lines of a many-line secret are in every text
_MOST_HELD = 1 << 15  # of a line without an end; half of it is shown when there is more
_MOST_BETWEEN = 256  # bytes between a secret's name and the secret
_TOKEN_BYTES = re.compile(rb"[A-Za-z0-9_+/=.~%-]*")


class Redactor:
    """Replace all secrets: the given values, and what looks like one."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._values = ValueRedactor(secrets)
        self._looks = LooksRedactor()

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return those that may be shown now."""
        return self._looks.feed(self._values.feed(chunk))

    def flush(self) -> bytes:
        """Return what was held back; the stream has ended."""
        return self._looks.feed(self._values.flush()) + self._looks.flush()


class LooksRedactor:
    """Replace what looks like a secret, line by line."""

    def __init__(self) -> None:
        self._held = b""
        self._keys = PrivateKeys()
        self._is_inside_token = False  # one too long to hold, whose beginning was replaced

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return those that may be shown now."""
        data = self._held + self._without_end_of_token(chunk)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        shown = self._masked(data[:end])
        rest = data[end:]
        if len(rest) > _MOST_HELD:
            part, rest = self._beginning(rest)
            shown += part
        else:
            safe = self._safe_bytes(rest)
            shown += rest[:safe]
            rest = rest[safe:]
        self._held = rest
        return shown

    def flush(self) -> bytes:
        """Return what was held back; the stream has ended."""
        held, self._held = self._held, b""
        return self._masked(held)

    def _masked(self, data: bytes) -> bytes:
        if not data:
            return data
        spans = self._keys.find(data) + rule_set().find(data)
        return without(data, spans, PLACEHOLDER) if spans else data

    def _safe_bytes(self, line: bytes) -> int:
        """Count the leading bytes of a line that are safe to show: words before any keyword."""
        at = min(self._keys.may_begin_at(line), rule_set().first_keyword(line))
        return max(line.rfind(b" ", 0, at), line.rfind(b"\t", 0, at)) + 1

    def _beginning(self, line: bytes) -> tuple[bytes, bytes]:
        """Cut a line that is too long to hold; a secret at the cut goes with the beginning."""
        spans = sorted(self._keys.find(line) + rule_set().find(line))
        cut = len(line) - _MOST_HELD // 2
        for start, end in spans:
            if start < cut + _MOST_BETWEEN:
                cut = max(cut, end)
        self._is_inside_token = cut == len(line)
        return without(line[:cut], [span for span in spans if span[0] < cut], PLACEHOLDER), line[
            cut:
        ]

    def _without_end_of_token(self, chunk: bytes) -> bytes:
        if not self._is_inside_token:
            return chunk
        end = _end_of_token(chunk)
        self._is_inside_token = end == len(chunk)
        return chunk[end:]


def _end_of_token(data: bytes) -> int:
    found = _TOKEN_BYTES.match(data)
    return found.end() if found else 0


class ValueRedactor:
    """Replace each occurrence of a secret by `[redacted]`; occurrences may overlap."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._secrets = sorted({form for secret in secrets for form in _forms(secret)}, key=len)
        self._carry = b""
        self._num_covered = 0  # first bytes of `_carry` that belong to a secret already blotted

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return those that may be shown now."""
        if not self._secrets:
            return chunk
        return self._take(self._carry + chunk, is_last=False)

    def flush(self) -> bytes:
        """Return what was held back; the stream has ended."""
        return self._take(self._carry, is_last=True)

    def _take(self, data: bytes, *, is_last: bool) -> bytes:
        end = len(data) if is_last else self._start_of_partial_secret(data)
        shown: list[bytes] = []
        covered_to = self._num_covered
        for start, stop in self._occurrences(data):
            if start >= end:
                break
            if start >= covered_to:
                shown += data[covered_to:start], PLACEHOLDER
            covered_to = max(covered_to, stop)
        shown.append(data[covered_to:end])
        self._num_covered = max(0, covered_to - end)
        self._carry = data[end:]
        return b"".join(shown)

    def _occurrences(self, data: bytes) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for secret in self._secrets:
            start = data.find(secret)
            while start >= 0:
                found.append((start, start + len(secret)))
                start = data.find(secret, start + 1)
        return sorted(found)

    def _start_of_partial_secret(self, data: bytes) -> int:
        """Find the longest suffix of `data` that may be the beginning of a secret."""
        longest = 0
        for secret in self._secrets:
            for length in range(min(len(secret) - 1, len(data)), longest, -1):
                if data.endswith(secret[:length]):
                    longest = length
                    break
        return len(data) - longest


class RedactedStream(io.TextIOBase):
    """A text stream, as `sys.stderr`, whose text goes on to another one without secrets."""

    def __init__(self, stream: TextIO, secrets: Iterable[bytes]) -> None:
        self._stream = stream
        self._redactor = Redactor(secrets)
        self._mutex = threading.Lock()

    def write(self, text: str) -> int:
        """Take some text; of a line that has not ended some may be held back."""
        with self._mutex:
            shown = self._redactor.feed(text.encode("utf-8", "backslashreplace"))
            self._stream.write(shown.decode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Write out what may be shown."""
        self._stream.flush()

    def fileno(self) -> int:
        """The descriptor of the stream behind."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the stream behind is a terminal."""
        return self._stream.isatty()


def redact_text(text: str, secrets: Iterable[bytes]) -> str:
    """Return `text` without the secrets."""
    redactor = Redactor(secrets)
    shown = redactor.feed(_bytes_of(text)) + redactor.flush()
    return shown.decode("utf-8", "replace")


def _bytes_of(text: str) -> bytes:
    """Return a text as bytes; a file's name and a text of JSON may have lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def redact_record(value: Any, secrets: Sequence[bytes], name: str = "") -> Any:
    """Return a JSON value without the secrets in its texts and keys.

    Args:
        name: the key of a text, by which `api_key` tells that it is secret.
    """
    if isinstance(value, Mapping):
        return {
            redact_record(str(key), secrets): redact_record(one, secrets, str(key))
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_record(one, secrets, name) for one in value]
    if not isinstance(value, str):
        return value
    if len(value) < SHORTEST_SECRET:
        return _bytes_of(value).decode("utf-8", "replace")
    beginning = f"{name}: " if name.isidentifier() else ""
    shown = redact_text(beginning + value, secrets)
    return shown[len(beginning) :] if shown.startswith(beginning) else redact_text(value, secrets)


def _forms(secret: bytes) -> Iterator[bytes]:
    """The ways a secret gets printed: as it is, inside JSON, and line by line."""
    if not secret:
        return
    yield secret
    yield json.dumps(secret.decode("utf-8", "replace"))[1:-1].encode()
    yield from (line for line in secret.splitlines() if len(line) >= _SHORTEST_LINE)
