"""Matthews' correlation of true and predicted classes, -100 to 100; always one class gets 0.

Of two classes the phi coefficient, of more its generalisation by Gorodkin (2004).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from redco_flow.metrics.confusion import Class, confusion

KEYS = {"matthews": "max"}
READS = "classes"


def compute(
    predictions: Sequence[Class], references: Sequence[Sequence[Class]]
) -> dict[str, float]:
    """Return the correlation in percent; 0 where it is not defined."""
    counts = confusion(predictions, references)
    true, found = Counter[Class](), Counter[Class]()
    for (true_class, found_class), count in counts.items():
        true[true_class] += count
        found[found_class] += count
    total = sum(counts.values())
    hits = sum(count for (one, other), count in counts.items() if one == other)
    covariance = hits * total - sum(true[one] * found[one] for one in true)
    spread = math.prod(total**2 - sum(count**2 for count in of.values()) for of in (true, found))
    return {"matthews": 100 * covariance / math.sqrt(spread) if spread else 0.0}
