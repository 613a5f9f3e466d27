"""reference_scores: a dataset of pairs in, how likely a reference finds each answer out.

Computed once, and not in the training: that has no second copy of the parameters, and every point
of a sweep over its loss reads the same scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redco_flow.engine.agreement import decide_first
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.predictor import Predictor
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.errors import RedcoFlowError
from redco_flow.recipes.find import find_recipe, shares_model
from redco_flow.recipes.recipe import Generation, Recipe, matmul_precision
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.runtime.process_group import describe_devices
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.reference_scores import (
    ReferenceScoresSummary,
    scores_file,
    write_scores,
    write_summary,
)
from redco_flow.stages.artifacts.tokenizer import WrongTokenizer, check_model_tokenizer
from redco_flow.stages.common_stop import CommonStop
from redco_flow.stages.length_bucketing import bucket_rows
from redco_flow.stages.reference_scores.config import Config


class CannotScore(RedcoFlowError):
    """The reference and the dataset do not fit each other."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Score all rows of the dataset; a split that an earlier attempt finished stays.

    Raises:
        CannotScore, WrongTokenizer: before anything is scored.
        CheckpointError: the checkpoint is damaged.
    """
    context.report(phase="preparing", devices=describe_devices())
    dataset = DatasetArtifact(context.input("dataset").path)
    reference = _reference(context, config, dataset)
    folder = context.work_dir / "reference_scores"
    folder.mkdir(exist_ok=True)
    scorer = _Scorer(context, config, reference)
    splits = list(dataset.summary.splits)
    for split in splits:
        path = folder / scores_file(split)
        if decide_first(path.exists):
            continue
        rows = dataset.split(split)
        examples = rows.__getitems__(range(len(rows)))
        found = scorer.score(split, examples)
        context.check_inputs()  # of damaged bytes nothing is kept
        if context.attempt_dir.rank == 0:  # every process has all scores
            write_scores(path, [example["row_id"] for example in examples], found)
    num_rows = {split: dataset.summary.splits[split]["rows"] for split in splits}
    summary = ReferenceScoresSummary(context.input("dataset").id, reference.name, num_rows)
    if context.attempt_dir.rank == 0:
        write_summary(folder, summary)
    metadata = {"reference": reference.name, "num_rows": num_rows}
    return StageOutputs({"reference_scores": Output("reference_scores", folder, metadata)})


@dataclass(frozen=True)
class _Reference:
    """A model that scores.

    Args:
        name: the checkpoint's id, or the model's name.
        load_params: (shardings) -> its parameters.
    """

    name: str
    recipe: Recipe
    load_params: Callable[[Any], Any]


def _reference(context: StageContext, config: Config, dataset: DatasetArtifact) -> _Reference:
    if dataset.summary.recipe != config.recipe:
        raise CannotScore(
            f"the dataset was preprocessed for recipe '{dataset.summary.recipe}', and this stage "
            f"scores pairs of '{config.recipe}': use one recipe for both."
        )
    lengths = dataset.summary.lengths()
    if not context.inputs.get("checkpoint"):
        check_model_tokenizer(config.model, dataset)
        texts = dataset.texts(*lengths)
        recipe = find_recipe(config.recipe).make(config.model.model_dump(), texts)
        if recipe.load_params is None:
            raise CannotScore("there is no reference: give `checkpoint`, or model.name_or_path.")
        return _Reference(str(config.model.name_or_path), recipe, recipe.load_params)
    artifact = context.input("checkpoint")
    checkpoint = CheckpointArtifact(artifact.path)
    record = checkpoint.record
    if not shares_model(record.recipe, config.recipe):
        raise CannotScore(
            f"the checkpoint is of recipe '{record.recipe}', whose model '{config.recipe}' does "
            "not read."
        )
    if record.tokenizer_digest != dataset.tokenizer_digest:
        raise WrongTokenizer(
            f"the reference was trained with tokenizer {record.tokenizer_digest[:12]}, and the "
            f"dataset was encoded with {dataset.tokenizer_digest[:12]}: let the dataset's stage "
            "take the checkpoint's (`tokenizer_of`)."
        )
    recipe = checkpoint.build_recipe(*lengths, recipe=config.recipe)
    return _Reference(artifact.id, recipe, partial(checkpoint.read_params, recipe))


class _Scorer:
    """A reference laid out over the devices."""

    def __init__(self, context: StageContext, config: Config, reference: _Reference) -> None:
        self._context, self._config, self._reference = context, config, reference
        self._stop = CommonStop(context)
        self._deployer = Deployer(
            config.num_model_shards,
            num_fsdp_shards=config.fsdp,
            matmul_precision=matmul_precision(reference.recipe.model),
        )
        self._params: Any = None
        self._rules: ShardingRules | None = None

    def score(self, split: str, examples: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
        """Return each pair's log-likelihoods."""
        recipe = self._reference.recipe
        pred_fn = recipe.make_pred_fn(Generation(0))
        if self._params is None:
            shapes = recipe.abstract_params()
            batch = recipe.collate_fn(examples[:1])
            self._rules = self._deployer.get_sharding_rules(shapes, pred_fn, batch, None)
            self._params = self._reference.load_params(
                self._deployer.params_sharding(shapes, self._rules)
            )
        predictor = Predictor(
            self._deployer,
            collate_fn=recipe.collate_fn,
            pred_fn=pred_fn,
            output_fn=recipe.output_fn,
            sharding_rules=self._rules,
            batch_size=self._config.batch_size,
        )
        return predictor.predict(
            examples,
            self._params,
            bucketing=bucket_rows(recipe, examples, self._config.batch_size),
            on_progress=partial(self._on_progress, split),
            verb="scored answers of",
        )

    def _on_progress(self, split: str, done: int, total: int) -> None:
        self._context.report(phase=f"scoring {split}", step=done, total_steps=total)
        self._stop.raise_if_requested()
