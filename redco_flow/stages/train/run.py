"""Train on a dataset with the engine: the heavy body of the train stage.

Brings together dataset, recipe, engine and records. How steps, evaluations and checkpoints
follow each other is the engine's; what a record must name is in `records`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from redco_flow.engine import errors as engine_errors
from redco_flow.engine.agreement import decide_first
from redco_flow.engine.checkpoint.checkpointer import (
    Checkpointer,
    Commit,
    parameter_digests,
)
from redco_flow.engine.checkpoint.commit import TRAINING
from redco_flow.engine.continuation import Continuation
from redco_flow.engine.step.lora import FACTORS, Lora
from redco_flow.engine.step_trace import TracedSteps
from redco_flow.engine.trainer import Trainer
from redco_flow.engine.training_loop import FitResult
from redco_flow.recipes.find import find_recipe, shares_model
from redco_flow.recipes.recipe import CLASSES, Class, Recipe
from redco_flow.records import digest_json
from redco_flow.runtime.context import Output, StageContext, StageOutputs, Stopped
from redco_flow.runtime.process_group import describe_devices
from redco_flow.spec.recipe_settings import values_of
from redco_flow.stages.artifacts.checkpoint import (
    AdapterRecord,
    CheckpointArtifact,
    RecipeRecord,
    checkpoint_identity,
    write_checkpoint_artifact,
)
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER, DatasetArtifact
from redco_flow.stages.artifacts.reference_scores import reference_columns
from redco_flow.stages.artifacts.tokenizer import WrongTokenizer, check_model_tokenizer
from redco_flow.stages.data.guard import DataGuard
from redco_flow.stages.provenance import Provenance, provenance_of
from redco_flow.stages.train.config import Config, data_files, output_names
from redco_flow.stages.train.continuation import BATCHING, check_steps_left, find_continuation
from redco_flow.stages.train.data import TrainingData, read_training_data
from redco_flow.stages.train.disk_space import warn_of_little_space
from redco_flow.stages.train.plan import plan_training, start_trainer
from redco_flow.stages.train.records import TrainingRecords, open_logs
from redco_flow.stages.train.scores import (
    CannotTrain,
    EvalFn,
    early_stopping,
    keys_of_best,
    make_eval_fn,
    make_text_scores,
    modes_of_best,
)
from redco_flow.stages.train.sections import OPTIMIZER_STATE, optimizer_state_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PreparedTraining:
    """All that a training consists of, ready to run."""

    dataset: DatasetArtifact
    recipe: Recipe
    data: TrainingData
    trainer: Trainer
    eval_fn: EvalFn | None
    continuation: Continuation | None


def run(context: StageContext, config: Config) -> StageOutputs:
    """Train to the end and return the checkpoints' artifacts.

    Raises:
        CannotTrain, WrongTokenizer, DataChanged: before the first step.
        Stopped: as asked; saved, a later attempt resumes from here.
        NonFiniteLoss: the last checkpoint is from before.
        CheckpointError: one that is to be published is damaged; a later attempt makes it again.
    """
    context.report(phase="preparing", devices=describe_devices())
    guard = DataGuard(context, data_files(config))
    training = _prepare(context, config)
    guard.check_again()
    provenance = provenance_of(context, config, data=context.input("dataset").id)
    with Checkpointer(
        context.work_dir / "checkpoints",
        # One more than asked for, to fall back to if the newest is damaged.
        keep_last=config.keep.last + 1,
        keep_best=modes_of_best(config),
        keep_state=config.keep.optimizer or "all",
        is_shared=context.shares_disk,
        local_directory=context.node_directory,
        while_waiting=context.report,
    ) as checkpointer:
        result = _fit(context, config, training, checkpointer, provenance)
        steps = {name: _step_of(name, checkpointer, config) for name in output_names(config)}
        for step in set(steps.values()):
            if step < result.start_step:  # neither saved nor restored by this attempt
                context.report(phase="checking checkpoints")
                checkpointer.verify(step)
        # All processes take part in a merge, and so none may wait there for a first one that reads.
        checkpoints = {
            step: _checkpoint(
                context,
                step,
                checkpointer,
                training.trainer,
                keeps_state=config.keep.optimizer is None or step == steps["checkpoint/last"],
            )
            for step in sorted(set(steps.values()))
        }
    context.report(phase="digesting parameters")
    digested = _digest_parameters(checkpoints, training.trainer.plan.lora, config)
    outputs = {
        name: _output(
            context, name, checkpoints[step], training, config, provenance, digested.get(step)
        )
        for name, step in steps.items()
    }
    metrics = dict(result.metrics)
    if result.loss is not None:
        metrics["loss"] = result.loss
    return StageOutputs(outputs, metrics)


def _prepare(context: StageContext, config: Config) -> _PreparedTraining:
    dataset = DatasetArtifact(context.input("dataset").path, reference_columns(context))
    summary = dataset.summary
    if summary.recipe != config.recipe:
        raise CannotTrain(
            f"the dataset was preprocessed for recipe '{summary.recipe}', and this stage trains "
            f"with '{config.recipe}': use one recipe for both."
        )
    if summary.has_tokenizer:
        check_model_tokenizer(config.model, dataset)
    source_length, target_length = row_lengths(dataset, config)
    texts = dataset.texts(source_length, target_length)
    recipe = find_recipe(config.recipe).make(model_with_settings(config, summary.classes), texts)
    if context.inputs.get("start_from"):
        checkpoint = CheckpointArtifact(context.input("start_from").path)
        recipe = _started_from(checkpoint, recipe, dataset, config)
        _warn_of_another_reference(context)
    validation = validation_examples(dataset, config)
    data = read_training_data(dataset, recipe, config, validation)
    batch = data.first_batch(recipe)
    num_steps = config.max_steps
    if num_steps is None:
        num_steps = config.num_epochs * data.steps_per_epoch(config)
    continuation = find_continuation(context, config, data)
    if continuation is not None:
        num_steps += continuation.first_step
        check_steps_left(continuation, config, num_steps)
    plan = plan_training(config, recipe, batch, num_steps, widest_batch=data.widest_batch())
    context.report(parameters=plan.parameters_text())
    logger.info("training: %s", plan.parameters_text())
    epoch_steps = data.steps_per_epoch(config)
    steps_left = num_steps - (0 if continuation is None else continuation.commit.step)
    warn_of_little_space(context, config, plan, num_steps=steps_left, epoch_steps=epoch_steps)
    trainer = start_trainer(plan, config, recipe, data.collate_fn)
    score_texts = make_text_scores(context, config, dataset, recipe, trainer, validation)
    eval_fn = make_eval_fn(config, data, recipe, trainer, validation, score_texts)
    return _PreparedTraining(dataset, recipe, data, trainer, eval_fn, continuation)


def _started_from(
    checkpoint: CheckpointArtifact, recipe: Recipe, dataset: DatasetArtifact, config: Config
) -> Recipe:
    """Return the recipe with parameters that begin as the checkpoint's."""
    record = checkpoint.record
    if not shares_model(record.recipe, config.recipe):
        raise CannotTrain(
            f"start_from is a checkpoint of recipe '{record.recipe}', and this stage trains with "
            f"'{config.recipe}': begin with one of the same recipe, or of one with the same model."
        )
    if record.tokenizer_digest != dataset.tokenizer_digest:
        raise WrongTokenizer(
            f"start_from was trained with tokenizer {record.tokenizer_digest[:12]}, the dataset "
            f"was encoded with {dataset.tokenizer_digest[:12]}: name the checkpoint's tokenizer in "
            "data.tokenizer; one that is trained on the data is another one with other data."
        )
    load_params = partial(checkpoint.read_params, recipe)
    return replace(recipe, load_params=load_params, drawn_parts=())


