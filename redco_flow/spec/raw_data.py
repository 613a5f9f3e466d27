"""The reading of raw data: the dialect of CSV files, the mapping of splits, unusable rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from redco_flow.spec.model import NonNegativeInt, StrictModel, Text

_PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_ALLOWED = "must be a share of the rows (1 %, or 0.01) or a number of rows (20)"


class CsvDialect(StrictModel):
    """The dialect of csv and tsv files; keys that are left out depend on the file's ending.

    Args:
        delimiter: the character between two fields; None: a comma of csv, a tab of tsv files.
        quoting: `minimal`: a field in double quotes may hold delimiters and line breaks, and `""`
            is a quote; `none`: quotes are characters like any other. None: `minimal` of csv,
            `none` of tsv files.
        column_names: of files without a header line; None: the first line has them.
        skip_rows: lines to skip at the top of each file.
    """

    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    quoting: Literal["minimal", "none"] | None = None
    column_names: Annotated[list[Text], Field(min_length=1)] | None = None
    skip_rows: NonNegativeInt = 0

    @model_validator(mode="after")
    def _can_be_read(self) -> CsvDialect:
        if self.delimiter is not None and self.delimiter in '"\r\n\0':
            raise ValueError(f"'delimiter' cannot be {self.delimiter!r}")
        names = self.column_names or []
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"'column_names' has {twice[0]!r} twice")
        return self


LEFT_OUT = "none"


_SPLITS = ("train", "validation", "test")


def _each_once(given: dict[str, str]) -> dict[str, str]:
    if unknown := [key for key in given if key not in _SPLITS]:
        raise ValueError(
            f"{unknown[0]!r} is none of {', '.join(_SPLITS)}: write {{validation: NAME}}, where "
            "NAME is the data's name of the split"
        )
    names = [name for name in split_names(given).values() if name != LEFT_OUT]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} is two splits: its rows would be in both")
    if given.get("train") == LEFT_OUT:
        raise ValueError("'train' cannot be left out")
    return given


def split_names(given: Mapping[str, str]) -> dict[str, str]:
    """Return the data's name of each split: the given one, else its own."""
    return {split: given.get(split, split) for split in _SPLITS}


SplitNames = Annotated[dict[Text, Text], AfterValidator(_each_once)]
"""Which split of the data is which, where its names are others; LEFT_OUT leaves a split out."""


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
