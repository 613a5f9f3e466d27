"""A directory of images: a folder for each class, below folders of splits where there are some.

    digits/train/seven/0001.png      rows have `image`, and `label`, the class's number
    digits/test/two/0002.png

Classes are numbered by their names' order over all splits that are read. Images outside of
folders have no label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.stages.data.image_files import BadImage, read_image_file
from redco_flow.stages.data.rows import BadRow, FileRow, Rows

ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"))

SplitOf = Callable[[str], str | None]
"""From a folder's name to the split that it names."""


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