def _warn_of_another_reference(context: StageContext) -> None:
    """Say that the loss compares with another model than the one that the training begins with."""
    if not context.inputs.get("reference_scores"):
        return
    begun = context.input("start_from").id
    reference = str(context.input("reference_scores").metadata.get("reference"))
    if reference != begun:
        logger.warning(
            "the training begins with checkpoint %s, and its loss compares with %s: no step was "
            "done, and rewards are not 0. Is that meant?",
            begun[:12],
            reference[:12],
        )


def row_lengths(dataset: DatasetArtifact, config: Config) -> tuple[int, int]:
    """Return the tokens of sources and targets in batches: a test text must not widen a step."""
    if config.batching.window_length is not None:
        return 1, config.batching.window_length  # a window's first token is its source
    return dataset.summary.lengths(("train", "validation"))


def model_with_settings(config: Config, classes: Sequence[Class] | None) -> dict[str, Any]:
    """Return the model section, with the training's dropout and the recipe's settings in it.

    Args:
        classes: the dataset's, which the settings get.

    Raises:
        CannotTrain: the settings name others.
    """
    model = config.model.model_dump()
    settings = values_of(config.settings)
    if classes is not None:
        named = settings.get(CLASSES) or classes
        if list(named) != list(classes):
            raise CannotTrain(
                f"settings.classes is {', '.join(map(str, named))}, and the dataset was "
                f"preprocessed with {', '.join(map(str, classes))}: give both stages the same."
            )
        settings = {**settings, CLASSES: list(classes)}
    if settings:
        model["settings"] = settings
    if config.dropout_rate is not None:
        model["config"] = {**model["config"], "dropout_rate": config.dropout_rate}
    return model


