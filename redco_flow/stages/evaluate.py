"""evaluate: predictions in, scores out: of the whole set, of each example, of trivial baselines.

A score means little alone, so each is stored beside what two models that learnt nothing get: one
that always says the most frequent training target, and one that repeats its source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from redco_flow.metrics.metric import Metric, PooledMetric, find_metric, metric_module
from redco_flow.records import digest_json, write_json
from redco_flow.spec.model import Text
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.context import Output, StageContext, StageOutputs
from redco_flow.stages.metrics_artifact import LINES_FILE, SUMMARY_FILE, MetricsSummary
from redco_flow.stages.predictions_artifact import Prediction, read_predictions
from redco_flow.stages.provenance import provenance_of

INPUTS = {"predictions": InputSlot(kind="predictions")}
OUTPUTS = {"metrics": "metrics"}

Texts = Sequence[str]
References = Sequence[Sequence[str]]


class Config(StageConfig):
    """Evaluation.

    Args:
        metrics: names of metrics of this package, or dotted modules.
    """

    metrics: list[Text] = Field(default_factory=lambda: ["rouge"], min_length=1)

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: list[str]) -> list[str]:
        for name in metrics:
            find_metric(name)
        if len(set(metrics)) < len(metrics):
            raise ValueError("names a metric twice")
        return metrics


@dataclass(frozen=True)
class _Example:
    """One line of per_example.jsonl."""

    row_id: str
    scores: dict[str, float]
    statistics: dict[str, list[float]]


def code_modules(config: Config) -> list[str]:
    """The metrics."""
    return [metric_module(name) for name in config.metrics]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Score the predictions and two trivial baselines."""
    predictions, source = read_predictions(context.input("predictions").path)
    references = [line.references for line in predictions]
    texts = [line.prediction for line in predictions]
    provenance = provenance_of(context, config, data=source.data)
    metrics = {name: find_metric(name) for name in config.metrics}
    context.report(phase="scoring", step=0, total_steps=len(metrics))
    frequent = str(source.most_frequent_target["text"])
    copied = [line.source for line in predictions]
    baselines: dict[str, dict[str, Any]] = {
        "most_frequent_target": {
            "text": frequent,
            "metrics": _compute(context, metrics, [frequent] * len(texts), references),
        },
        "copy_source": {"text": None, "metrics": _compute(context, metrics, copied, references)},
    }
    summary = MetricsSummary(
        metrics=_compute(context, metrics, texts, references),
        directions={key: way for metric in metrics.values() for key, way in metric.KEYS.items()},
        modules=list(metrics),
        baselines=baselines,
        num_examples=len(predictions),
        split=source.split,
        step=source.step,
        predictions=context.input("predictions").id,
        checkpoint=source.checkpoint,
        data=provenance.data,
        config=provenance.config,
        examples_digest=digest_json([[line.row_id, line.references] for line in predictions]),
    )
    folder = context.work_dir / "metrics"
    _write(folder, summary, _per_example(metrics, predictions))
    record = {"kind": "evaluation", "step": source.step, "metrics": summary.metrics}
    digests = {"checkpoint": source.checkpoint, "data": source.data, "config": provenance.config}
    context.log_metrics(record | digests)
    return StageOutputs(
        {"metrics": Output("metrics", folder, summary.to_json())}, dict(summary.metrics)
    )


def _compute(
    context: StageContext, metrics: dict[str, Metric], texts: Texts, references: References
) -> dict[str, float]:
    scores: dict[str, float] = {}
    for name, metric in metrics.items():
        context.raise_if_stopped()
        context.report(phase=f"scoring {name}")
        scores |= metric.compute(texts, references)
    return scores


def _per_example(metrics: dict[str, Metric], predictions: list[Prediction]) -> list[_Example]:
    texts = [line.prediction for line in predictions]
    references = [line.references for line in predictions]
    examples = [_Example(line.row_id, {}, {}) for line in predictions]
    for name, metric in metrics.items():
        for key, scores in metric.per_example(texts, references).items():
            for example, score in zip(examples, scores, strict=True):
                example.scores[key] = score
        if isinstance(metric, PooledMetric):
            statistics = metric.statistics(texts, references)
            for example, counts in zip(examples, statistics, strict=True):
                example.statistics[name] = counts
    return examples


def _write(folder: Path, summary: MetricsSummary, examples: list[_Example]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (folder / LINES_FILE).open("w", encoding="utf-8") as file:
        for example in examples:
            line: dict[str, Any] = {
                "row_id": example.row_id,
                "scores": example.scores,
                "statistics": example.statistics,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    write_json(folder / SUMMARY_FILE, summary.to_json())
