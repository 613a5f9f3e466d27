"""Images of a new file's rows: their content, under names that are digests of it.

`redco-flow predict` writes them next to the rows that it makes, so that these can be read wherever
the user's files were, and on any node.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from redco_flow.errors import UnusableRow
from redco_flow.stages.data.image_files import IMAGE_KEYS, BadImage, read_image_file

_FOLDER = "images"
_NUM_DIGITS = 32


def is_image(value: Any) -> bool:
    """Whether a row's value is an image: the bytes of its file, or its path."""
    return isinstance(value, Mapping) and value.keys() == IMAGE_KEYS


def copied_images(
    fields: Mapping[str, Any], column: str | None, folder: Path | None
) -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
    """Return a row that names copies of its images, and the copies' content by path.

    Args:
        column: one that may also have an image file's path as a text.
        folder: the row may only name files below it; None: any file, which the user has named.

    Raises:
        UnusableRow: an image file cannot be read.
    """
    contents: dict[str, bytes] = {}

    def copied(value: Any, key: str) -> Any:
        if key == column and isinstance(value, str):
            value = {"bytes": None, "path": value}
        if is_image(value):
            content = _content(value, key, folder)
            name = f"{_FOLDER}/{sha256(content).hexdigest()[:_NUM_DIGITS]}{_ending(value['path'])}"
            contents[name] = content
            return {"bytes": None, "path": name}
        if isinstance(value, Mapping):
            return {name: copied(one, "") for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [copied(one, "") for one in value]
        return value

    return {key: copied(value, key) for key, value in fields.items()}, contents


def _content(image: Mapping[str, Any], key: str, folder: Path | None) -> bytes:
    content, path = image["bytes"], image["path"]
    try:
        if content is None:
            return read_image_file(str(path), None if folder is None else [folder])
        return bytes(memoryview(content))
    except (BadImage, TypeError) as error:
        reason = f"field '{key}' is no image that can be read"
        raise UnusableRow(reason, f"{path}: {error}") from error


def _ending(path: Any) -> str:
    ending = Path(str(path or "")).suffix.lower()
    return ending if ending[1:].isascii() and ending[1:].isalnum() else ""
