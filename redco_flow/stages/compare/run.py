"""compare: two or more evaluations in, how sure their differences are out (paired bootstrap)."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Sequence
from typing import Any

from redco_flow.records import write_json
from redco_flow.runtime.context import InputArtifact, Output, StageContext, StageOutputs
from redco_flow.stages.compare.config import Config
from redco_flow.stages.paired_bootstrap import (
    CannotCompare,
    Draws,
    Evaluation,
    compared,
    draw_scores,
    refuse_other_examples,
    why_not_compared,
)
from redco_flow.tracking.metrics_artifact import read_metrics

COMPARISON_FILE = "comparison.json"

logger = logging.getLogger(__name__)


def run(context: StageContext, config: Config) -> StageOutputs:
    """Compare every pair of the evaluations by every score that both have.

    Raises:
        CannotCompare: they are not of the same examples, or have nothing in common.
    """
    evaluations = _evaluations(context.inputs.get("metrics", ()))
    first = evaluations[0].summary
    common = [key for key in first.metrics if all(key in e.summary.metrics for e in evaluations)]
    if not common:
        raise CannotCompare("the evaluations have no score in common; evaluate the same metrics.")
    not_compared = {key: why for key in common if (why := why_not_compared(evaluations, key))}
    keys = [key for key in common if key not in not_compared]
    if not keys:
        raise CannotCompare("; ".join(not_compared.values()) + ": nothing is left to compare.")
    for why in not_compared.values():
        logger.warning("not compared: %s", why)
    draws = _draw(context, evaluations, keys, config)
    pairs = [
        compared(one, other, key, draws, config.confidence)
        for key in keys
        for one, other in itertools.combinations(evaluations, 2)
    ]
    folder = context.work_dir / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = {
        "format": 1,
        "num_examples": first.num_examples,
        "num_resamples": config.num_resamples,
        "confidence": config.confidence,
        "seed": config.seed,
        "systems": [_described(evaluation) for evaluation in evaluations],
        "pairs": pairs,
        "not_compared": not_compared,
    }
    write_json(folder / COMPARISON_FILE, record)
    differences = {f"{p['key']}({p['first']}-{p['second']})": p["difference"] for p in pairs}
    return StageOutputs({"metrics": Output("metrics", folder, record)}, differences)


def _evaluations(artifacts: Sequence[InputArtifact]) -> list[Evaluation]:
    if len(artifacts) < 2:
        raise CannotCompare(f"{len(artifacts)} evaluation given; comparing takes at least two.")
    stages = [artifact.manifest.get("produced_by", {}).get("stage") for artifact in artifacts]
    evaluations = []
    for artifact, stage in zip(artifacts, stages, strict=True):
        # Two evaluations by one stage (of two runs, say) are distinguished by their ids.
        name = stage if stage and stages.count(stage) == 1 else artifact.id[:12]
        evaluations.append(Evaluation(name, artifact.id, *read_metrics(artifact.path)))
    refuse_other_examples(evaluations)
    return evaluations


def _draw(
    context: StageContext, evaluations: Sequence[Evaluation], keys: Sequence[str], config: Config
) -> Draws:
    def on_step(done: int) -> None:
        context.raise_if_stopped()
        context.report(phase="resampling", step=done, total_steps=config.num_resamples)

    return draw_scores(
        evaluations, keys, num_resamples=config.num_resamples, seed=config.seed, on_step=on_step
    )


def _described(evaluation: Evaluation) -> dict[str, Any]:
    summary = evaluation.summary
    return {
        "name": evaluation.name,
        "metrics_artifact": evaluation.artifact_id,
        "checkpoint": summary.checkpoint,
        "data": summary.data,
        "config": summary.config,
        "metrics": dict(summary.metrics),
    }
