"""Which system is better, and how sure that is: the results of comparing stages.

Reads what a comparison's artifact says; tests nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redco_flow.report.metrics_table import metrics_artifact
from redco_flow.report.number_format import signed
from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.artifacts import ArtifactStore


@dataclass(frozen=True)
class ComparisonRow:
    """One pair of systems by one metric.

    Args:
        interval: of the difference.
        verdict: who is better, if that is significant.
    """

    metric: str
    first: str
    first_score: float
    second: str
    second_score: float
    difference: str
    interval: str
    p_value: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """One comparing stage.

    Args:
        confidence: in percent, of intervals and verdicts.
    """

    stage: str
    num_examples: int
    num_resamples: int
    confidence: str
    rows: tuple[ComparisonRow, ...]


def comparisons(stages: Iterable[StageFacts], store: ArtifactStore) -> list[Comparison]:
    """Return the comparisons that a run's stages made."""
    found = []
    for stage in stages:
        artifact = metrics_artifact(stage, store)
        if artifact is not None and "pairs" in artifact.metadata:
            found.append(_comparison(stage.name, artifact.metadata))
    return found


def _comparison(stage: str, record: Mapping[str, Any]) -> Comparison:
    return Comparison(
        stage=stage,
        num_examples=int(record["num_examples"]),
        num_resamples=int(record["num_resamples"]),
        confidence=f"{100 * record['confidence']:g}",
        rows=tuple(_row(pair) for pair in record["pairs"]),
    )


def _row(pair: Mapping[str, Any]) -> ComparisonRow:
    first_is_better = (pair["difference"] > 0) == (pair["better"] == "max")
    better = pair["first"] if first_is_better else pair["second"]
    return ComparisonRow(
        metric=str(pair["key"]),
        first=str(pair["first"]),
        first_score=float(pair["first_score"]),
        second=str(pair["second"]),
        second_score=float(pair["second_score"]),
        difference=signed(pair["difference"]),
        interval=f"{signed(pair['low'])} to {signed(pair['high'])}",
        p_value=f"{pair['p_value']:.2g}",
        verdict=f"{better} is better" if pair["is_significant"] else "not significant",
    )
