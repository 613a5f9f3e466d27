"""Labels: the targets of a recipe whose `TARGETS` are classes or numbers, read and checked.

The names of classes are those that the pipeline gives, or those that the data bring (a dataset's
`ClassLabel`, the folders of images), or else the targets of the training data, sorted. Every
process reads all rows in one order, so they are the same in all shards and attempts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from redco_flow.errors import some_of
from redco_flow.metrics.confusion import class_order
from redco_flow.recipes.declared import DeclaredRecipe
from redco_flow.recipes.recipe import CLASSES, NUMBERS, Class
from redco_flow.stages.data.row_values import BadValue
from redco_flow.stages.data.rows import kind_of, problem_of_field, problem_of_text
from redco_flow.stages.data.source import Source

MAX_CLASSES = 10_000
_MAX_LISTED = 10

logger = logging.getLogger(__name__)


class ClassLabels:
    """Labels that are classes.

    Args:
        given: the classes' names in the pipeline; where there are none the data tell them.
    """

    def __init__(self, given: Sequence[Class] = ()) -> None:
        self._names: dict[Class, None] = dict.fromkeys(given)
        self._are_all_known = bool(given)
        self._trained: set[Class] = set()

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
            ValueError: there are more classes than any training has.
        """
        own = source.class_names.get(key)
        if own and not self._are_all_known:
            self._names, self._are_all_known = dict.fromkeys(own), True
        name = _class_name(fields, key, own)
        if name not in self._names:
            self._add(name, key, source)
        if source.split == "train":
            self._trained.add(name)
        return name

    @property
    def without_rows(self) -> list[Class]:
        """The classes that no training row is of; some of its rows may be held out."""
        return [name for name in self.names if name not in self._trained]

    def _add(self, name: Class, key: str, source: Source) -> None:
        # Training data are read first: what they lack, later splits cannot have.
        if self._are_all_known or (source.split != "train" and self._names):
            raise _no_class(key, f"{name!r} is none of {some_of(self.names, _MAX_LISTED)}")
        first = next(iter(self._names), name)
        if type(first) is not type(name):
            raise _no_class(key, f"{name!r} is {_kind(name)}, and {first!r} is {_kind(first)}")
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


def _class_name(fields: Mapping[str, Any], key: str, own: Sequence[str] | None) -> Class:
    value: Any = fields.get(key)
    if isinstance(value, str) or key not in fields:
        if problem := problem_of_text(fields, key):
            raise BadValue(*problem)
        return str(value)
    # A column of whole numbers with a null in it is one of floats in pandas, and so in Parquet.
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    if not is_whole and not isinstance(value, int | np.integer | np.bool_):
        raise _no_class(key, f"{kind_of(value)}; classes are texts, whole numbers or booleans")
    number = int(value)
    if not own:
        return number
    if not 0 <= number < len(own):
        raise _no_class(key, f"{number} is no number of its {len(own)} classes")
    return own[number]


def _no_class(key: str, detail: str) -> BadValue:
    return BadValue(f"field '{key}' is no class", detail)


def _kind(name: Class) -> str:
    return "a text" if isinstance(name, str) else "a number"
