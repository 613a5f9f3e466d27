"""pass@k: how likely one of k answers to a prompt is right, in percent, by the unbiased estimator.

Of n answers of which c are right, the share of all choices of k answers that have a right one:
1 - C(n - c, k) / C(n, k).
Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from redco_flow.spec.metric import Verdict

KEYS = {"pass@k": "max"}


def of_answers(verdicts: Sequence[Sequence[Verdict]], k: int) -> list[float]:
    """Score each prompt by all of its answers, of which there are at least k."""
    return [100.0 * pass_at_k(len(each), sum(one.is_right for one in each), k) for each in verdicts]


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Return the probability that k of the answers, drawn without replacement, have a right one."""
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)
