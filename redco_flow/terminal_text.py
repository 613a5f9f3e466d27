"""Text that a terminal, a page or a reader shows as it is: no control character acts.

Control characters move the cursor, rename windows and paste answers; bidirectional ones show a
line in another order than it has. Colours of a program's own output go without a trace.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
# What programs draw with: CSI sequences, titles and links (OSC ... BEL or ST), two-letter codes.
_CODES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"
)
_LONE_C0 = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# C0 without tab and newline, DEL, C1, the Arabic letter mark, directions, line separators,
# invisible joiners' neighbours, byte order mark, halves of surrogate pairs.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with each control character written out by its number."""
    if text.isascii() and text.isprintable():
        return text
    text = _COLOURS.sub("", text.replace("\r\n", "\n"))
    return _CONTROLS.sub(lambda found: _written_out(found[0]), text)


def without_codes(text: str) -> str:
    """Return a program's line without the codes and C0 characters that it draws with, visibly."""
    return visible(_LONE_C0.sub("", _CODES.sub("", text)))


def line_shown(raw: bytes) -> str:
    """Return what a terminal would show of a program's line: of a progress bar, its last state."""
    text = raw.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
    return without_codes(text).rstrip()


def _written_out(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class VisibleStream(io.TextIOBase):
    """A text stream that writes another's text visibly; bytes and control go to the other."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, made visible.

        Raises:
            OSError: it cannot be written; names the stream.
        """
        with self._named_in_errors():
            self._stream.write(visible(text))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered; errors are those of `write`."""
        with self._named_in_errors():
            self._stream.flush()

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = f"/dev/{self._stream.name.strip('<>')}"  # of "<stdout>"
            raise

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        """Write each text, made visible."""
        for line in lines:
            self.write(line)

    def __getattribute__(self, name: str) -> Any:
        if name in ("write", "writelines", "flush", "_named_in_errors", "_stream", "__class__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_stream"), name)


def plain(stream: TextIO) -> TextIO:
    """Return the stream behind a visible one: for what draws, and makes its texts visible."""
    return stream._stream if isinstance(stream, VisibleStream) else stream
