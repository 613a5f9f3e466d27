"""Open text files as streams of bytes, those with gzip (.gz) and Zstandard (.zst) decompressed.

A compressed file may expand to 1 GiB, or to 200 times its size where that is more: a few kilobytes
could otherwise keep a machine busy for hours.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redco_flow.engine.files import UnreadableFile, reading

CODECS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}
MAX_EXPANDED_BYTES = 1 << 30
MAX_RATIO = 200

_BUFFER_BYTES = 1 << 18
# What begins a file of another kind, what it is, and what to do.
_NOT_TEXT: Mapping[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed with gzip", "add .gz to its name"),
    b"\x28\xb5\x2f\xfd": ("compressed with Zstandard", "add .zst to its name"),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"ARROW1": ("an Arrow file", "name it .arrow"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack it, or export it as CSV"),
    b"\xff\xfe": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
}


def uncompressed_name(path: Path) -> str:
    """Return a file's name without the ending of its compression: `a.csv` of `a.csv.gz`."""
    return path.stem if path.suffix.lower() in CODECS else path.name


def open_text(path: Path) -> io.BufferedReader:
    """Open a text file for reading bytes.

    Raises:
        OSError: it cannot be opened.
        UnreadableFile: it begins like a file of another kind. Reading raises it as well, where a
            compressed file is damaged or expands to too much.
    """
    codec = CODECS.get(path.suffix.lower())
    file: Any = (
        path.open("rb")
        if codec is None
        else io.BufferedReader(_Decompressed(path, codec), _BUFFER_BYTES)
    )
    try:
        head = file.peek(8)
        for magic, (what, remedy) in _NOT_TEXT.items():
            if head.startswith(magic):
                raise UnreadableFile(f"{path}: it is {what}, not text: {remedy}.")
    except BaseException:
        file.close()
        raise
    return file  # type: ignore[no-any-return]


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a file."""

    def __init__(self, path: Path, codec: str) -> None:
        import pyarrow as pa

        self._path, self._what = path, f"a {codec} file"
        self._limit = max(MAX_EXPANDED_BYTES, MAX_RATIO * path.stat().st_size)
        self._num_bytes = 0
        with reading(path, self._what):
            self._stream = pa.CompressedInputStream(pa.OSFile(str(path), "rb"), codec)

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes.

        Raises:
            UnreadableFile: the file is damaged, or expands to too much.
        """
        with reading(self._path, self._what):
            data = self._stream.read(len(buffer))
        self._num_bytes += len(data)
        if self._num_bytes > self._limit:
            raise UnreadableFile(
                f"{self._path}: it expands to more than {self._limit:,} bytes, "
                f"{MAX_RATIO} times its size, and reading stops there. If its rows are meant, "
                "decompress the file and name the result."
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
        super().close()