def validation_examples(dataset: DatasetArtifact, config: Config) -> list[dict[str, Any]] | None:
    """Return the examples to evaluate on, texts included; None without such a split.

    Raises:
        CannotTrain: a setting needs some.
    """
    if not dataset.has("validation"):
        if config.keep.best or config.eval.metrics or config.early_stopping:
            raise CannotTrain(
                "keep.best, eval.metrics and early_stopping need validation rows and the dataset "
                "has none: give data.validation, or a larger data.validation_fraction."
            )
        return None
    rows = dataset.split("validation")
    count = min(len(rows), config.eval.num_examples or len(rows))
    return rows.__getitems__(range(count))


def _fit(
    context: StageContext,
    config: Config,
    training: _PreparedTraining,
    checkpointer: Checkpointer,
    provenance: Provenance,
) -> FitResult:
    examples = training.data.examples
    continuation = training.continuation
    first_step = 0 if continuation is None else continuation.commit.step
    records = TrainingRecords(context, checkpointer, provenance, first_step=first_step)
    every = config.eval.every_steps
    if config.eval.every_epochs:
        every = config.eval.every_epochs * training.data.steps_per_epoch(config)
    intervals = [config.log_every_steps, every, config.save_every_steps]
    try:
        with open_logs(context, config) as logs:
            return training.trainer.fit(
                examples,
                num_epochs=config.num_epochs if config.max_steps is None else None,
                max_steps=config.max_steps,
                bucketing=training.data.bucketing,
                order=training.data.order,
                eval_fn=training.eval_fn,
                checkpointer=checkpointer,
                callbacks=[records, *logs],
                # A checkpoint is announced with a log record: it must still be there by then.
                log_every_steps=min(interval for interval in intervals if interval),
                eval_every_steps=every,
                save_every_steps=config.save_every_steps,
                should_stop=records.should_stop,
                traced_steps=_traced_steps(context, config),
                early_stopping=early_stopping(config),
                continuation=continuation,
            )
    except engine_errors.TrainingStopped as stopped:
        raise Stopped(f"stage '{context.stage}' {stopped}; a later attempt goes on there.") from (
            stopped
        )


def _traced_steps(context: StageContext, config: Config) -> TracedSteps | None:
    asked = config.profile
    if asked is None:
        return None
    return TracedSteps(context.attempt_dir.profile_path, asked.start_step, asked.num_steps)


def _step_of(name: str, checkpointer: Checkpointer, config: Config) -> int:
    """The newest or best step, as an output's name says."""
    if name == "checkpoint/last":
        step = checkpointer.latest()
    else:
        step = checkpointer.best(keys_of_best(config)[name.removeprefix("checkpoint/best/")])
    if step is None:
        raise CannotTrain(f"there is no checkpoint for '{name}' in {checkpointer.directory}.")
    return step


@dataclass(frozen=True)
class _Checkpoint:
    """One to be published: its commit, and where the model's parameters are.

    Args:
        has_state: whether it is published with optimizer state.
    """

    commit: Commit
    directory: Path
    has_state: bool


