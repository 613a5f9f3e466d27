"""Pictures among predictions, as PNG files inside of a page: nothing that draws is needed.

A picture is rows of pixels: whole numbers from 0 to 255, or three of them for a colour.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

MIN_SIDE, MAX_SIDE = 8, 1024
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _COLOURS = 0, 2  # of PNG's colour types


def picture_url(value: Any) -> str:
    """Return a picture as a `data:` URL; "" of what is no picture."""
    if not _is_grid(value):
        return ""
    for colour_type, lines in ((_GREY, value), (_COLOURS, _joined_colours(value))):
        if rows := _as_bytes(lines):
            png = _png(rows, len(value[0]), colour_type)
            return "data:image/png;base64," + base64.b64encode(png).decode()
    return ""


def _joined_colours(grid: list[list[Any]]) -> list[list[Any]]:
    """Return lines of the pixels' three numbers, one after the other; none where there are not."""
    pixels = chain.from_iterable(grid)
    if not all(isinstance(pixel, list) and len(pixel) == 3 for pixel in pixels):
        return []
    return [list(chain.from_iterable(line)) for line in grid]


def _is_grid(value: Any) -> bool:
    """Whether it is lists of one length, not too short or long for a picture."""
    if not isinstance(value, list) or not MIN_SIDE <= len(value) <= MAX_SIDE:
        return False
    if not all(isinstance(line, list) for line in value):
        return False
    return {len(line) for line in value} == {len(value[0])} and (
        MIN_SIDE <= len(value[0]) <= MAX_SIDE
    )


def _as_bytes(lines: Sequence[Sequence[Any]]) -> list[bytes]:
    """Return lines of numbers as bytes; none where one is no whole number from 0 to 255."""
    try:
        return [bytes(line) for line in lines]
    except (TypeError, ValueError):
        return []


def _png(lines: Sequence[bytes], width: int, colour_type: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, len(lines), 8, colour_type, 0, 0, 0)
    unfiltered = b"".join(b"\0" + line for line in lines)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum
