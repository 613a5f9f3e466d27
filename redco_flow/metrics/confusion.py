"""Counts of true and predicted classes, which several metrics and the report are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redco_flow.spec.metric import check_pairs

Class = str | int
Counts = Mapping[tuple[Class, Class], int]


class ClassNames(NamedTuple):
    """The classes of a dataset.

    Args:
        names: class number 0 first.
        are_ordered: whether the data or the pipeline give this order; otherwise the names were
            collected from the training rows and sorted.
    """

    names: Sequence[Class]
    are_ordered: bool

    @classmethod
    def recorded(
        cls, names: Sequence[Class] | None, *, are_ordered: bool | None
    ) -> ClassNames | None:
        """Return the classes of a record; None where it has none. Old records have no order."""
        return None if names is None else cls(names, bool(are_ordered))


def confusion(predictions: Sequence[Class], references: Sequence[Sequence[Class]]) -> Counts:
    """Count the examples by (true class, predicted class).

    Of several references the one that was predicted is the true class, or else the first.
    """
    check_pairs(predictions, references)
    pairs = zip(predictions, references, strict=True)
    return Counter((found if found in true else true[0], found) for found, true in pairs)


def classes_of(counts: Counts, known: ClassNames | None = None) -> list[Class]:
    """Return every class that is true or predicted: in the data's order, then the others sorted.

    Sorted as `class_order` does.
    """
    found = {one for pair in counts for one in pair}
    place = {name: number for number, name in enumerate(known.names if known else ())}
    return sorted(found, key=lambda one: (place.get(one, len(place)), *class_order(one)))


def class_order(name: Class) -> tuple[bool, int, str]:
    """Sort numbers, and texts of digits as in CSV, by what they count; other texts behind them."""
    text = str(name)
    is_number = text.removeprefix("-").isdecimal() and len(text) < 4300  # what int() reads
    return not is_number, int(text) if is_number else 0, text


def f1_of(counts: Counts, one: Class) -> float:
    """Return the F1 of one class, 0 to 1: the harmonic mean of its precision and recall."""
    hits = counts.get((one, one), 0)
    others = sum(
        count * ((true == one) + (found == one)) for (true, found), count in counts.items()
    )
    return 2 * hits / others if others else 0.0


def as_table(counts: Counts, max_classes: int, known: ClassNames | None = None) -> dict[str, Any]:
    """Return JSON of the counts: `classes`, and `counts` by true and by predicted class.

    Args:
        max_classes: the number of most frequent classes that have a row and a column; the others
            share one, which is called None.
        known: the data's classes, in whose order the rows are.
    """
    classes = classes_of(counts, known)
    if len(classes) > max_classes:
        common = Counter[Class]()
        for (true, _), count in counts.items():
            common[true] += count
        kept = set(sorted(classes, key=lambda one: -common[one])[:max_classes])
        classes = [one for one in classes if one in kept]
    names: list[Class | None] = list(classes)
    if any(one not in classes for pair in counts for one in pair):
        names.append(None)
    place = {name: number for number, name in enumerate(names)}
    table = [[0] * len(names) for _ in names]
    for (true, found), count in counts.items():
        table[place.get(true, len(classes))][place.get(found, len(classes))] += count
    return {"classes": names, "counts": table}
