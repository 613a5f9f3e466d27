"""Thumbnails of the images in a dataset's rows: small, drawn again, as `data:` URLs for a page.

Pillow decodes files of a few formats and of limited size; what it writes has none of the file's
metadata.
"""

from __future__ import annotations

import base64
import io
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from redco_flow.tracking.artifacts import Artifact, ArtifactStore

if TYPE_CHECKING:
    import numpy as np

    from redco_flow.tracking.dataset_rows import StoredRows


_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MOST_PIXELS = 50_000_000  # of an image that is decoded for the page
_MOST_PIXELS_OF_PAGE = 4 * _MOST_PIXELS
_MOST_BYTES = 32 << 20
_SIDE = 128
_LOSSLESS_SIDE = 48  # larger ones are JPEG

MIN_SIDE, MAX_SIDE = 8, 1024
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _COLOURS = 0, 2  # of PNG's colour types


def row_thumbnails(
    predictions: Artifact, row_ids: Mapping[int, str], store: ArtifactStore
) -> dict[int, str]:
    """Return the image of each row that has one, by the row's number.

    Args:
        predictions: the artifact; it names dataset and split.
        row_ids: by number in the split, the most important first: after `_MOST_PIXELS_OF_PAGE` no
            more images are decoded. A row with another id in the dataset is left out.
    """
    dataset = store.find(str(predictions.metadata.get("data") or ""))
    if dataset is None:
        return {}
    # NumPy is imported here and below: most reports have no rows.
    from redco_flow.tracking.dataset_rows import StoredRows

    try:
        rows = StoredRows.read(dataset.path, str(predictions.metadata.get("split")))
        return dict(_drawn(rows, row_ids)) if rows is not None else {}
    except (ImportError, OSError, ValueError, KeyError):
        return {}


def _drawn(rows: StoredRows, row_ids: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Each row's number and image, without that of the column to be predicted."""
    pixels_left = _MOST_PIXELS_OF_PAGE
    for index, row_id in row_ids.items():
        row = rows.find(index, row_id, _opened)
        images = [one for key, one in row.items() if key != rows.target and _is_image(one)]
        if not images:
            continue
        pixels_left -= math.prod(images[0].size if hasattr(images[0], "format") else (1,))
        if pixels_left < 0:
            return
        if url := thumbnail(images[0]):
            yield index, url


def _opened(content: bytes) -> Any:
    """An image file, opened and not decoded; None of one that Pillow cannot read."""
    try:
        from PIL import Image

        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except Exception:  # noqa: BLE001 - Pillow's readers raise anything at a damaged file
        return None


def _is_image(value: Any) -> bool:
    """Whether it is an image file or an array (rows, columns) or (rows, columns, 1 or 3)."""
    import numpy as np

    if not isinstance(value, np.ndarray):
        return type(value).__module__.startswith("PIL.")
    has_channels = value.ndim == 3 and value.shape[-1] in (1, 3)
    return (value.ndim == 2 or has_channels) and min(value.shape[:2]) >= MIN_SIDE


def thumbnail(image: Any) -> str:
    """Return an image of Pillow's or an array as a `data:` URL; "" of what cannot be drawn."""
    import numpy as np

    try:
        if isinstance(image, np.ndarray):
            return _url(_of_array(image)) if image.size <= _MOST_PIXELS else ""
        return _url(image) if _is_harmless(image) else ""
    except Exception:  # noqa: BLE001 - Pillow's readers raise anything at a damaged file
        return ""


def _is_harmless(image: Any) -> bool:
    """Whether an image file is of a known format and small enough to be decoded."""
    size = len(image.fp.getbuffer()) if isinstance(image.fp, io.BytesIO) else 0
    is_small = image.width * image.height <= _MOST_PIXELS and size <= _MOST_BYTES
    return image.format in _FORMATS and is_small


def _of_array(pixels: np.ndarray[Any, Any]) -> Any:
    """An array as an image. Its largest number is white: arrays count to 1, 16, 255 or others."""
    import numpy as np
    from PIL import Image

    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    numbers = np.clip(np.nan_to_num(pixels.astype(np.float32)), 0, None)
    largest = float(numbers.max()) or 1.0
    return Image.fromarray(np.round(numbers * (255 / largest)).astype(np.uint8))


def _url(image: Any) -> str:
    from PIL import Image

    from redco_flow.tracking.dataset_rows import upright

    image.draft("RGB", (_SIDE, _SIDE))  # a JPEG is decoded smaller
    image = upright(image)
    drawn = image.convert("L" if image.mode in ("1", "L", "I;16", "I", "F") else "RGB")
    drawn.thumbnail((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    # Pixels alone: no profile, no text, no Exif of the file.
    clean = Image.frombytes(drawn.mode, drawn.size, drawn.tobytes())
    kind = "PNG" if max(clean.size) <= _LOSSLESS_SIDE else "JPEG"
    file = io.BytesIO()
    clean.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


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
