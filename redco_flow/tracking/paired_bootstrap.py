"""Confidence intervals and p-values of score differences on equal examples: paired bootstrap.

Koehn 2004: draw the examples with replacement, score all evaluations on the same draw, many times.
Scores that pool counts, such as BLEU, are pooled again for each draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redco_flow.errors import RedcoFlowError
from redco_flow.spec.metric import LikelihoodMetric, PooledMetric, find_any_metric
from redco_flow.tracking.metrics_artifact import MetricsSummary, is_mean
from redco_flow.tracking.score_identity import ScoreIdentity, of_record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RESAMPLES_AT_ONCE = 250


class CannotCompare(RedcoFlowError):
    """The evaluations are not of the same examples, or there are fewer than two."""


@dataclass(frozen=True)
class Evaluation:
    """One metrics artifact, read.

    Args:
        name: for people, and in the records.
        artifact_id: of the metrics artifact.
        lines: one per example: row_id, scores, statistics.
    """

    name: str
    artifact_id: str
    summary: MetricsSummary
    lines: Sequence[dict[str, Any]]


Draws = Mapping[tuple[str, str], "NDArray[np.float64]"]
"""Scores, one per draw, by an evaluation's name and a metric's key."""


def refuse_other_examples(evaluations: Sequence[Evaluation]) -> None:
    """Raise where the evaluations are not of the same rows and references.

    Raises:
        CannotCompare: names the two.
    """
    first = evaluations[0]
    for other in evaluations[1:]:
        if other.summary.examples_digest != first.summary.examples_digest:
            raise CannotCompare(
                f"'{first.name}' and '{other.name}' were not evaluated on the same examples "
                f"({first.summary.num_examples} and {other.summary.num_examples}, or other rows, "
                "prompts or references): evaluate both on the same split of the same data."
            )


def why_not_compared(evaluations: Sequence[Evaluation], key: str) -> str:
    """Say why evaluations are not compared by this key; empty where they are.

    An evaluation has no score of each example, or computes it by another metric or with other
    settings than the first.
    """
    first, *others = evaluations
    for other in others:
        if why := _identity(first, key).comparable_with(_identity(other, key)):
            return f"'{key}' of '{first.name}' and '{other.name}' cannot be compared: {why}"
    rows = _scored_rows(first, key)
    for evaluation in evaluations:
        found = _scored_rows(evaluation, key)
        if not found:
            return (
                f"'{key}' of '{evaluation.name}' is only defined for the full set (its metric has "
                "no per_example, which says how sure a difference is)"
            )
        if found != rows:
            names = f"'{first.name}' and '{evaluation.name}'"
            return f"{names} have scores '{key}' for different rows"
    return ""


def _scored_rows(evaluation: Evaluation, key: str) -> tuple[int, ...]:
    """Return which lines have a score; of several tasks each has its own lines.

    Earlier records of lm-eval's tasks also have values that their score is no mean of.
    """
    scores = {
        row: line["scores"][key]
        for row, line in enumerate(evaluation.lines)
        if key in line["scores"]
    }
    summary = evaluation.summary
    if scores and not summary.modules and not is_mean(summary.metrics[key], [*scores.values()]):
        return ()
    return tuple(scores)


def _identity(evaluation: Evaluation, key: str) -> ScoreIdentity:
    return of_record(evaluation.summary.to_json(), None, key)


def draw_scores(
    evaluations: Sequence[Evaluation],
    keys: Sequence[str],
    *,
    num_resamples: int,
    seed: int,
    on_step: Callable[[int], None] = lambda done: None,
) -> Draws:
    """Return each evaluation's score by each key on each draw; the draws are the same for all.

    Args:
        on_step: called with the number of draws that are done, before each batch of them.
    """
    import numpy as np

    found: dict[tuple[str, str], list[NDArray[np.float64]]] = {}
    by_rows: dict[tuple[int, ...], list[str]] = {}
    for key in keys:
        by_rows.setdefault(_scored_rows(evaluations[0], key), []).append(key)
    groups = [
        (
            np.random.default_rng(seed),
            np.full(len(rows), 1 / len(rows)),
            {(one.name, key): _table(one, key, rows) for one in evaluations for key in fitting},
        )
        for rows, fitting in by_rows.items()
    ]
    for start in range(0, num_resamples, _RESAMPLES_AT_ONCE):
        on_step(start)
        size = min(_RESAMPLES_AT_ONCE, num_resamples - start)
        for rng, shares, tables in groups:
            times = rng.multinomial(len(shares), shares, size=size).astype(np.float64)
            for score, (table, pooled) in tables.items():
                drawn = _scores(times @ table, score[1], pooled, len(shares))
                found.setdefault(score, []).append(drawn)
    return {score: np.concatenate(parts) for score, parts in found.items()}


Pooled = PooledMetric | LikelihoodMetric


def _table(
    evaluation: Evaluation, key: str, rows: Sequence[int]
) -> tuple[NDArray[np.float64], Pooled | None]:
    """Return some examples' summands of a score: counts, or the example's own score."""
    import numpy as np

    lines = [evaluation.lines[row] for row in rows]
    for name in evaluation.summary.modules:
        metric = find_any_metric(name)
        if key in metric.KEYS and isinstance(metric, PooledMetric | LikelihoodMetric):
            return np.array([line["statistics"][name] for line in lines]), metric
    return np.array([[line["scores"][key]] for line in lines]), None


def _scores(
    sums: NDArray[np.float64], key: str, pooled: Pooled | None, num_examples: int
) -> NDArray[np.float64]:
    import numpy as np

    if pooled is None:
        return sums[:, 0] / num_examples
    return np.array([pooled.from_statistics(row.tolist())[key] for row in sums])


def compared(
    first: Evaluation, second: Evaluation, key: str, draws: Draws, confidence: float
) -> dict[str, Any]:
    """Return the difference of two scores, its interval (`low`, `high`) and its p-value."""
    import numpy as np

    differences = draws[first.name, key] - draws[second.name, key]
    tail = (1 - confidence) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    # Two-sided, and never 0: no number of draws can show that.
    one_side = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    p_value = min(1.0, 2 * (one_side + 1) / (len(differences) + 1))
    scores = first.summary.metrics[key], second.summary.metrics[key]
    return {
        "key": key,
        "better": first.summary.directions[key],
        "first": first.name,
        "second": second.name,
        "first_score": scores[0],
        "second_score": scores[1],
        "difference": scores[0] - scores[1],
        "low": float(low),
        "high": float(high),
        "p_value": p_value,
        "is_significant": p_value < 1 - confidence,
    }
