"""Read `starters.yaml`: for each recipe, the columns of its data, models and first settings.

The table is not in the recipes' `config` modules, whose source is a part of every dataset's
fingerprint: a new name of a column in the table makes no stage run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from redco_flow.spec.model import StrictModel
from redco_flow.spec.yaml import read_yaml

Kind = Literal[
    "any", "text", "class", "number", "decimal", "messages", "turns", "answer", "image", "path"
]
"""What a column has: classes are short texts or whole numbers, decimals are numbers of which some
are not whole, turns are ShareGPT's messages, an answer is a text or messages, and a
path names an image's file, which no recipe reads."""

LENGTH = "LENGTH"
"""In `Starter.scratch`: the number of tokens that the model reads at once."""


class Column(StrictModel):
    """A column that a recipe reads.

    Args:
        names: accepted names, the best first, `is_*` any that begins so; none: the column's key
            is its name.
        by_kind: whether a column of any other name is accepted if no other column is left.
    """

    kind: Kind
    names: list[str] = Field(default_factory=list)
    by_kind: bool = False


class Fit(StrictModel):
    """Columns that are data of a recipe, all of them, and more keys of the section `data`.

    The columns are by the key of `data` that names them (`columns.NAME` of a recipe of rows);
    other keys are names that cannot be changed.

    Args:
        optional: names of columns that are read too where the file has them.
    """

    columns: dict[str, Column]
    optional: list[str] = Field(default_factory=list)
    data: dict[str, Any] = Field(default_factory=dict)


class PublishedModel(StrictModel):
    """A published model: its name on the hub, and its parameters in billions."""

    name: str
    billions: float


class Starter(StrictModel):
    """The first pipeline of a recipe.

    Args:
        task: what is learnt, in a few words.
        models: by the name of the configuration. The first is the default, the smallest one where
            there is no GPU.
        scratch: the model section of a small model without published parameters.
        settings, scratch_settings: of the recipe, around a published model and around `scratch`.
        lengths: the preprocess stage's lengths in tokens (`settings.X`: the recipe's), each with
            the columns whose texts together it limits; max_tokens: the longest.
        learning_rates: of a published model, and of one from scratch.
        data, train: more keys of these sections; `scratch_data`: with a tokenizer that is trained.
        uses_lora: whether published models are trained by low-rank factors.
        best: the score that chooses the checkpoint.
        metrics: of the evaluate stage.
    """

    task: str
    fits: list[Fit]
    models: dict[str, PublishedModel]
    scratch: dict[str, Any]
    settings: dict[str, Any] = Field(default_factory=dict)
    scratch_settings: dict[str, Any] = Field(default_factory=dict)
    lengths: dict[str, list[str]] = Field(default_factory=dict)
    max_tokens: int = 0
    learning_rates: list[float]
    data: dict[str, Any] = Field(default_factory=dict)
    scratch_data: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    uses_lora: bool = False
    best: str
    metrics: list[str]


@cache
def starters() -> Mapping[str, Starter]:
    """Return the table, by recipe."""
    path = Path(__file__).with_suffix(".yaml")
    values = read_yaml(path.read_text(encoding="utf-8"), str(path)).values
    return {recipe: Starter.from_json(one) for recipe, one in values.items()}
