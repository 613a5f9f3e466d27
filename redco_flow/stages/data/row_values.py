"""Rows of any values as bytes, and back: numbers, texts, lists, mappings, arrays and images.

msgpack, in which arrays keep their dtype and shape, and images the bytes of their file. Dates and
decimal numbers become text.
"""

from __future__ import annotations

import datetime
import decimal
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from redco_flow.errors import UnusableRow
from redco_flow.stages.data.image_files import (
    IMAGE_KEYS,
    MissingPillow,
    open_image,
    read_image_file,
)
from redco_flow.tracking.dataset_rows import ARRAY, IMAGE, decode_row, upright

__all__ = [
    "AS_TEXT",
    "BadValue",
    "MissingPillow",
    "as_json_value",
    "file_of_image",
    "pack_row",
    "unpack_row",
]

_PLAIN = (str, bytes, bool, int, float, type(None))
AS_TEXT = (datetime.date, datetime.time, decimal.Decimal)
"""Types of values that become text."""


class BadValue(UnusableRow):
    """A value that no row can have."""


def pack_row(fields: Mapping[str, Any], image_folders: Sequence[Path] | None = ()) -> bytes:
    """Return a row's values as bytes; equal rows give equal bytes.

    Args:
        image_folders: where image files that the row names by path may be; see `read_image_file`.

    Raises:
        BadValue: a value of another type, or an image that cannot be read.
    """
    packed = partial(_packed, image_folders=image_folders)
    try:
        return msgspec.msgpack.encode({key: packed(value, key) for key, value in fields.items()})
    except (OverflowError, UnicodeEncodeError) as error:
        raise BadValue("a value cannot be stored", str(error)) from error


def unpack_row(data: bytes) -> dict[str, Any]:
    """Return a row that was packed: arrays are NumPy's, images Pillow's, opened but not decoded."""
    return decode_row(data, open_image)


def as_json_value(value: Any) -> Any:
    """Return a value that JSON has, arrays as lists; None where it has none, as of an image."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list):
        return [as_json_value(one) for one in value]
    if isinstance(value, dict):
        return {str(key): as_json_value(one) for key, one in value.items()}
    return value if isinstance(value, str | bool | int | float) else None


def _packed(value: Any, key: str, image_folders: Sequence[Path] | None) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        if value.keys() == IMAGE_KEYS:
            return msgspec.msgpack.Ext(IMAGE, _image_bytes(value, key, image_folders))
        return {str(name): _packed(one, key, image_folders) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(one, key, image_folders) for one in value]
    if isinstance(value, np.generic):
        return _packed(value.item(), key, image_folders)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        parts = (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(parts))
    if isinstance(value, AS_TEXT):
        return str(value)
    if type(value).__module__.startswith("PIL."):
        return msgspec.msgpack.Ext(IMAGE, file_of_image(value))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise BadValue(f"field '{key}' cannot be stored", f"it is a {kind}")


def _image_bytes(value: Mapping[str, Any], key: str, image_folders: Sequence[Path] | None) -> bytes:
    """Return the bytes of an image's file, after a look whether it is one."""
    try:
        content = value["bytes"]
        if content is None:
            content = read_image_file(value["path"], image_folders)
        elif not isinstance(content, bytes):
            content = bytes(memoryview(content))
        open_image(content).load()
    except MissingPillow:
        raise
    except Exception as error:
        # Pillow's readers raise what they like at a damaged file.
        message = str(error).partition(" <_io")[0]
        raise BadValue(
            f"field '{key}' is no image that can be read", f"{value['path']}: {message}"
        ) from error
    return content


def file_of_image(image: Any) -> bytes:
    """Return a Pillow image as the content of a PNG file, which has no Exif orientation."""
    file = io.BytesIO()
    upright(image).save(file, "PNG")
    return file.getvalue()
