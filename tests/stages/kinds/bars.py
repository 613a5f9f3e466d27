"""Pictures of bars, upright and lying, in several greys, with what they show in words."""

from pathlib import Path

import numpy as np

GREYS = (120, 140, 160, 180, 200, 220, 240, 255)
PLACES = ("first", "second", "third", "fourth")


def files():
    return [Path(__file__)]


def rows(paths):
    for grey in GREYS:
        for index, place in enumerate(PLACES):
            image = np.zeros((8, 8), np.uint8)
            image[2 * index : 2 * index + 2] = grey
            yield {"image": image, "caption": f"{place} bar, lying", "grey": grey}
            yield {"image": image.T, "caption": f"{place} bar, upright", "grey": grey}
