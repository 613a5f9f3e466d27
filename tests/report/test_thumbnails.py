"""Samples show the images of their rows: small, drawn again, without anything but pixels."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from redco_flow.records import write_json
from redco_flow.report.thumbnails import thumbnail
from redco_flow.stages.artifacts.arrow_split import SplitWriter
from redco_flow.stages.artifacts.dataset import ROW_COLUMNS, DatasetSummary
from redco_flow.stages.data.row_values import pack_row

RED = np.zeros((300, 200, 3), np.uint8)
RED[..., 0] = 255


def file_of(pixels, kind, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def opened(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_file_becomes_a_small_picture_without_its_metadata(kind):
    comment = {"exif": Image.Exif()}
    comment["exif"][0x010E] = "<script>secret</script>"
    options = comment if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}
    content = file_of(RED, kind, **options)

    url = thumbnail(Image.open(io.BytesIO(content)))

    shown = opened(url)
    assert (shown.width, shown.height) == (85, 128)
    assert np.abs(np.asarray(shown.convert("RGB"), int) - [255, 0, 0]).max() < 16  # JPEG
    assert b"secret" not in base64.b64decode(url.partition("base64,")[2])
    assert not shown.getexif()


def test_arrays_are_drawn_with_their_largest_number_as_white():
    pixels = np.random.default_rng(0).integers(0, 17, (8, 8)).astype(np.float64)
    pixels[0, 0] = 16

    np.testing.assert_array_equal(
        np.asarray(opened(thumbnail(pixels))), np.round(pixels * 255 / 16)
    )


@pytest.mark.parametrize(
    "content",
    [
        file_of(RED, "PNG")[:300],
        file_of(RED, "TGA"),
        # A header that claims 30,000 x 30,000 pixels.
        b"P5 30000 30000 255\n" + bytes(100),
    ],
    ids=["cut off", "another format", "too many pixels"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_decoded_safely_has_no_picture(content):
    try:
        image = Image.open(io.BytesIO(content))
    except Image.DecompressionBombError:
        return  # Pillow itself refuses to open it
    assert thumbnail(image) == ""


def test_a_page_shows_the_image_of_a_row_and_not_its_label_as_the_input(builder, read_report):
    folder = builder.write("dataset.json", "").parent
    pixels = np.tile(np.arange(16, dtype=np.uint8), (16, 1))
    rows = [{"image": pixels, "label": "circle", "room": "hall"}, {"label": "square"}]
    with SplitWriter(folder / "test-00000.arrow", ROW_COLUMNS) as writer:
        ids = [f"a:{number}" for number in range(len(rows))]
        writer.write({"row_id": ids, "row": list(map(pack_row, rows))})
    nothing = {"source_prefix": "", "source_suffix": "", "tokenizer": {}, "skipped_rows": {}}
    lengths = {"max_source_length": 0, "max_target_length": 0, "most_frequent_target": {}}
    summary = DatasetSummary(
        recipe="image_classification", target="label", splits={"test": {"rows": 2}},
        files={"test": ["test-00000.arrow"]}, **nothing, **lengths,
    )  # fmt: skip
    write_json(folder / "dataset.json", summary.to_json())
    dataset = builder.complete("preprocess", {"dataset": folder})["dataset"]
    best = builder.train(dataset)["checkpoint/best/rouge2"]
    lines = [
        {
            "row_id": row_id,
            "source": "",
            "prediction": "circle",
            "references": [row["label"]],
            "row": {key: value for key, value in row.items() if key != "image"},
        }
        for row_id, row in zip(ids, rows, strict=True)
    ]
    builder.predict(best, dataset, lines, target="label")

    builder.close()
    page = read_report(builder.run)

    assert [image["src"] for image in page.all("img")] == [thumbnail(pixels)]
    assert 'source {"room": "hall"} prediction circle reference circle' in page.text
    assert "label" not in page.text
