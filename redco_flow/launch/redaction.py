"""Blot secret values out of a stream of bytes, wherever the chunks happen to be cut.

Knows byte strings only; which values are secret is `redco_flow.spec.secrets`' business. Holds
back at most one secret's length, so memory stays bounded whatever the stream is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

PLACEHOLDER = b"[redacted]"
_SHORTEST_LINE = 8  # shorter lines of a many-line secret stand in every text


class Redactor:
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
        """Where the longest end of `data` begins that could still grow into a secret."""
        longest = 0
        for secret in self._secrets:
            for length in range(min(len(secret) - 1, len(data)), longest, -1):
                if data.endswith(secret[:length]):
                    longest = length
                    break
        return len(data) - longest


def redact_text(text: str, secrets: Iterable[bytes]) -> str:
    """Return `text` without the secrets."""
    redactor = Redactor(secrets)
    shown = redactor.feed(text.encode("utf-8", "surrogateescape")) + redactor.flush()
    return shown.decode("utf-8", "replace")


def _forms(secret: bytes) -> Iterator[bytes]:
    """The ways a secret gets printed: as it is, inside JSON, and line by line."""
    if not secret:
        return
    yield secret
    yield json.dumps(secret.decode("utf-8", "replace"))[1:-1].encode()
    yield from (line for line in secret.splitlines() if len(line) >= _SHORTEST_LINE)
