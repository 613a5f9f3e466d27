"""ROUGE-1, ROUGE-2 and ROUGE-L F-measures with stemming, in percent.

Source: google-research `rouge_score`, which summarisation papers report. With several
references the best one counts, per score. Its tokenizer keeps [a-z0-9] only: texts in other
scripts score 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from redco_flow.metrics.metric import check_pairs

KEYS = {"rouge1": "max", "rouge2": "max", "rougeL": "max"}


def compute(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the mean F-measure of each ROUGE over all examples."""
    scores = per_example(predictions, references)
    return {key: sum(values) / len(values) for key, values in scores.items()}


def per_example(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, list[float]]:
    """Return each example's F-measures against its best reference."""
    from rouge_score.rouge_scorer import RougeScorer

    check_pairs(predictions, references)
    scorer = RougeScorer(list(KEYS), use_stemmer=True)
    scores: dict[str, list[float]] = {key: [] for key in KEYS}
    for prediction, texts in zip(predictions, references, strict=True):
        best = scorer.score_multi(list(texts), prediction)
        for key in KEYS:
            scores[key].append(100.0 * float(best[key].fmeasure))
    return scores
