"""evaluate: predictions in, scores out: of the whole set, of each example, of trivial baselines.

A score means little alone, so each is stored beside what models that learnt nothing get: one that
always says the most frequent training target, or the mean of them where they are numbers, and, of
texts, one that repeats its source. A metric of rows brings baselines of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.metrics.confusion import ClassNames, as_table, classes_of, confusion
from redco_flow.metrics.settings import configured_metric, described_settings, warnings_of
from redco_flow.records import digest_json
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.metric import (
    AnswersMetric,
    AnyMetric,
    ExampleMetric,
    LikelihoodMetric,
    Metric,
    MetricWithBaselines,
    PooledMetric,
    counts_bytes,
    reads_of,
)
from redco_flow.stages.artifacts.predictions import (
    PredictionsSummary,
    Targets,
    read_predictions,
    warnings_on_keys,
)
from redco_flow.stages.evaluate.config import Config
from redco_flow.stages.evaluate.judge import JUDGED_FILE, Judgement, judge
from redco_flow.stages.provenance import provenance_of
from redco_flow.tracking.metrics_artifact import MetricsSummary, Prediction, write_metrics

logger = logging.getLogger(__name__)

_MAX_ROWS = 12
_MAX_CLASSES = 1000  # more are texts of which hardly two are the same


class CannotEvaluate(RedcoFlowError):
    """The predictions lack what a metric reads."""


@dataclass(frozen=True)
class _Example:
    """One line of per_example.jsonl."""

    row_id: str
    scores: dict[str, float]
    statistics: dict[str, list[float]]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Score the predictions and, where texts or classes are scored, trivial baselines.

    Raises:
        CannotEvaluate, CannotJudge: the predictions lack what a metric reads.
    """
    predictions, source = read_predictions(context.input("predictions").path)
    targets = Targets.of_lines(predictions, source.target or "")
    found = [line.prediction for line in predictions]
    provenance = provenance_of(context, config, data=source.data)
    all_metrics = _configured(config, source)
    metrics = {name: metric for name, metric in all_metrics.items() if isinstance(metric, Metric)}
    likelihoods = _likelihoods(predictions, all_metrics)
    judgement = _judge(context, config, all_metrics, predictions)
    context.report(phase="scoring", step=0, total_steps=len(metrics))
    by_metric = _scores_by_metric(context, metrics, found, targets)
    warnings = _warnings(metrics, targets, by_metric)
    summary = MetricsSummary(
        metrics={**_joined(by_metric), **likelihoods.scores, **judgement.scores},
        directions={**_directions(all_metrics), **judgement.directions},
        modules=list(all_metrics),
        baselines=_baselines(context, metrics, predictions, source, targets)
        | _own_baselines(metrics, targets),
        num_examples=len(predictions),
        split=source.split,
        step=source.step,
        predictions=context.input("predictions").id,
        checkpoint=source.checkpoint,
        data=provenance.data,
        config=provenance.config,
        examples_digest=digest_json([[line.row_id, line.references] for line in predictions]),
        confusion=_confusion(metrics, found, targets, source.class_names),
        parts=_by_part(all_metrics, predictions, source, judgement) or None,
        judged=judgement.counts,
        settings=_settings_in_use(all_metrics) or None,
        warnings=warnings or None,
    )
    folder = context.work_dir / "metrics"
    examples = _per_example(metrics, predictions, targets)
    likelihoods.add_to(examples)
    judgement.add_to([example.scores for example in examples])
    write_metrics(folder, summary, map(asdict, examples))
    judgement.write(folder / JUDGED_FILE, predictions)
    record = {"kind": "evaluation", "step": source.step, "metrics": summary.metrics}
    digests = {"checkpoint": source.checkpoint, "data": source.data, "config": provenance.config}
    context.log_metrics(record | digests)
    output = Output("metrics", folder, summary.to_json())
    return StageOutputs({"metrics": output}, dict(summary.metrics))


def _configured(config: Config, source: PredictionsSummary) -> dict[str, AnyMetric]:
    """Return the metrics with their settings, which are refused before anything is scored."""
    found = {}
    for name in config.metrics:
        try:
            found[name] = configured_metric(name, config.metric_settings, source.class_names)
        except ValueError as error:
            raise CannotEvaluate(f"{name}: {error}") from error
    return found


