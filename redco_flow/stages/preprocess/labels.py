"""Labels: the targets of a recipe whose `TARGETS` are classes or numbers, read and checked.

The names of classes are those that the pipeline gives, or those that the data bring (a dataset's
`ClassLabel`, the folders of images), or else the targets of the training data, sorted. Every
process reads all rows in one order, so they are the same in all shards and attempts.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from redco_flow.errors import some_of
from redco_flow.metrics.confusion import class_order
from redco_flow.recipes.declared import DeclaredRecipe
from redco_flow.recipes.recipe import CLASSES, NUMBERS, Class
from redco_flow.stages.data.row_values import BadValue
from redco_flow.stages.data.rows import problem_of_field, problem_of_text
from redco_flow.stages.data.source import Source

MAX_CLASSES = 10_000
_MAX_LISTED = 10

logger = logging.getLogger(__name__)

_Value = str | bool | int | float


class ClassLabels:
    """Labels that are classes.

    Args:
        given: the classes' names in the pipeline; where there are none the data tell them.
    """

    def __init__(self, given: Sequence[Class] = ()) -> None:
        self._names: dict[Class, None] = dict.fromkeys(given)
        self._are_all_known = bool(given)
        self._trained: set[Class] = set()
        self._first: _Value | None = None

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> list[Class]:
        """The classes, of which the first is number 0."""
        return list(self._names) if self._are_all_known else sorted(self._names, key=class_order)

    @property
    def are_ordered(self) -> bool:
        """Whether the pipeline or the data give the classes in their order."""
        return self._are_all_known

    def read(self, fields: Mapping[str, Any], key: str, source: Source) -> Class:
        """Return the class that a row is of.

        Raises:
            BadValue: the field is missing, or holds no class.
            ValueError: the column is not one of classes, whatever the policy on bad rows: it has
                more of them than any training, or numbers that are not whole.
        """
        value = _value(fields, key)
        own = source.class_names.get(key)
        if own and not self._are_all_known:
            self._names, self._are_all_known = dict.fromkeys(own), True
        if not own:
            self._check_kind(value, key)
        if not isinstance(value, str):
            _check_whole(value, key)
        name = value if isinstance(value, str) else int(value)
        if own and isinstance(name, int):
            name = _own_name(name, key, own)
        if name not in self._names:
            self._add(name, value, key, source)
        if not own and self._first is None:
            self._first = value
        if source.split == "train":
            self._trained.add(name)
        return name

    @property
    def without_rows(self) -> list[Class]:
        """The classes that no training row is of; some of its rows may be held out."""
        return [name for name in self.names if name not in self._trained]

    def _check_kind(self, value: _Value, key: str) -> None:
        """Refuse a value of another type than the first one: true is not the class 1 of 0, 1, 2."""
        if self._first is not None and _kind(value) != _kind(self._first):
            raise _no_class(
                key,
                f"{_written(value)} is {_kind(value)}, and {_written(self._first)} is "
                f"{_kind(self._first)}",
            )

    def _add(self, name: Class, value: _Value, key: str, source: Source) -> None:
        # Training data are read first: what they lack, later splits cannot have.
        if self._are_all_known or (source.split != "train" and self._names):
            known = some_of([*map(_written, self.names)], _MAX_LISTED)
            booleans = "; in settings.classes false is 0 and true is 1" * isinstance(value, bool)
            raise _no_class(key, f"{_written(value)} is none of {known}{booleans}")
        if len(self) == MAX_CLASSES:
            raise ValueError(
                f"field '{key}' holds more than {MAX_CLASSES:,} different values: is it one of "
                "classes? Name the column that is."
            )
        self._names[name] = None


class NumberLabels:
    """Labels that are numbers, or texts of them as in CSV."""

    def read(self, fields: Mapping[str, Any], key: str, _source: Source) -> float:
        """Return the number of a row.

        Raises:
            BadValue: the field is missing, or holds no finite number.
        """
        if problem := problem_of_field(fields, key):
            raise BadValue(*problem)
        value = fields[key]
        is_number = isinstance(value, str | int | float | np.number) and value is not True
        try:
            number = float(value) if is_number and value is not False else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadValue(f"field '{key}' is no number", f"it is {value!r}")
        return number


Labels = ClassLabels | NumberLabels


def labels_for(recipe: DeclaredRecipe, settings: Mapping[str, Any]) -> Labels | None:
    """Return what reads a recipe's targets; None where they are texts, or whatever there is.

    Args:
        settings: the recipe's, as written in YAML.
    """
    if recipe.targets == CLASSES:
        return ClassLabels(settings.get(CLASSES) or ())
    return NumberLabels() if recipe.targets == NUMBERS else None


def tell_missing_classes(labels: Labels | None) -> None:
    """Log the classes that no training row is of: a model cannot learn them."""
    if isinstance(labels, ClassLabels) and (missing := labels.without_rows):
        logger.warning(
            "no training row has the class %s: is the name in settings.classes right?",
            some_of(missing, _MAX_LISTED),
        )


def class_names(labels: Labels | None) -> list[Class] | None:
    """Return the classes after all rows were read; None where there are none."""
    return labels.names if isinstance(labels, ClassLabels) else None


def are_ordered(labels: Labels | None) -> bool | None:
    """Return whether the pipeline or the data order the classes; None where there are none."""
    return labels.are_ordered if isinstance(labels, ClassLabels) else None


def _value(fields: Mapping[str, Any], key: str) -> _Value:
    """Return a field's text, boolean or finite number."""
    value: Any = fields.get(key)
    if isinstance(value, str) or key not in fields:
        if problem := problem_of_text(fields, key):
            raise BadValue(*problem)
        return str(value)
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, int) and not (isinstance(value, float) and math.isfinite(value)):
        detail = f"it is {_written(value)}; classes are texts, whole numbers or booleans"
        raise _no_class(key, detail)
    return value


def _check_whole(value: float, key: str) -> None:
    # A column of whole numbers with a null in it is one of floats in pandas, and so in Parquet.
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(
            f"field '{key}' holds {value}, so it is not one of classes: numbers are learnt by "
            "recipe regression."
        )


def _own_name(number: int, key: str, own: Sequence[str]) -> str:
    """Return the name that the data give a class."""
    if not 0 <= number < len(own):
        raise _no_class(key, f"{number} is no number of its {len(own)} classes")
    return own[number]


def _no_class(key: str, detail: str) -> BadValue:
    return BadValue(f"field '{key}' is no class", detail)


def _kind(value: _Value) -> str:
    if isinstance(value, bool):
        return "a boolean"
    return "a text" if isinstance(value, str) else "a number"


def _written(value: Any) -> str:
    """Return a value as files have it, shortened."""
    is_word = value is None or isinstance(value, bool)
    return json.dumps(value) if is_word else reprlib.repr(value)
