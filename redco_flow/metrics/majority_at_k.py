"""majority@k: the share of prompts whose commonest answer among the first k is right, in percent.

Self-consistency: equal answers are one, a text without an answer has no vote, and of answers that
are equally common the first one counts.
Source: Wang et al. 2023, arXiv 2203.11171.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from redco_flow.spec.metric import Verdict

KEYS = {"majority@k": "max"}


def of_answers(verdicts: Sequence[Sequence[Verdict]], k: int) -> list[float]:
    """Score each prompt, 100.0 or 0.0, by its first k answers; it has at least k."""
    return [100.0 if _is_majority_right(each[:k]) else 0.0 for each in verdicts]


def _is_majority_right(verdicts: Sequence[Verdict]) -> bool:
    votes = Counter(one.answer for one in verdicts if one.answer is not None)
    if not votes:
        return False
    # Of equal counts `most_common` has the one first that was met first.
    [(commonest, _)] = votes.most_common(1)
    return next(one.is_right for one in verdicts if one.answer == commonest)
