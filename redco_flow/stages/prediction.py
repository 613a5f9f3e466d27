"""Generate texts with a checkpoint: the heavy body of the predict stage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.predictor import Predictor
from redco_flow.errors import RedcoFlowError
from redco_flow.recipes.recipe import Generation
from redco_flow.stages.checkpoint_artifact import CheckpointArtifact
from redco_flow.stages.common_stop import CommonStop
from redco_flow.stages.context import Output, StageContext, StageOutputs
from redco_flow.stages.dataset_artifact import DatasetArtifact, DatasetSummary
from redco_flow.stages.model_tokenizer import WrongTokenizer
from redco_flow.stages.predict import Config
from redco_flow.stages.predictions_artifact import (
    Prediction,
    PredictionsSummary,
    write_predictions,
)
from redco_flow.stages.provenance import provenance_of


class CannotPredict(RedcoFlowError):
    """The checkpoint, the dataset and the settings do not fit each other."""


def predict(context: StageContext, config: Config) -> StageOutputs:
    """Write the predictions into the work directory.

    Raises:
        CannotPredict, WrongTokenizer: before anything is generated.
        CheckpointError: the checkpoint is damaged.
    """
    context.report(phase="preparing")
    dataset = DatasetArtifact(context.input("dataset").path)
    checkpoint = CheckpointArtifact(context.input("checkpoint").path)
    _check(dataset, checkpoint, config)
    split = config.split or ("test" if dataset.has("test") else "validation")
    rows = dataset.split(split)
    examples = rows.__getitems__(range(min(len(rows), config.num_examples or len(rows))))
    texts = _generate(context, config, dataset.summary, checkpoint, split, examples)
    provenance = provenance_of(context, config, data=context.input("dataset").id)
    summary = PredictionsSummary(
        split=split,
        num_examples=len(examples),
        generation=config.model_dump(mode="json", include=set(_GENERATION)),
        checkpoint=context.input("checkpoint").id,
        step=checkpoint.record.step,
        data=provenance.data,
        config=provenance.config,
        most_frequent_target=dataset.summary.most_frequent_target,
    )
    folder = context.work_dir / "predictions"
    if context.attempt_dir.rank == 0:  # every process has all texts, in input order
        shutil.rmtree(folder, ignore_errors=True)
        write_predictions(folder, _predictions(examples, texts), summary)
    return StageOutputs({"predictions": Output("predictions", folder, summary.to_json())})


_GENERATION = ("num_beams", "length_penalty", "max_target_length")


def _check(dataset: DatasetArtifact, checkpoint: CheckpointArtifact, config: Config) -> None:
    record = checkpoint.record
    if not config.recipe == record.recipe == dataset.summary.recipe:
        raise CannotPredict(
            f"recipes differ: this stage has '{config.recipe}', the checkpoint "
            f"'{record.recipe}', the dataset '{dataset.summary.recipe}'; use one for all."
        )
    if record.tokenizer_digest != dataset.tokenizer.digest:
        raise WrongTokenizer(
            f"the checkpoint was trained with tokenizer {record.tokenizer_digest[:12]}, and the "
            f"dataset was encoded with {dataset.tokenizer.digest[:12]}: predict on a dataset that "
            "was preprocessed with the checkpoint's tokenizer."
        )


def _generate(
    context: StageContext,
    config: Config,
    summary: DatasetSummary,
    checkpoint: CheckpointArtifact,
    split: str,
    examples: list[dict[str, Any]],
) -> list[str]:
    # Training's width where it is enough, so that its evaluations are repeated to the last bit.
    source_length = max(checkpoint.record.source_length, summary.padded_length("source", (split,)))
    target_length = summary.padded_length("target")
    recipe = checkpoint.build_recipe(source_length, target_length)
    deployer = Deployer(config.num_model_shards)
    batch = recipe.collate_fn(examples[:1])
    rules = deployer.get_sharding_rules(
        recipe.abstract_params(), recipe.loss_fn, batch, None, False
    )
    params = checkpoint.load_params(recipe, deployer, rules)
    generation = Generation(
        max_length=config.max_target_length or target_length,
        num_beams=config.num_beams,
        length_penalty=config.length_penalty,
    )
    predictor = Predictor(
        deployer,
        collate_fn=recipe.collate_fn,
        pred_fn=recipe.make_pred_fn(generation),
        output_fn=recipe.output_fn,
        sharding_rules=rules,
        batch_size=config.batch_size,
    )

    stop = CommonStop(context)

    def on_progress(done: int, total: int) -> None:
        context.report(phase="predicting", step=done, total_steps=total)
        stop.raise_if_requested()

    return predictor.predict(examples, params, on_progress=on_progress)


def _predictions(examples: list[dict[str, Any]], texts: list[str]) -> Iterator[Prediction]:
    for example, text in zip(examples, texts, strict=True):
        yield Prediction(example["row_id"], example["source"], text, example["references"])
