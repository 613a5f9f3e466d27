"""The reading of raw data: the dialect of CSV files, and the mapping of splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from redco_flow.spec.model import NonNegativeInt, StrictModel, Text


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
