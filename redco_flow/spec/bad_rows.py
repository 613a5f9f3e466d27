"""`data.on_bad_row`: stop at rows that cannot be used, or skip them, up to a limit."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from redco_flow.spec.model import StrictModel

_PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_ALLOWED = "must be a share of the rows (1 %, or 0.01) or a number of rows (20)"


def _checked(value: Any) -> Any:
    share = _share(value)
    is_number_of_rows = type(value) is int and value >= 0
    if not is_number_of_rows and (share is None or not 0 <= share <= 1):
        raise ValueError(_ALLOWED)
    return value


def _share(value: Any) -> float | None:
    """The share of the rows; None of a number of rows, and of what is neither."""
    if isinstance(value, str):
        found = _PERCENTAGE.fullmatch(value.strip())
        return float(found[1]) / 100 if found else None
    return value if isinstance(value, float) and value < 1 else None


class SkipLimit(StrictModel):
    """Skip bad rows, up to a limit beyond which they are an error.

    Args:
        skip: the most bad rows: a share of all rows (`1 %`, or a number below 1 such as 0.01), or a
            number of rows.
    """

    skip: Annotated[str | int | float, BeforeValidator(_checked)]

    def allowed(self, num_rows: int) -> int:
        """Return how many of a number of rows may be bad."""
        share = _share(self.skip)
        if share is None:
            return int(self.skip)
        # 1 % of 300 rows are 3, whatever the nearest binary fraction of 1 % is.
        return int(share * num_rows + 1e-9)

    def __str__(self) -> str:
        return f"{{skip: {self.skip}}}"


def _tag(value: Any) -> str:
    return "limit" if isinstance(value, dict | SkipLimit) else "word"


OnBadRow = Annotated[
    Annotated[Literal["error", "skip"], Tag("word")] | Annotated[SkipLimit, Tag("limit")],
    Discriminator(_tag),
]
"""What is done about a row that cannot be used."""


def allowed_bad_rows(policy: OnBadRow, num_rows: int) -> int | None:
    """Return how many of a number of rows may be bad and are skipped; None: any number."""
    if isinstance(policy, SkipLimit):
        return policy.allowed(num_rows)
    return None if policy == "skip" else 0
