"""The end of a log as clean lines, in bounded memory, whatever the log holds."""

from __future__ import annotations

import os
from pathlib import Path

from redco_flow.terminal_text import without_codes

_MAX_BYTES = 1 << 16
_MAX_CHARACTERS = 500


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty; a missing log has none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    shown = [line for line in map(_clean, lines) if line.strip()]
    return shown[-count:]


def _clean(raw: bytes) -> str:
    """What a terminal would show of a line: of a progress bar, its last state."""
    text = raw.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
    text = without_codes(text).rstrip()
    if len(text) > _MAX_CHARACTERS:
        return f"{text[:_MAX_CHARACTERS]}… [{len(text):,} characters]"
    return text
