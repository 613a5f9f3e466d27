"""Rows of a dataset artifact that stores rows unchanged: msgpack in a column of Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from redco_flow.records import read_json

SUMMARY_FILE = "dataset.json"
ARRAY, IMAGE = 1, 2
"""Extension types of msgpack: an array's dtype, shape and bytes; the bytes of an image file."""


def decode_row(data: bytes, open_image: Callable[[bytes], Any]) -> dict[str, Any]:
    """Return a row that was packed; arrays are NumPy's.

    Args:
        open_image: returns the value of an image file's bytes.
    """

    def extension(code: int, content: memoryview) -> Any:
        if code == ARRAY:
            dtype, shape, values = msgspec.msgpack.decode(content)
            return np.frombuffer(values, dtype).reshape(shape)
        return open_image(bytes(content))

    row: dict[str, Any] = msgspec.msgpack.decode(data, ext_hook=extension)
    return row


@dataclass(frozen=True)
class StoredRows:
    """The packed rows of one split.

    Args:
        target: the column that predictions are compared with; empty for none.
        table: an Arrow table with the columns `row_id` and `row`.
    """

    target: str
    table: Any

    @classmethod
    def read(cls, folder: Path, split: str) -> Self | None:
        """Open a split of a dataset artifact; None of encoded texts, which have no such rows.

        Raises:
            OSError, ValueError, KeyError: there is no such split, or its files are damaged.
        """
        import pyarrow as pa

        summary: Mapping[str, Any] = read_json(folder / SUMMARY_FILE)
        if summary.get("target") is None:
            return None
        tables = []
        for name in summary["files"][split]:
            with pa.memory_map(str(folder / name)) as source:
                tables.append(pa.ipc.open_stream(source).read_all().select(["row_id", "row"]))
        return cls(str(summary["target"]), pa.concat_tables(tables))

    def find(self, index: int, row_id: str, open_image: Callable[[bytes], Any]) -> dict[str, Any]:
        """Return the row with this number; empty if it has another id, or is not there."""
        if index >= len(self.table) or self.table["row_id"][index].as_py() != row_id:
            return {}
        return decode_row(self.table["row"][index].as_py(), open_image)


def upright(image: Any) -> Any:
    """Turn a Pillow image as its Exif orientation says, as `datasets` and transformers do."""
    from PIL import ExifTags, Image

    turns = Image.Transpose
    by_orientation = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }
    image.load()  # which turns a TIFF file
    # Not by ImageOps.exif_transpose: it writes the Exif data again, and fails at damaged ones.
    try:
        turn = by_orientation.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # noqa: BLE001 - Pillow raises anything at damaged Exif data
        return image
    return image if turn is None else image.transpose(turn)
