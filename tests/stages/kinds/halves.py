"""Pictures of which one half is dark, upright or lying, with what they show in words."""

from pathlib import Path

import numpy as np

GREYS = tuple(range(192, 256))
PLACES = ("first", "last")


def files():
    return [Path(__file__)]


def rows(paths):
    for grey in GREYS:
        for index, place in enumerate(PLACES):
            image = np.zeros((8, 8), np.uint8)
            image[4 * index : 4 * index + 4] = grey
            yield {"image": image, "caption": f"{place} half, lying", "grey": grey}
            yield {"image": image.T, "caption": f"{place} half, upright", "grey": grey}
