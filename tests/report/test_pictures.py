"""Predictions that are pictures are shown as such: PNG files that Pillow reads."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from redco_flow.report.thumbnails import picture_url


def opened(url):
    kind, content = url.split(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


@pytest.mark.parametrize("shape", [(8, 12), (9, 8, 3)])
def test_a_picture_is_a_png_of_its_pixels(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape)

    np.testing.assert_array_equal(opened(picture_url(pixels.tolist())), pixels)


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        3,
        [],
        [[0] * 8] * 7,
        [[0] * 8] * 7 + [[0] * 9],
        [[0.5] * 8] * 8,
        [[256] * 8] * 8,
        [[[0, 0]] * 8] * 8,
        [["a"] * 8] * 8,
        ["text"] * 8,
    ],
    ids=str,
)
def test_what_is_no_picture_is_none(value):
    assert picture_url(value) == ""


def test_a_page_shows_pictures_in_place_of_their_numbers(builder, read_report):
    picture = np.arange(64).reshape(8, 8).tolist()
    dataset = builder.preprocess()["dataset"]
    best = builder.train(dataset)["checkpoint/best/rouge2"]
    line = {"row_id": "g:1", "source": "", "prediction": picture, "references": [picture]}
    builder.predict(best, dataset, [line | {"row": {"caption": "digit one"}}])

    builder.close()
    page = read_report(builder.run)

    assert [image["src"] for image in page.all("img")] == [picture_url(picture)] * 2
    assert 'source {"caption": "digit one"} prediction reference' in page.text
