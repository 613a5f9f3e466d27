"""F1 of the positive one of two classes, in percent: the harmonic mean of precision and recall.

The positive class is class number 1, as in GLUE and scikit-learn: the second one in the order that
the data (a `ClassLabel`, folders of images) or `settings.classes` give, the larger of two numbers,
or the one that `metric_settings: {f1: {positive_class: …}}` names. Of more classes take `f1_macro`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redco_flow.metrics.confusion import Class, ClassNames, classes_of, confusion, f1_of

KEYS = {"f1": "max"}
READS = "classes"


@dataclass(frozen=True)
class Settings:
    """Settings of `f1`.

    Args:
        positive_class: whose F1 it is; None: class number 1 in the data's own order.
    """

    positive_class: str | int | None = None


_DEFAULTS = Settings()


def compute(
    predictions: Sequence[Class],
    references: Sequence[Sequence[Class]],
    *,
    settings: Settings = _DEFAULTS,
    classes: ClassNames | None = None,
) -> dict[str, float]:
    """Return the F1 of the positive class; 0 where it is neither true nor predicted.

    Raises:
        ValueError: there are more than two classes, or it is unknown which one is positive.
    """
    counts = confusion(predictions, references)
    known = classes or ClassNames(classes_of(counts), are_ordered=False)
    positive = _positive_class(settings, known, is_complete=classes is not None)
    return {"f1": 100 * f1_of(counts, positive)}


def check_settings(settings: Settings, classes: ClassNames | None) -> None:
    """Refuse classes of which the positive one is unknown.

    Raises:
        ValueError: as `compute`.
    """
    if classes is not None:
        _positive_class(settings, classes, is_complete=True)


def describe_settings(settings: Settings, classes: ClassNames | None) -> dict[str, Any]:
    """Return the positive class, where it is known before anything is scored."""
    if classes is None:
        named = settings.positive_class
        return {} if named is None else {"positive_class": named}
    return {"positive_class": _positive_class(settings, classes, is_complete=True)}


def _positive_class(settings: Settings, classes: ClassNames, *, is_complete: bool) -> Class:
    names = list(classes.names)
    listed = ", ".join(map(str, names[:5])) + (", …" if len(names) > 5 else "")
    if len(names) > 2:
        raise ValueError(f"there are {len(names)} classes ({listed}): use f1_macro.")
    wanted = settings.positive_class
    if wanted is not None:
        found = [name for name in names if str(name) == str(wanted)]
        if is_complete and not found:
            raise ValueError(f"the positive class '{wanted}' is not among the classes: {listed}.")
        return found[0] if found else wanted
    are_numbers = all(str(name).removeprefix("-").isdecimal() for name in names)
    if not classes.are_ordered and not are_numbers:
        raise ValueError(
            f"it is unknown which of the classes {listed} is the positive one: the data give them "
            "no order. Add `metric_settings: {f1: {positive_class: …}}` next to the metrics, or "
            "`settings: {classes: […]}` with the positive class second."
        )
    if not is_complete and set(map(str, names)) <= {"0", "1"}:
        return next((name for name in names if str(name) == "1"), 1)
    return names[-1]
