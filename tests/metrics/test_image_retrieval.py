"""Image retrieval: whether the true image nearest to a picture has the picture's caption."""

import numpy as np
import pytest

from redco_flow.metrics import image_retrieval

ROWS = [
    {"caption": "dark", "image": [[0, 0], [0, 10]]},
    {"caption": "dark", "image": [[20, 0], [0, 0]]},
    {"caption": "light", "image": [[250, 250], [250, 250]]},
    {"caption": "left", "image": [[255, 0], [255, 0]]},
]
IMAGES = [row["image"] for row in ROWS]


def test_true_images_show_their_captions():
    assert image_retrieval.compute(IMAGES, ROWS) == {"image_retrieval": 100.0}


def test_a_picture_counts_that_is_nearest_to_any_image_of_its_caption():
    pictures = [IMAGES[1], IMAGES[0], [[255, 0], [255, 255]], [[90, 0], [90, 0]]]

    found = image_retrieval.per_example(pictures, ROWS)

    # The third lacks one corner of light and has one more than left: the nearer is told by hand,
    # 3 · 5² + 250² of light, 255² of left. The fourth: 2 · 90² + 10² of dark, 2 · 165² of left.
    assert found == {"image_retrieval": [100.0, 100.0, 100.0, 0.0]}


def test_the_mean_of_all_images_is_one_picture_for_all_captions():
    (mean,) = image_retrieval.baselines(ROWS).values()

    np.testing.assert_allclose(mean, [np.mean(IMAGES, axis=0)] * 4)
    # It is nearest to the second, whose caption two of four rows have.
    assert image_retrieval.compute(mean, ROWS) == {"image_retrieval": 50.0}


@pytest.mark.parametrize(
    ("predictions", "rows", "message"),
    [
        ([], [], "nothing to score"),
        (IMAGES[:3], ROWS, "as many of the same size"),
        ([[[0]]] * 4, ROWS, "as many of the same size"),
        (["a"] * 4, ROWS, "no arrays of numbers"),
        (IMAGES, [{"caption": "dark"}] * 4, "a column 'image' of the rows, which have caption"),
    ],
)
def test_what_cannot_be_compared_is_told(predictions, rows, message):
    with pytest.raises(ValueError, match=message):
        image_retrieval.compute(predictions, rows)
