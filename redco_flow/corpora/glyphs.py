"""Glyphs of installed fonts as small grey images, with their characters' Unicode names.

A row is {"image": uint8 (SIZE, SIZE), 0 is paper and 255 ink, "caption": "latin small letter a",
"character": "a", "font": "DejaVu Sans Bold"}: data for captions, for images of captions, for
classes of glyphs. Drawn by Pillow, which is imported when rows are read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE = 32
"""Of an image, in pixels a side."""

MAX_FONTS = 12

BLOCKS = (
    (0x0021, 0x024F),  # Latin: ASCII, Latin-1, Extended-A, Extended-B
    (0x0370, 0x03FF),  # Greek
    (0x0400, 0x052F),  # Cyrillic
    (0x2010, 0x2027),  # punctuation
    (0x2030, 0x205E),
)
"""Of Unicode, the first and last code point of each."""

FAMILIES = ("DejaVuS", "Liberation", "Free", "NotoSans-", "NotoSerif-", "Arial", "Times")
"""How the names of font files begin; the fonts of the first family that there is are drawn."""

_ENDINGS = frozenset((".ttf", ".otf"))
# Cuts of a family that differ from its others in width alone, or have few characters.
_LEFT_OUT = ("Condensed", "Narrow", "Display", "Light", "Thin", "Medium", "Black", "Unicode")
_FOLDERS = ("~/.fonts", "~/.local/share/fonts", "/usr/local/share/fonts", "/usr/share/fonts")
_FOLDERS_OF_OTHERS = {"darwin": "/System/Library/Fonts/Supplemental", "win32": "C:/Windows/Fonts"}
_KINDS = frozenset("LNPS")  # letters, numbers, punctuation and symbols; no marks that combine
_POINTS_PER_PIXEL = 0.7  # so that an accented capital and a descender both stay inside
_BASELINE = 0.77  # of the height
# No character, so that what a font draws for it is what it draws for all that it lacks.
_MISSING = "\uffff"


def files() -> list[Path]:
    """Return the font files: of the system, else of matplotlib, else what Pillow has built in.

    Raises:
        ValueError: there is no font, and no Pillow.
    """
    packaged = _in_package("matplotlib", "mpl-data/fonts/ttf")
    return choose_fonts((_system_folders(), packaged), _in_package("PIL", "ImageFont.py"))


def choose_fonts(places: Iterable[Iterable[Path]], built_in: Sequence[Path]) -> list[Path]:
    """Return the fonts of the first place with a family, else what is built in.

    Args:
        places: folders of each.
        built_in: the file that has a font in it, where there is one.

    Raises:
        ValueError: there is neither.
    """
    for folders in places:
        if fonts := _fonts_of(folders):
            return fonts
    if built_in:
        return list(built_in)
    raise ValueError(
        "there is no font to draw glyphs of: install one (apt-get install fonts-dejavu-core, or a "
        "file of such a family in ~/.fonts), and Pillow: pip install 'redco-flow[vision]'."
    )


def identity() -> dict[str, str]:
    """Return what draws the glyphs: another version may draw other pixels."""
    try:
        return {"pillow": importlib.metadata.version("pillow")}
    except importlib.metadata.PackageNotFoundError:
        return {"pillow": "not installed"}


def rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each character of each font, in the order of the files."""
    return draw_rows(paths, characters(), SIZE)


def characters() -> list[str]:
    """Return the characters of `BLOCKS` that are something to see, in order."""
    points = (point for first, last in BLOCKS for point in range(first, last + 1))
    return [char for point in points if unicodedata.category(char := chr(point))[0] in _KINDS]


def draw_rows(paths: Iterable[Path], wanted: Sequence[str], size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of some characters, without those that a font has not.

    Args:
        size: of an image, in pixels a side.

    Raises:
        ValueError: Pillow is not installed, or a file is no font.
    """
    for path in paths:
        font = _open_font(path, size)
        missing = _draw(font, _MISSING, size).tobytes()
        name = " ".join(font.getname())
        for character in wanted:
            image = _draw(font, character, size)
            if image.any() and image.tobytes() != missing:
                caption = unicodedata.name(character).lower()
                yield {"image": image, "caption": caption, "character": character, "font": name}


def _draw(font: Any, character: str, size: int) -> NDArray[np.uint8]:
    """Draw a character on a common baseline, in the middle."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (size, size))
    place = (size / 2, round(_BASELINE * size))
    ImageDraw.Draw(image).text(place, character, fill=255, font=font, anchor="ms")
    return np.array(image)


def _open_font(path: Path, size: int) -> Any:
    try:
        from PIL import ImageFont
    except ImportError as error:
        raise ValueError(
            "glyphs are drawn by Pillow, which is not installed: pip install 'redco-flow[vision]'."
        ) from error
    points = round(_POINTS_PER_PIXEL * size)
    if path.suffix.lower() not in _ENDINGS:
        return ImageFont.load_default(points)
    try:
        # Of a path that it cannot read, Pillow takes the system's font of the same name instead.
        content = io.BytesIO(path.read_bytes())
        # Raqm, which some builds of Pillow have, would place glyphs otherwise.
        return ImageFont.truetype(content, points, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ValueError(f"{path}: no font that can be read: {error}") from error


def _fonts_of(folders: Iterable[Path]) -> list[Path]:
    """Return the fonts of the first family that is there, each name once, in order of name."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() in _ENDINGS and not any(cut in path.stem for cut in _LEFT_OUT):
                found.setdefault(path.name, path)
    for family in FAMILIES:
        if names := sorted(name for name in found if name.startswith(family)):
            return [found[name] for name in names[:MAX_FONTS]]
    return []


def _system_folders() -> list[Path]:
    others = [_FOLDERS_OF_OTHERS[sys.platform]] if sys.platform in _FOLDERS_OF_OTHERS else []
    return [Path(folder).expanduser() for folder in (*_FOLDERS, *others)]


def _in_package(package: str, inside: str) -> list[Path]:
    """Return a path in a package that is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    paths = (Path(folder) / inside for folder in folders or ())
    return [path for path in paths if path.exists()]
