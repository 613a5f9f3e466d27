"""BLEU-4 with any number of references per example, in percent.

Source: sacrebleu with its defaults (tokenizer 13a, exponential smoothing, case kept). The score
of a set pools n-gram counts; it is not the mean of the examples' scores, which use the
effective n-gram order so that short texts can reach 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redco_flow.metrics.metric import check_pairs

KEYS = {"bleu": "max"}
_MAX_ORDER = 4


def compute(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return corpus BLEU."""
    return from_statistics([sum(c) for c in zip(*statistics(predictions, references), strict=True)])


def per_example(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, list[float]]:
    """Return each example's sentence BLEU (effective order)."""
    return {"bleu": [_percent(score) for score in _sentences(predictions, references)]}


def statistics(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> list[list[float]]:
    """Return per example: matched n-grams (4), predicted n-grams (4), both lengths."""
    return [
        [float(count) for count in (*score.counts, *score.totals, score.sys_len, score.ref_len)]
        for score in _sentences(predictions, references)
    ]


def from_statistics(totals: Sequence[float]) -> dict[str, float]:
    """Return corpus BLEU from the sum of the examples' statistics."""
    from sacrebleu.metrics.bleu import BLEU

    *counts, length, reference_length = [int(total) for total in totals]
    score = BLEU.compute_bleu(
        counts[:_MAX_ORDER], counts[_MAX_ORDER:], length, reference_length, smooth_method="exp"
    )
    return {"bleu": _percent(score)}


def _percent(score: Any) -> float:
    # sacrebleu's logarithms give 100.00000000000004 for a perfect text.
    return min(float(score.score), 100.0)


def _sentences(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[Any]:
    from sacrebleu.metrics.bleu import BLEU

    check_pairs(predictions, references)
    scorer = BLEU(effective_order=True)
    return [
        scorer.sentence_score(prediction, list(texts))
        for prediction, texts in zip(predictions, references, strict=True)
    ]
