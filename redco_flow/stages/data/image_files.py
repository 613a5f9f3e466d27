"""Read image files that data rows name: regular files below the data's folder, of known formats.

The author of a row may be unknown: its path must not reach any other file of the reader's, a
device, or a pipe, and its content must not ask for another program (as PostScript does) or for
gigabytes of memory.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redco_flow.spec.stage_kind import NamedFile, NamedFiles
from redco_flow.stages.data.rows import BadRow, FileRow, Rows

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Pillow's names of the formats that are read; PPM covers PBM, PGM and PNM too."""

# How `datasets` gives an image that it has not decoded, and how Parquet files of it have one.
IMAGE_KEYS = frozenset({"bytes", "path"})

MAX_IMAGE_BYTES = 64 << 20
MAX_IMAGE_PIXELS = 89_478_485
"""Of one image: where Pillow begins to warn of decompression bombs."""

ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"))

SplitOf = Callable[[str], str | None]
"""From a folder's name to the split that it names."""


class MissingPillow(ValueError):
    """Images are to be read, and nothing can."""


class BadImage(ValueError):
    """A file or its content that is not read as an image; says why and what is allowed."""


def read_image_file(path: str, folders: Sequence[Path] | None) -> bytes:
    """Return the bytes of an image file that a row names.

    Args:
        path: absolute, or relative to one of the folders.
        folders: the file must be below one of them, after symbolic links are resolved; None: it
            may be anywhere, as where the user's own module made the row.

    Raises:
        BadImage: there is no such file there, it is no regular file, or it is too large.
    """
    found = Path(path) if folders is None else _below(path, folders)
    # A pipe must not block the open; nothing is read before the type of the file is known.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if folders else 0)
    try:
        descriptor = os.open(found, flags)
    except (OSError, ValueError) as error:  # ValueError: NUL in the path
        raise BadImage(f"it cannot be opened: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadImage("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_IMAGE_BYTES:
        raise BadImage(f"it has more than {MAX_IMAGE_BYTES >> 20} MiB, the most that is read")
    return content


def image_paths(value: Any) -> Iterator[str]:
    """Yield the paths of the image files that are read where a row has this value."""
    if isinstance(value, Mapping):
        if value.keys() == IMAGE_KEYS:
            if value["bytes"] is None and isinstance(value["path"], str):
                yield value["path"]
            return
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from image_paths(one)


def find_image_files(paths: Iterable[str], folders: Sequence[Path]) -> NamedFiles:
    """Return the file that `read_image_file` reads for each path; None where it refuses to."""
    root = os.path.realpath(folders[0])
    directory = cache(lambda name: os.path.realpath(os.path.join(root, name)))

    def find(path: str) -> NamedFile | None:
        # Mostly a plain file below the first folder: links are resolved once for each directory.
        above, _, name = path.rpartition("/")
        is_plain = name not in ("", ".", "..") and not path.startswith("/") and ".." not in above
        if is_plain and path.isprintable():
            real = f"{directory(above)}/{name}"
            if real.startswith(f"{root}/") and _is_readable(real, os.lstat):
                return NamedFile(Path(real), folders[0] / path)
        return _find_image_file(path, folders)

    return {path: find(path) for path in paths}


def _find_image_file(path: str, folders: Sequence[Path]) -> NamedFile | None:
    try:
        real = _below(path, folders)
    except (BadImage, OSError, ValueError):
        return None
    if not _is_readable(str(real), os.stat):
        return None
    named = (Path(os.path.normpath(folder / path)) for folder in folders)
    is_it = (one for one in named if os.path.realpath(one) == str(real))
    return NamedFile(real, next(is_it, real))


def _is_readable(path: str, look: Callable[[str], os.stat_result]) -> bool:
    try:
        status = look(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_IMAGE_BYTES


def _below(path: str, folders: Sequence[Path]) -> Path:
    """Return the real path of a file below one of the folders."""
    roots = [Path(os.path.realpath(folder)) for folder in dict.fromkeys(folders)]
    real = [Path(os.path.realpath(root / path)) for root in roots]
    inside = [one for one in real if any(one.is_relative_to(root) for root in roots)]
    if inside:
        return next((one for one in inside if one.exists()), inside[0])
    allowed = " or ".join(map(str, dict.fromkeys(folders))) or "(none)"
    raise BadImage(f"a row may only name files below {allowed}")


def open_image(content: bytes) -> Any:
    """Return a Pillow image of a file's bytes, opened and not decoded.

    Raises:
        MissingPillow: it is not installed.
        BadImage: the content has none of `IMAGE_FORMATS`, or too many pixels.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingPillow(
            "images are read by Pillow, which is not installed: pip install 'redco-flow[vision]'."
        ) from error
    try:
        image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
    except UnidentifiedImageError as error:
        raise BadImage(f"its content is none of {', '.join(IMAGE_FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"{error}; at most {MAX_IMAGE_PIXELS:,} pixels are decoded") from error
    num_pixels = image.width * image.height
    if num_pixels > MAX_IMAGE_PIXELS:
        raise BadImage(f"{num_pixels:,} pixels; at most {MAX_IMAGE_PIXELS:,} are decoded")
    return image


@dataclass(frozen=True)
class ImageFile:
    """One image.

    Args:
        class_name: None outside of a class's folder.
    """

    path: Path
    split: str
    class_name: str | None


def image_files(root: Path, split_of: SplitOf) -> list[ImageFile]:
    """Return the images below a directory, sorted by their paths; none where it has none.

    Raises:
        ValueError: some folders name a split and others do not.
    """
    found_files = (path for path in root.rglob("*") if path.suffix.lower() in ENDINGS)
    paths = sorted(path for path in found_files if path.is_file())
    found = [_image_file(path, path.relative_to(root).parts[:-1], split_of) for path in paths]
    nameless = sorted({str(one.path.parent) for one in found if not one.split})
    if nameless and len(nameless) < len({str(one.path.parent) for one in found}):
        raise ValueError(
            f"{root}: some folders name a split (train, validation, test) and these do not: "
            f"{', '.join(nameless)}. Put their images into one that does, or move them away."
        )
    return [ImageFile(one.path, one.split or "train", one.class_name) for one in found]


def class_names(files: list[ImageFile]) -> list[str]:
    """Return the classes, of which the first is label 0."""
    return sorted({one.class_name for one in files if one.class_name is not None})


def image_row(file: ImageFile, classes: list[str]) -> Rows:
    """Yield the one row of an image's file."""
    try:
        content = read_image_file(str(file.path), None)
    except BadImage as error:
        yield BadRow(f"{file.path}:1", "field 'image' is no image that can be read", str(error))
        return
    row: dict[str, Any] = {"image": {"bytes": content, "path": file.path.name}}
    if file.class_name is not None:
        row["label"] = classes.index(file.class_name)
    yield FileRow(1, row)


def _image_file(path: Path, folders: tuple[str, ...], split_of: SplitOf) -> ImageFile:
    split = split_of(folders[0]) if folders else None
    of_class = folders[1:] if split else folders
    return ImageFile(path, split or "", of_class[0] if of_class else None)