def _checkpoint(
    context: StageContext,
    step: int,
    checkpointer: Checkpointer,
    trainer: Trainer,
    *,
    keeps_state: bool,
) -> _Checkpoint:
    commit = checkpointer.commit(step)
    directory = checkpointer.step_directory(step)
    if trainer.plan.lora is not None:
        directory = _merge_checkpoint(context.work_dir / "merged", checkpointer, commit, trainer)
        keeps_state = False  # the factors' state is of no use to merged parameters
    return _Checkpoint(commit, directory, keeps_state)


@dataclass(frozen=True)
class _Digested:
    """Digests of a checkpoint's parameters, and of its optimizer state or its factors."""

    parameters: dict[str, str]
    training: dict[str, str]
    adapter: AdapterRecord | None


def _digest_parameters(
    checkpoints: dict[int, _Checkpoint], lora: Lora | None, config: Config
) -> dict[int, _Digested]:
    """Digest each checkpoint's parameters, on process 0 alone; nothing is returned on the others.

    They wait, for processes that part have little time for each other.
    """
    found: dict[int, _Digested] = {}

    def digest() -> int:
        for step, one in checkpoints.items():
            has_training = lora is not None or one.has_state
            training = parameter_digests(one.directory, TRAINING) if has_training else {}
            adapter = None if lora is None else _adapter_record(lora, config, training)
            found[step] = _Digested(parameter_digests(one.directory), training, adapter)
        return len(found)

    decide_first(digest)
    return found


def _adapter_record(lora: Lora, config: Config, factors: dict[str, str]) -> AdapterRecord:
    assert config.lora is not None
    return AdapterRecord(
        lora.rank,
        lora.alpha,
        targets=[asdict(target) for target in lora.targets],
        factors=factors,
        rank_stabilized=lora.rank_stabilized,
        dora=lora.dora,
        full=list(lora.full),
        base_dtype=config.lora.base_dtype or config.frozen_dtype,
    )


def _output(
    context: StageContext,
    name: str,
    checkpoint: _Checkpoint,
    training: _PreparedTraining,
    config: Config,
    provenance: Provenance,
    digested: _Digested | None,
) -> Output:
    """The artifact of a checkpoint.

    Args:
        digested: None where another process writes the files.
    """
    commit = checkpoint.commit
    source_length, target_length = row_lengths(training.dataset, config)
    record = RecipeRecord(
        recipe=config.recipe,
        model=training.recipe.model,
        source_length=source_length,
        target_length=target_length,
        tokenizer_digest=training.dataset.tokenizer_digest,
        step=commit.step,
        metrics=commit.metrics,
        data=provenance.data,
        config=provenance.config,
    )
    folder = context.work_dir / "outputs" / name.replace("/", "-")
    metadata = {
        "step": commit.step,
        "metrics": dict(commit.metrics),
        "recipe": config.recipe,
        "padding": training.data.padding,
    }
    if checkpoint.has_state:
        metadata[OPTIMIZER_STATE] = optimizer_state_settings(config)
        metadata[BATCHING] = training.data.row_settings(config)
    if digested is None:
        return Output("checkpoint", folder, metadata, {})
    tokenizer = training.dataset.path / TOKENIZER_FOLDER if record.tokenizer_digest else None
    digests = write_checkpoint_artifact(
        folder,
        checkpoint.directory,
        tokenizer,
        record,
        digested.adapter,
        params_only=not checkpoint.has_state and digested.adapter is None,
    )
    state = {}
    if checkpoint.has_state:
        state = {**digested.training, "cursor": digest_json(dict(commit.cursor))}
    identity = checkpoint_identity(digests, digested.parameters, state)
    return Output("checkpoint", folder, metadata, digests, identity)


def _merge_checkpoint(
    folder: Path, checkpointer: Checkpointer, commit: Commit, trainer: Trainer
) -> Path:
    """Save the model's parameters of a checkpoint, and its factors; return where they are."""
    scores = {name: value for name, value in commit.metrics.items() if value is not None}
    is_shared = checkpointer.is_shared
    with Checkpointer(folder, keep_last=sys.maxsize, is_shared=is_shared) as merged:
        if commit.step not in merged.steps():
            like = trainer.plan.storage.abstract_exact["params"]
            trained = checkpointer.restore_params(commit.step, like=like)
            state = {"params": trainer.plan.model_params(trained), FACTORS: trained[FACTORS]}
            merged.save(commit.step, state, metrics=scores, cursor=commit.cursor)
        return merged.step_directory(commit.step)
