"""The corpus of glyphs: what a font has, drawn alike in every process."""

import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import PIL.ImageFont
import pytest

from redco_flow.corpora import glyphs

PILLOWS_OWN = Path(PIL.ImageFont.__file__)
SCRIPT = """
import hashlib, sys
from redco_flow.corpora import glyphs
assert "PIL" not in sys.modules, "Pillow is imported before rows are read"
drawn = hashlib.sha256()
for row in glyphs.draw_rows(glyphs.files(), "aΩЖ7;", 16):
    drawn.update(row["image"].tobytes() + row["caption"].encode())
print(drawn.hexdigest())
"""


def drawn(characters, size=glyphs.SIZE, paths=(PILLOWS_OWN,)):
    return list(glyphs.draw_rows(paths, characters, size))


def test_a_row_is_an_image_with_its_characters_unicode_name():
    (row,) = drawn("a")

    assert row["caption"] == "latin small letter a"
    assert row["character"] == "a"
    assert row["image"].shape == (glyphs.SIZE, glyphs.SIZE)
    assert row["image"].dtype == np.uint8
    assert row["image"].max() == 255
    assert row["image"].min() == 0


def test_characters_that_the_font_lacks_are_left_out_and_no_boxes_are_drawn():
    assert [row["character"] for row in drawn("aЖbΩ字c")] == ["a", "b", "c"]


def test_all_glyphs_of_a_font_differ_from_each_other():
    images = [row["image"].tobytes() for row in drawn("abcdefghijklmnopqrstuvwxyz0123456789")]

    assert len(set(images)) == 36


def test_accents_and_descenders_stay_inside_of_the_image():
    for row in drawn("gjpqyÅÉ", size=16) + drawn("gjpqyÅÉ", size=32):
        assert not row["image"][[0, -1]].any(), row["caption"]


def test_what_the_fonts_of_this_machine_have_is_some_thousand_rows_or_one_built_in_font():
    files = glyphs.files()
    rows = list(glyphs.rows(files))

    assert len(rows) > (100 if files == [PILLOWS_OWN] else 2000)
    assert {unicodedata.name(row["character"]).lower() for row in rows} == {
        row["caption"] for row in rows
    }
    assert all(row["image"].any() for row in rows)


def test_every_process_draws_the_same_pixels():
    command = [sys.executable, "-c", SCRIPT]

    digests = {subprocess.check_output(command, text=True) for _ in range(2)}

    assert len(digests) == 1


def test_the_first_place_with_a_family_gives_its_fonts_without_narrow_cuts(tmp_path):
    empty, full = tmp_path / "empty", tmp_path / "full"
    for name in ("DejaVuSerif.ttf", "DejaVuSans.ttf", "DejaVuSansCondensed.ttf", "Icons.ttf"):
        (full / "dejavu").mkdir(parents=True, exist_ok=True)
        (full / "dejavu" / name).touch()

    found = glyphs.choose_fonts([[empty], [full]], [PILLOWS_OWN])

    assert [path.name for path in found] == ["DejaVuSans.ttf", "DejaVuSerif.ttf"]
    assert glyphs.choose_fonts([[empty]], [PILLOWS_OWN]) == [PILLOWS_OWN]


def test_without_any_font_the_error_says_what_to_install(tmp_path):
    with pytest.raises(ValueError, match="apt-get install fonts-dejavu-core"):
        glyphs.choose_fonts([[tmp_path]], [])


def test_a_file_that_is_no_font_is_named(tmp_path):
    (tmp_path / "DejaVuSans.ttf").write_bytes(b"no font")

    with pytest.raises(ValueError, match=r"DejaVuSans\.ttf: no font that can be read"):
        drawn("a", paths=[tmp_path / "DejaVuSans.ttf"])
