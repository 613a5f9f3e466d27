"""Handwritten digits as small grey images with their class: those that scikit-learn brings.

A row is {"image": uint8 (8, 8), 0 is paper and 16 ink, "label": 7}. 1,797 of them, from NIST's
forms. scikit-learn's file is read as it is; the package itself is not imported.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 8
"""Of an image, in pixels a side."""

_FILE = "datasets/data/digits.csv.gz"


def files() -> list[Path]:
    """Return the file of all digits.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / _FILE).is_file():
            return [path]
    raise ValueError(
        "scikit-learn, which has the digits, is not installed: pip install 'redco-flow[examples]'."
    )


def rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each digit, in the order of the file."""
    for path in paths:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            for line in lines:
                *pixels, label = map(float, line.split(","))
                image = np.array(pixels, np.uint8).reshape(SIZE, SIZE)
                yield {"image": image, "label": int(label)}
