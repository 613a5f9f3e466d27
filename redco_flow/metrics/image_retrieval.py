"""Image retrieval: whether a picture shows its caption, told by the true image nearest to it.

The share of predicted pictures, in percent, whose nearest image of the whole set (by the mean
squared difference of pixels) has the same caption. Rows have `caption` and `image`, (H, W) or
(H, W, 3), and pictures have the images' shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEYS = {"image_retrieval": "max"}
READS = "rows"

Row = Mapping[str, Any]


def compute(predictions: Sequence[Any], references: Sequence[Row]) -> dict[str, float]:
    """Return the percentage of pictures that show what was asked.

    Raises:
        ValueError: nothing to score, a row without caption or image, or shapes that differ.
    """
    scores = per_example(predictions, references)["image_retrieval"]
    return {"image_retrieval": sum(scores) / len(scores)}


def per_example(predictions: Sequence[Any], references: Sequence[Row]) -> dict[str, list[float]]:
    """Return 100.0 or 0.0 for each example.

    Raises:
        ValueError: as `compute`.
    """
    captions = [_column(row, "caption") for row in references]
    images = _pixels([_column(row, "image") for row in references], "images")
    pictures = _pixels(predictions, "pictures")
    if pictures.shape != images.shape:
        raise ValueError(
            f"the pictures are (examples, pixels) {pictures.shape} and the images {images.shape}: "
            "there must be as many of the same size."
        )
    nearest = [captions[index] for index in _nearest(pictures, images)]
    pairs = zip(nearest, captions, strict=True)
    return {"image_retrieval": [100.0 if found == wanted else 0.0 for found, wanted in pairs]}


def baselines(references: Sequence[Row]) -> dict[str, list[Any]]:
    """Return what draws the mean of all images, whatever the caption."""
    import numpy as np

    images = np.array([_column(row, "image") for row in references], np.float64)
    return {"mean_image": [images.mean(axis=0).tolist()] * len(references)}


def _column(row: Row, name: str) -> Any:
    if name in row:
        return row[name]
    raise ValueError(
        f"the metric reads a column '{name}' of the rows, which have {', '.join(row) or 'none'}."
    )


def _pixels(images: Sequence[Any], what: str) -> NDArray[np.float64]:
    """Return (N, pixels)."""
    import numpy as np

    if not images:
        raise ValueError(f"there is nothing to score: no {what}.")
    try:
        return np.array(images, np.float64).reshape(len(images), -1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {what} are no arrays of numbers of one shape: {error}") from error


def _nearest(pictures: NDArray[np.float64], images: NDArray[np.float64]) -> list[int]:
    """Return the number of the image nearest to each picture, the first one of equals."""
    import numpy as np

    # One picture at a time: all differences of all pairs would not fit into memory.
    return [int(np.argmin(np.square(images - picture).sum(axis=1))) for picture in pictures]