def _settings_in_use(metrics: Mapping[str, AnyMetric]) -> dict[str, dict[str, Any]]:
    """Return the settings of each metric that has some, and log them."""
    found = {name: described_settings(metric) for name, metric in metrics.items()}
    for name, settings in found.items():
        if settings:
            listed = ", ".join(f"{key} {value}" for key, value in settings.items())
            logger.info("%s: %s", name, listed)
    return {name: settings for name, settings in found.items() if settings}


def _warnings(
    metrics: Mapping[str, Metric], targets: Targets, scores: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Return what makes scores doubtful, and log it."""
    found = [
        warning
        for name, metric in metrics.items()
        for warning in (
            *warnings_of(metric, targets.of(metric)),
            *warnings_on_keys(name, metric, scores[name]),
        )
    ]
    for warning in found:
        logger.warning("%s", warning)
    return found


def _scores_by_metric(
    context: StageContext,
    metrics: Mapping[str, Metric],
    predictions: Sequence[Any],
    targets: Targets,
) -> dict[str, dict[str, float]]:
    found = {}
    for name, metric in metrics.items():
        context.raise_if_stopped()
        context.report(phase=f"scoring {name}")
        try:
            found[name] = targets.score(name, metric, predictions)
        except ValueError as error:
            raise CannotEvaluate(f"{name}: {error}") from error
    return found


def _joined(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the scores of all metrics by their keys."""
    return {key: score for of_metric in scores.values() for key, score in of_metric.items()}


def _directions(metrics: Mapping[str, AnyMetric]) -> dict[str, str]:
    """Say which of two scores is better; of judged answers the judgement says it, for each k."""
    plain = [one for one in metrics.values() if not isinstance(one, AnswersMetric)]
    return {key: way for metric in plain for key, way in metric.KEYS.items()}


def _judge(
    context: StageContext,
    config: Config,
    metrics: Mapping[str, AnyMetric],
    predictions: Sequence[Prediction],
) -> Judgement:
    def on_progress(done: int, total: int) -> None:
        context.report(phase="judging", step=done, total_steps=total)
        context.raise_if_stopped()

    asked = {name: one for name, one in metrics.items() if isinstance(one, AnswersMetric)}
    return judge(config.judge, asked, predictions, on_progress)


def _by_part(
    metrics: Mapping[str, AnyMetric],
    predictions: Sequence[Prediction],
    source: PredictionsSummary,
    judgement: Judgement,
) -> dict[str, dict[str, Any]]:
    """Score each part of the data by itself; nothing where rows say of none."""
    indexes_of: dict[str, list[int]] = {}
    for index, line in enumerate(predictions):
        if line.part is not None:
            indexes_of.setdefault(line.part, []).append(index)
    found = {}
    for part, indexes in sorted(indexes_of.items()):
        lines = [predictions[index] for index in indexes]
        targets = Targets.of_lines(lines, source.target or "")
        scores = _likelihoods(lines, metrics).scores | judgement.scores_of(indexes)
        for name, metric in metrics.items():
            if isinstance(metric, Metric):
                # A correlation of one example is none; the part's other scores are.
                with suppress(ValueError):
                    scores |= targets.score(name, metric, [line.prediction for line in lines])
        found[part] = {"num_examples": len(lines), "metrics": scores}
    return found


def _confusion(
    metrics: Mapping[str, Metric],
    predictions: Sequence[Any],
    targets: Targets,
    classes: ClassNames | None,
) -> dict[str, Any] | None:
    """Count true and predicted classes, where classes are what is scored."""
    if not any(reads_of(metric) == "classes" for metric in metrics.values()):
        return None
    counts = confusion(predictions, targets.references)
    is_readable = len(classes_of(counts)) <= _MAX_CLASSES
    return as_table(counts, _MAX_ROWS, classes) if is_readable else None


def _baselines(
    context: StageContext,
    metrics: Mapping[str, Metric],
    predictions: Sequence[Prediction],
    source: PredictionsSummary,
    targets: Targets,
) -> dict[str, dict[str, Any]]:
    """Score what needs no model, by the metrics that can."""

    def score(able: Mapping[str, Metric], found: Sequence[Any]) -> dict[str, float]:
        return _joined(_scores_by_metric(context, able, found, targets))

    of_texts, of_classes, of_numbers = (
        {name: metric for name, metric in metrics.items() if reads_of(metric) == kind}
        for kind in ("texts", "classes", "numbers")
    )
    frequent = source.most_frequent_target.get("text")
    baselines: dict[str, dict[str, Any]] = {}
    of_frequent = of_texts | of_classes if isinstance(frequent, str) else of_classes
    if of_frequent and frequent is not None:
        scores = score(of_frequent, [frequent] * len(predictions))
        baselines["most_frequent_target"] = {"text": str(frequent), "metrics": scores}
    if of_numbers and source.mean_target is not None:
        mean = source.mean_target
        scores = score(of_numbers, [mean] * len(predictions))
        baselines["mean_target"] = {"text": f"{mean:.6g}", "metrics": scores}
    if of_texts and any(line.source for line in predictions):  # rows have none to repeat
        scores = score(of_texts, [line.source for line in predictions])
        baselines["copy_source"] = {"text": None, "metrics": scores}
    return baselines


def _own_baselines(metrics: Mapping[str, Metric], targets: Targets) -> dict[str, dict[str, Any]]:
    """Score the predictions of models that learnt nothing which metrics of rows bring."""
    found: dict[str, dict[str, Any]] = {}
    for metric in metrics.values():
        if not isinstance(metric, MetricWithBaselines):
            continue
        for name, predictions in metric.baselines(targets.rows).items():
            scores = metric.compute(predictions, targets.rows)
            known = found.setdefault(name, {"text": None, "metrics": {}})
            known["metrics"] |= scores
    return found


@dataclass(frozen=True)
class _Likelihoods:
    """Scores of the metrics of likelihoods, of the full set and of each example."""

    scores: dict[str, float]
    per_example: dict[str, list[float]]
    statistics: dict[str, list[list[float]]]

    def add_to(self, examples: list[_Example]) -> None:
        """Put the examples' parts into their lines."""
        for index, example in enumerate(examples):
            example.scores.update({key: all_[index] for key, all_ in self.per_example.items()})
            example.statistics.update({name: all_[index] for name, all_ in self.statistics.items()})


def _likelihoods(
    predictions: Sequence[Prediction], metrics: Mapping[str, AnyMetric]
) -> _Likelihoods:
    found = _Likelihoods({}, {}, {})
    for name, metric in metrics.items():
        if not isinstance(metric, LikelihoodMetric):
            continue
        losses = [line.loss for line in predictions if line.loss is not None]
        what = "num_bytes" if counts_bytes(metric) else "num_tokens"
        counts = [count for line in predictions if (count := getattr(line, what)) is not None]
        if losses and not counts:
            raise CannotEvaluate(
                f"the metric '{name}' reads how many bytes each reference has, which predictions "
                "of conversations, and those of before this metric, do not say."
            )
        if not len(losses) == len(counts) == len(predictions):
            raise CannotEvaluate(
                f"the metric '{name}' reads how likely each reference is, and the predictions do "
                "not say: set score_targets: true in the predict stage."
            )
        rows = metric.likelihood_statistics(losses, counts)
        found.statistics[name] = rows
        found.scores.update(
            metric.from_statistics([sum(column) for column in zip(*rows, strict=True)])
        )
        found.per_example.update(metric.of_likelihoods(losses, counts))
    return found


def _per_example(
    metrics: dict[str, Metric], predictions: list[Prediction], targets: Targets
) -> list[_Example]:
    found = [line.prediction for line in predictions]
    examples = [_Example(line.row_id, {}, {}) for line in predictions]
    for name, metric in metrics.items():
        if not isinstance(metric, ExampleMetric):
            continue
        for key, scores in metric.per_example(found, targets.of(metric)).items():
            for example, score in zip(examples, scores, strict=True):
                example.scores[key] = score
        if isinstance(metric, PooledMetric):
            statistics = metric.statistics(found, targets.references)
            for example, counts in zip(examples, statistics, strict=True):
                example.statistics[name] = counts
    return examples
