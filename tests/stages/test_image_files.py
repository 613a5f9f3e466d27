"""Images that rows name by path: only regular image files below the data's folder are read."""

import io
import json
import os
import struct
import zlib

import pytest
from PIL import Image
from stage_kinds import preprocess

from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.image_files import IMAGE_FORMATS, MAX_IMAGE_PIXELS
from redco_flow.stages.data.rows import BadRows
from redco_flow.stages.preprocess.heads import head_problems

RECIPE = {"recipe": "image_classification", "settings": {"image_size": 4, "num_channels": 1}}
ROOM = "a row may only name files below"


def image(kind="PNG", value=7):
    file = io.BytesIO()
    Image.new("L", (4, 4), value).save(file, kind)
    return file.getvalue()


def large_png(side):
    """A PNG of 150 bytes that says it has side x side pixels."""

    def chunk(name, content):
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.fixture
def data(bench):
    """A folder with rows of one image, beside a private one."""
    folder = bench.root / "data"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "good.png").write_bytes(image())
    (bench.root / "private.png").write_bytes(image())
    (folder / "link_inside.png").symlink_to(folder / "images" / "good.png")
    (folder / "link_outside.png").symlink_to(bench.root / "private.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "drawing.png").write_bytes(image("EPS"))
    (folder / "bomb.png").write_bytes(large_png(12_000))
    (folder / "huge.png").write_bytes(large_png(60_000))

    def write(*paths):
        rows = [{"image": {"bytes": None, "path": path}, "label": "a"} for path in paths]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return {"train": str(folder / "rows.jsonl"), "validation_fraction": 0.0}

    return write


REFUSED = [
    ("/dev/zero", ROOM),
    ("../private.png", ROOM),
    ("images/../../private.png", ROOM),
    ("link_outside.png", ROOM),
    ("pipe.png", "it is not a regular file"),
    ("images", "it is not a regular file"),
    ("missing.png", "No such file or directory"),
    ("drawing.png", "its content is none of PNG, JPEG"),
    ("bomb.png", f"144,000,000 pixels; at most {MAX_IMAGE_PIXELS:,} are decoded"),
    ("huge.png", "decompression bomb"),
    ("a\0b.png", "embedded null"),
    (3, ""),
]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_path_to_anything_but_an_image_below_the_data_is_a_bad_row(bench, data):
    section = data(*(path for path, _ in REFUSED))

    with pytest.raises(BadRows) as caught:
        bench.run(preprocess, RECIPE | {"data": section})

    lines = str(caught.value).splitlines()
    told = [lines[0].partition("the first ")[2], *lines[1 : len(REFUSED)]]
    for number, (text, (path, why)) in enumerate(zip(told, REFUSED, strict=True), 1):
        start = f"{section['train']}:{number}: field 'image' is no image that can be read: {path}: "
        assert text.strip().startswith(start)
        assert why in text


def test_paths_are_relative_to_the_data_file_and_links_inside_are_followed(bench, data):
    inside = [str(bench.root / "data" / "images" / "good.png"), "images/good.png"]

    made = bench.run(preprocess, RECIPE | {"data": data(*inside, "link_inside.png")})

    rows = DatasetArtifact(made["dataset"].path).split("train")
    assert [row["image"].getpixel((0, 0)) for row in rows] == [7, 7, 7]


def test_paths_of_a_directorys_files_may_begin_at_the_directory(bench, data):
    folder = bench.root / "data"
    data("images/good.png")
    (folder / "lists").mkdir()
    (folder / "rows.jsonl").rename(folder / "lists" / "rows.jsonl")
    section = {"dataset": str(folder), "validation_fraction": 0.0}
    settings = {**RECIPE["settings"], "classes": ["a"]}

    assert not list(head_problems(DataSection.from_json(section), RECIPE["recipe"], settings))
    made = bench.run(preprocess, RECIPE | {"data": section})

    assert len(DatasetArtifact(made["dataset"].path).split("train")) == 1


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_every_format_that_is_named_is_read(bench, data, kind):
    (bench.root / "data" / "images" / "good.png").write_bytes(image(kind))

    made = bench.run(preprocess, RECIPE | {"data": data("images/good.png")})

    (row,) = DatasetArtifact(made["dataset"].path).split("train")
    assert abs(row["image"].convert("L").getpixel((0, 0)) - 7) < 3  # JPEG and WebP round
