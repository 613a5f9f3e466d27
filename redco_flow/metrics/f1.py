"""F1 of the positive one of two classes, in percent: the harmonic mean of precision and recall.

The positive class is the last in order: 1 of 0 and 1, `yes` of `no` and `yes`. Of more classes take
`f1_macro`.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.metrics.confusion import Class, classes_of, confusion, f1_of

KEYS = {"f1": "max"}
READS = "classes"


def compute(
    predictions: Sequence[Class], references: Sequence[Sequence[Class]]
) -> dict[str, float]:
    """Return the F1 of the positive class; 0 where it is neither true nor predicted.

    Raises:
        ValueError: there are more than two classes.
    """
    counts = confusion(predictions, references)
    classes = classes_of(counts)
    if len(classes) > 2:
        listed = ", ".join(map(str, classes[:5]))
        raise ValueError(f"there are {len(classes)} classes ({listed}, …): take f1_macro.")
    return {"f1": 100 * f1_of(counts, classes[-1])}
