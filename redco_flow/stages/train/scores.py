"""Evaluate a training while it runs: validation loss, and scores of predictions.

Brings together recipe, predictor and metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from redco_flow.engine.checkpoint.directory import Mode
from redco_flow.engine.predictor import Predictor
from redco_flow.engine.trainer import Trainer
from redco_flow.engine.watching import EarlyStopping
from redco_flow.errors import RedcoFlowError
from redco_flow.metrics.perplexity import perplexity
from redco_flow.metrics.settings import configured_metric, warnings_of
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.recipe import Generation, Recipe
from redco_flow.runtime.context import StageContext
from redco_flow.spec.metric import Metric
from redco_flow.stages.artifacts.dataset import DatasetArtifact, DatasetSummary
from redco_flow.stages.artifacts.predictions import Targets, targets_of, warnings_on_keys
from redco_flow.stages.length_bucketing import bucket_prompts, bucket_rows
from redco_flow.stages.train.config import (
    EVAL_LOSS,
    LOSS_SCORES,
    PERPLEXITY,
    Config,
    metrics_needed,
    texts_scores,
)
from redco_flow.stages.train.data import TrainingData

logger = logging.getLogger(__name__)

# (params, step) -> scores
EvalFn = Callable[[Any, int], Mapping[str, float]]
# (params) -> scores of predictions
ScoreTexts = Callable[[Any], Mapping[str, float]]


class CannotTrain(RedcoFlowError):
    """The dataset and the settings do not fit each other; no step was done."""


def make_eval_fn(
    config: Config,
    data: TrainingData,
    recipe: Recipe,
    trainer: Trainer,
    validation: list[dict[str, Any]] | None,
    score_texts: ScoreTexts | None,
) -> EvalFn | None:
    """Return what measures the loss on the validation examples, and scores texts for them."""
    if validation is None or data.validation is None:
        return None
    rows, bucketing = data.validation, None
    if config.batching.type in ("padded", "bucketed"):
        bucketing = bucket_rows(recipe, validation, trainer.layout.micro_batch_size)
    measures_perplexity = find_recipe(config.recipe).measures_perplexity

    def evaluate(params: Any, step: int) -> dict[str, float]:
        loss = trainer.eval_loss(rows, bucketing=bucketing)
        scores = {EVAL_LOSS: loss}
        if measures_perplexity:
            scores[PERPLEXITY] = perplexity(loss)
        return scores | dict(score_texts(params) if score_texts else {})

    return evaluate


def make_text_scores(
    context: StageContext,
    config: Config,
    dataset: DatasetArtifact,
    recipe: Recipe,
    trainer: Trainer,
    validation: list[dict[str, Any]] | None,
) -> ScoreTexts | None:
    """Return what predicts for the validation examples and scores it; None: nothing.

    Raises:
        CannotTrain: the examples have no targets.
    """
    names = metrics_needed(config)
    if validation is None or not names:
        return None
    if dataset.summary.is_plain_text:
        raise CannotTrain(
            f"the dataset is of plain texts, which have no targets to be generated for "
            f"{', '.join(names)}: leave eval.metrics out and keep the best by "
            f"{' or '.join(LOSS_SCORES)}, or preprocess with data.source_key and data.target_key."
        )
    summary = dataset.summary
    length = 0 if summary.is_of_rows else summary.answer_length
    deployer = trainer.deployer
    predictor = Predictor(
        deployer.without_context_shards(),
        collate_fn=recipe.collate_for_prediction,
        pred_fn=recipe.make_pred_fn(Generation(length, num_beams=config.eval.num_beams)),
        output_fn=recipe.output_fn,
        sharding_rules=trainer.plan.model_rules,
        batch_size=trainer.layout.micro_batch_size * deployer.num_context_shards,
    )
    bucketing = bucket_prompts(recipe, validation, predictor.batch_size)
    targets = targets_of(validation, summary)
    metrics = _metrics(names, config, summary, targets)
    logged: set[str] = set()

    def on_progress(done: int, total: int) -> None:
        context.report(phase="evaluating", step=done, total_steps=total)

    def score_texts(params: Any) -> dict[str, float]:
        params = trainer.plan.model_params(params)
        texts = predictor.predict(validation, params, bucketing=bucketing, on_progress=on_progress)
        scores: dict[str, float] = {}
        for name, metric in metrics.items():
            found = targets.score(name, metric, texts)
            for warning in warnings_on_keys(name, metric, found):
                if warning not in logged:
                    logged.add(warning)
                    logger.warning("%s", warning)
            scores |= found
        return scores

    return score_texts


def _metrics(
    names: list[str], config: Config, summary: DatasetSummary, targets: Targets
) -> dict[str, Metric]:
    """Return the metrics with their settings; what makes their scores doubtful is logged."""
    metrics = {}
    for name in names:
        try:
            found = configured_metric(name, config.eval.metric_settings, summary.class_names)
        except ValueError as error:
            raise CannotTrain(f"eval: the metric '{name}': {error}") from error
        metric = metrics[name] = cast("Metric", found)
        for warning in warnings_of(metric, targets.of(metric)):
            logger.warning("%s", warning)
    return metrics


def keys_of_best(config: Config) -> dict[str, str]:
    """Return the scores' keys by their names in `keep.best`."""
    return {text: _key_and_mode(text, config)[0] for text in config.keep.best}


def modes_of_best(config: Config) -> dict[str, Mode]:
    """Return whether a larger or a smaller score is better, by the keys of `keep.best`."""
    return dict(_key_and_mode(text, config) for text in config.keep.best)


def early_stopping(config: Config) -> EarlyStopping | None:
    """Return what ends the training early; None where nothing does."""
    asked = config.early_stopping
    if asked is None:
        return None
    key, mode = _key_and_mode(asked.metric, config)
    return EarlyStopping(key, mode, asked.patience)


def _key_and_mode(name: str, config: Config) -> tuple[str, Mode]:
    """Return a score's key among an evaluation's metrics, and which of two is better."""
    if name in LOSS_SCORES:
        return name, "min"
    score = texts_scores([name], config.eval)[name]
    return score.key, "max" if score.direction == "max" else "min"
