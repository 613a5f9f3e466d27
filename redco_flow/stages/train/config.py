"""train: a dataset in, checkpoints out: the last one, and the best by each metric asked for.

Plans import it on login nodes, so it imports neither JAX nor `run`, which does the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from redco_flow.metrics.settings import check_metric_settings
from redco_flow.models.find import FAMILIES, find_config, find_module_name
from redco_flow.recipes.declared import DeclaredRecipe, TextRecipe
from redco_flow.recipes.find import (
    RecipeName,
    RecipeSettings,
    family_problem,
    find_own_recipe,
    find_recipe_if_any,
    recipe_module,
)
from redco_flow.runtime.context import FinishedStage
from redco_flow.spec.metric import Score, find_metric, find_score, metric_module
from redco_flow.spec.model import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OnlyWhereSet,
    Placement,
    PositiveFloat,
    PositiveInt,
    Regex,
    Text,
)
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.recipe_settings import values_of
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.artifacts.tokenizer import family_in_files, model_files
from redco_flow.stages.device_layout import layout_problems
from redco_flow.stages.train.positions import length_problems
from redco_flow.stages.train.sections import (
    OPTIMIZER_STATE,
    Batching,
    EarlyStoppingConfig,
    EvaluationConfig,
    Keep,
    LoraConfig,
    ProfileConfig,
    ScheduleConfig,
    continuation_problems,
    dropout_problem,
    optimizer_state_settings,
    targets_problem,
)
from redco_flow.tracking.mlflow_server import tag_outputs

EVAL_LOSS, PERPLEXITY = "eval_loss", "perplexity"
# Scores of the validation loss; all others are of generated texts.
LOSS_SCORES = (EVAL_LOSS, PERPLEXITY)


SECTIONS = ("recipe", "settings", "model")
INPUTS = {
    "dataset": InputSlot(kind="dataset"),
    "start_from": InputSlot(
        kind="checkpoint",
        default_selector="last",
        is_optional=True,
        options={"optimizer": "continue_optimizer"},
    ),
    "reference_scores": InputSlot(kind="reference_scores", is_optional=True),
}
OUTPUTS = {"checkpoint": "checkpoint"}
SEVERAL_PROCESSES = True
FIT_MODULE = "redco_flow.stages.train.fit"
FIT_IGNORES = ("learning_rate", "weight_decay", "schedule", "betas", "epsilon", "seed")

ParameterAxis = Literal["model", "fsdp"]
NumChunks = PositiveInt | Literal["auto"] | None
Overrides = dict[str, list[ParameterAxis | None]]


class Config(StageConfig):
    """Training.

    Args:
        recipe: the pipeline's own where the stage does not say it.
        settings: the recipe's.
        model: the pipeline's section of this name, with changes for this stage.
        continue_optimizer: continue the optimizer state, steps and position in the data of the
            checkpoint in `start_from`; written `start_from: {checkpoint: …, optimizer: true}`.
        num_epochs: passes over the training split.
        max_steps: optimizer steps, instead of `num_epochs`; epochs follow each other, and the last
            one may be cut short.
        global_batch_size: examples per optimizer step, whatever the number of devices; where
            examples are packed, rows of them.
        batching: how examples of different lengths become batches.
        mixture_weights: of the datasets of `data.mixture`, instead of the given ones.
        per_device_batch_size: examples a device works on at once; the rest is accumulated.
        optimizer: of optax, by this name; adafactor takes the learning rate as it is, not
            relative to the parameters.
        momentum: of sgd; null: 0.9.
        betas: decays of adamw's and lion's two averages; null: 0.9 and 0.999 for adamw, 0.9 and
            0.99 for lion.
        epsilon: what adamw adds to the denominator; null: 1e-8.
        learning_rate: at the end of the warmup.
        schedule: the learning rate over the steps.
        weight_decay: decoupled, times the learning rate (of sgd: added to the gradient); norms,
            biases and relative position biases have none.
        max_grad_norm: gradients are scaled down to this global norm; None: never.
        z_loss: coefficient of the squared logarithm of the softmax's denominator, which training
            adds to each token's loss, as PaLM and T5X do (1e-4); evaluations add nothing.
        label_smoothing: share of each label's probability that training spreads evenly over the
            vocabulary; evaluations spread nothing.
        logits_dtype: in which training stores the scores of the vocabulary; bfloat16 halves the
            loss's memory traffic and rounds each score by up to 1/512 of itself.
        lora: train low-rank factors beside kernels.
        dropout_rate: None leaves the model's own.
        mesh: `auto`: when a run starts, `num_model_shards`, `fsdp`, and where nothing else fits
            `per_device_batch_size` become those with which the predicted step is fastest on the
            GPUs that `resources` requests; `cheapest` and `first` may also request fewer of them:
            with the least GPU-hours, or with the earliest end, by the start that Slurm expects;
            null: they are as written.
        num_model_shards: devices that split every product among them.
        num_context_shards: devices that split every sequence among them.
        fsdp: data-parallel devices that share one copy of parameters and optimizer state, or
            `auto`: as few as their memory allows.
        fsdp_over_context: whether context shards share copies too; null: with `fsdp: auto` where
            memory asks for it, else not.
        num_loss_chunks: parts in which the loss scores the vocabulary, so that not all logits are
            in memory at once; `auto`: as many as bring those of a part under 2 GiB on a GPU,
            512 MiB on a TPU, 256 MiB on a CPU.
        num_mlp_chunks: parts of a device's tokens that dense feed-forward layers take one after
            another, so that their units are never all in memory; the backward pass computes those
            again. `auto`: 1, or as many as make a step fit the devices' memory; null: with
            `remat: auto` likewise, else 1.
        sharding_overrides: by a regex searched in the parameters' paths, the mesh axis or null for
            each dim, instead of what the rules would choose.
        freeze: a regex searched in the parameters' paths: those stay as they are.
        param_dtype: in which the parameters that are trained are kept. bfloat16 takes half the
            memory, optimizer state and sums of gradients stay float32; but an update smaller than
            1/512 of a parameter is rounded away (and up to 1/256 may be), so that at the learning
            rates of finetuning many parameters never change.
        frozen_dtype: in which parameters that are not trained are kept, lora's base or what
            `freeze` finds; bfloat16 takes half the memory and rounds them once, at the start.
        mu_dtype: in which the optimizer keeps its momentum (Adam's first moment), of all but
            adafactor; bfloat16 takes half the memory.
        on_nonfinite: whether a step whose loss or gradient is not finite ends the training or is
            skipped.
        max_skipped: this many skipped steps in a row end the training.
        seed: of initialisation, data order and dropout.
        eval: when the validation split is scored, and how.
        keep: which checkpoints stay.
        early_stopping: end the training when a score no longer improves; null: never.
        log_every_steps: steps between two lines of the log and of the metrics.
        save_every_steps: checkpoints besides those at evaluations and ends of epochs.
        profile: steps whose trace is written into the attempt's directory.
        log_to: where losses and scores go besides the run's own records. W&B takes its project,
            its mode and its key from the environment; mlflow takes the server's address
            (MLFLOW_TRACKING_URI), user, password and experiment.
    """

    recipe: RecipeName = "text_to_text"
    settings: RecipeSettings = Field(default_factory=dict)
    model: ModelSection = ModelSection()
    continue_optimizer: Annotated[bool, OnlyWhereSet()] = False
    num_epochs: PositiveInt = 1
    max_steps: Annotated[PositiveInt | None, OnlyWhereSet()] = None
    global_batch_size: PositiveInt = 32
    batching: Batching = Batching()
    mixture_weights: Annotated[dict[Text, PositiveFloat], OnlyWhereSet()] = Field(
        default_factory=dict
    )
    per_device_batch_size: Annotated[PositiveInt | None, Placement()] = None
    optimizer: Literal["adamw", "adafactor", "lion", "sgd"] = "adamw"
    momentum: Annotated[Fraction | None, OnlyWhereSet()] = None
    betas: Annotated[list[Fraction] | None, OnlyWhereSet()] = None
    epsilon: Annotated[PositiveFloat | None, OnlyWhereSet()] = None
    learning_rate: PositiveFloat = 1e-4
    schedule: ScheduleConfig = ScheduleConfig()
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat | None = 1.0
    z_loss: Annotated[NonNegativeFloat, OnlyWhereSet()] = 0.0
    label_smoothing: Annotated[Fraction, OnlyWhereSet()] = 0.0
    logits_dtype: Annotated[Literal["float32", "bfloat16"], OnlyWhereSet()] = "float32"
    lora: LoraConfig | None = None
    freeze: Regex | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: PositiveInt = 10
    dropout_rate: Fraction | None = None
    mesh: Annotated[Literal["auto", "cheapest", "first"] | None, Placement()] = None
    num_model_shards: Annotated[PositiveInt, Placement()] = 1
    num_context_shards: Annotated[PositiveInt, Placement()] = 1
    fsdp: Annotated[PositiveInt | Literal["auto"], Placement()] = 1
    fsdp_over_context: Annotated[bool | None, Placement()] = None
    num_loss_chunks: Annotated[PositiveInt | Literal["auto"], Placement()] = "auto"
    num_mlp_chunks: Annotated[NumChunks, Placement()] = None
    sharding_overrides: Annotated[dict[Regex, list[ParameterAxis | None]], Placement()] = Field(
        default_factory=dict
    )
    seed: NonNegativeInt = 0
    eval: EvaluationConfig = (
        EvaluationConfig()
    )  # before what is kept: its metrics' scores may choose
    keep: Keep = Keep()
    early_stopping: Annotated[EarlyStoppingConfig | None, OnlyWhereSet()] = None
    log_every_steps: Annotated[PositiveInt, Placement()] = 10
    save_every_steps: Annotated[PositiveInt | None, Placement()] = None
    profile: Annotated[ProfileConfig | None, Placement()] = None
    log_to: Annotated[list[Literal["tensorboard", "wandb", "mlflow"]], Placement()] = Field(
        default_factory=list
    )

    @field_validator("sharding_overrides")
    @classmethod
    def _each_axis_once(cls, overrides: Overrides) -> Overrides:
        for pattern, axes in overrides.items():
            named = [axis for axis in axes if axis is not None]
            if len(set(named)) < len(named):
                raise ValueError(f"{pattern!r} names one axis twice")
        return overrides

    @model_validator(mode="after")
    def _one_length(self) -> Config:
        default = type(self).model_fields["num_epochs"].default
        if self.max_steps is not None and self.num_epochs != default:
            raise ValueError("give 'num_epochs' or 'max_steps', not both")
        return self

    @model_validator(mode="after")
    def _metrics_have_these_settings(self) -> Config:
        try:
            check_metric_settings(self.eval.metric_settings, metrics_needed(self))
        except ValueError as error:
            raise ValueError(f"'eval.metric_settings' {error}") from error
        return self

    @model_validator(mode="after")
    def _moments_have_a_use(self) -> Config:
        if self.betas is not None:
            if self.optimizer not in ("adamw", "lion"):
                raise ValueError(f"'betas' are of adamw and lion, and not of {self.optimizer}")
            if len(self.betas) != 2:
                raise ValueError(f"'betas' are two numbers, and there are {len(self.betas)}")
        if self.momentum is not None and self.optimizer != "sgd":
            raise ValueError(f"'momentum' is of sgd, and not of {self.optimizer}")
        if self.epsilon is not None and self.optimizer != "adamw":
            raise ValueError(f"'epsilon' is of adamw, and not of {self.optimizer}")
        return self

    @model_validator(mode="after")
    def _one_way_to_freeze(self) -> Config:
        if self.lora is not None and self.freeze is not None:
            raise ValueError("give 'lora' or 'freeze', not both: lora freezes all of the model")
        return self

    @model_validator(mode="after")
    def _has_a_model_with_dropout(self) -> Config:
        if self.dropout_rate is not None and _has_own_model(self.recipe):
            raise ValueError(
                f"recipe '{self.recipe}' brings its own model, and 'dropout_rate' would change "
                "nothing; what can be chosen of it are its settings"
            )
        return self

    @model_validator(mode="after")
    def _dtypes_have_a_use(self) -> Config:
        if self.frozen_dtype != "float32" and self.lora is None and self.freeze is None:
            raise ValueError("'frozen_dtype' needs 'lora' or 'freeze': nothing is frozen")
        if self.mu_dtype != "float32" and self.optimizer == "adafactor":
            raise ValueError("'mu_dtype' is of no use to adafactor, which keeps no momentum")
        return self

    @field_validator("model")
    @classmethod
    def _known_model_keys(cls, model: ModelSection, info: ValidationInfo) -> ModelSection:
        # What can be checked before anything runs; the hub's config.json is read later.
        recipe = _recipe(info)
        if model != ModelSection() and _has_own_model(info.data.get("recipe", "")):
            raise ValueError(
                f"recipe '{info.data['recipe']}' brings its own model, and these keys would change "
                "nothing; what can be chosen of it are its settings"
            )
        if model.family is not None:
            find_module_name(model.family)
        family = _family(model, recipe)
        if family is None:
            return model
        if recipe and (problem := family_problem(recipe, family)):
            raise ValueError(problem)
        if model.name_or_path is None:
            _check_config(family, model.config)
        return model

    @field_validator("num_mlp_chunks")
    @classmethod
    def _can_chunk(cls, chunks: NumChunks, info: ValidationInfo) -> NumChunks:
        if not isinstance(chunks, int) or "model" not in info.data:
            return chunks
        model: ModelSection = info.data["model"]
        if family := _family(model, _recipe(info)):
            own = model.config if model.name_or_path is None else {}
            _check_config(family, {**own, "num_mlp_chunks": chunks})
        return chunks

    @field_validator("batching")
    @classmethod
    def _can_be_packed(cls, batching: Batching, info: ValidationInfo) -> Batching:
        recipe, given = _recipe(info), find_recipe_if_any(info.data.get("recipe", ""))
        if batching.type != "padded" and given is not None and not given.has_ids:
            raise ValueError(
                f"recipe '{info.data['recipe']}' takes rows as they are, whose widths are not "
                "known: use type padded"
            )
        if batching.type == "packed" and recipe and not recipe.can_pack:
            raise ValueError(
                f"recipe '{info.data['recipe']}' cannot put several examples into one row: use "
                "type bucketed, or recipe language_modeling"
            )
        takes_texts = isinstance(recipe, TextRecipe) and recipe.encode_texts is not None
        if batching.type == "windows" and recipe and not takes_texts:
            raise ValueError(
                f"recipe '{info.data['recipe']}' takes no plain texts, which windows are cut from: "
                "use recipe language_modeling"
            )
        return batching

    @field_validator("keep")
    @classmethod
    def _are_measured(cls, keep: Keep, info: ValidationInfo) -> Keep:
        _check_scores(keep.best, info)
        return keep

    @field_validator("early_stopping")
    @classmethod
    def _is_measured(
        cls, early_stopping: EarlyStoppingConfig | None, info: ValidationInfo
    ) -> EarlyStoppingConfig | None:
        if early_stopping is not None:
            _check_scores([early_stopping.metric], info)
        return early_stopping


def _check_scores(names: list[str], info: ValidationInfo) -> None:
    """Refuse scores that an evaluation of this training does not give."""
    if "eval" in info.data:
        texts_scores(names, info.data["eval"])
    recipe = _recipe(info)
    given = recipe or find_recipe_if_any(info.data.get("recipe", ""))
    # A user's recipe of texts need not declare what it measures.
    is_measured = given is None or given.measures_perplexity
    if PERPLEXITY in names and not is_measured and (recipe or (given and given.is_of_rows)):
        raise ValueError(
            f"recipe '{info.data['recipe']}' measures no perplexity; {EVAL_LOSS} ranks the same"
        )


def _recipe(info: ValidationInfo) -> DeclaredRecipe | None:
    """The recipe where it is ours; another's may not be importable on a login node."""
    return find_own_recipe(info.data.get("recipe", ""))


def _has_own_model(name: str) -> bool:
    recipe = find_recipe_if_any(name)
    return recipe is not None and recipe.has_own_model


def _family(model: ModelSection, recipe: DeclaredRecipe | None) -> str | None:
    """Return which of our families it is, as far as the section, files and recipe tell."""
    family = model.family or family_in_files(model)
    if family is None and model.name_or_path is None:
        family = recipe.default_family if recipe else None
    return family if family in FAMILIES else None


def _check_config(family: str, changes: Mapping[str, Any]) -> None:
    """Refuse keys and values that no model of the family has."""
    defaults = find_config(family)()
    # Those of the tokenizer take their places, and a small vocabulary lacks the defaults.
    tokens = {
        field.name: 0 for field in dataclasses.fields(defaults) if field.name.endswith("_token_id")
    }
    defaults.updated({**tokens, **changes})


def texts_scores(names: list[str], evaluation: EvaluationConfig) -> dict[str, Score]:
    """Return those of some scores that are of generated texts, by their names.

    Raises:
        ValueError: no metric gives one of them.
    """
    named = [text for text in names if text not in LOSS_SCORES]
    return {text: find_score(text, evaluation.metrics) for text in named}


def metrics_needed(config: Config) -> list[str]:
    """Return the metrics to compute on generated texts, each once."""
    watched = [
        *config.keep.best,
        *([config.early_stopping.metric] if config.early_stopping else []),
    ]
    for_them = (score.metric for score in texts_scores(watched, config.eval).values())
    return list(dict.fromkeys([*config.eval.metrics, *for_them]))


def logged_metrics(config: Config) -> dict[str, str]:
    """Return the training loss and the validation's scores, each with its better direction."""
    found = {"train/loss": "min", f"val/{EVAL_LOSS}": "min"}
    recipe = find_own_recipe(config.recipe) or find_recipe_if_any(config.recipe)
    if recipe is None or recipe.measures_perplexity:
        found[f"val/{PERPLEXITY}"] = "min"
    for name in metrics_needed(config):
        found |= {f"val/{key}": way for key, way in find_metric(name).KEYS.items()}
    return found


def output_names(config: Config) -> list[str]:
    """Return `checkpoint/last` and `checkpoint/best/<score>` of each score."""
    return ["checkpoint/last", *(f"checkpoint/best/{key}" for key in config.keep.best)]


def input_problems(config: Config, given: Collection[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield which inputs are missing or of no use, and targets that match nothing."""
    if config.continue_optimizer and "start_from" not in given:
        yield ("continue_optimizer",), "needs `start_from`, the checkpoint to continue"
    if config.continue_optimizer and config.lora is not None:
        yield (
            ("continue_optimizer",),
            "checkpoints of low-rank factors are merged and carry no optimizer state: leave "
            "`optimizer: true` out, or train without `lora`",
        )
    recipe = find_own_recipe(config.recipe)
    if config.lora is not None and (family := _family(config.model, recipe)):
        has_labels = recipe is not None and recipe.targets is not None
        problem = targets_problem(config.lora.targets, family, config.model, has_labels=has_labels)
        if problem is not None:
            yield ("lora", "targets"), problem
        elif config.lora.dropout:
            chunks = (config.num_mlp_chunks, config.num_loss_chunks)
            problem = dropout_problem(
                config.lora.targets, family, config.model, chunks, has_labels=has_labels
            )
            if problem is not None:
                yield ("lora", "dropout"), problem
    given_recipe = find_recipe_if_any(config.recipe)
    is_needed = given_recipe is not None and given_recipe.compares(values_of(config.settings))
    if is_needed and "reference_scores" not in given:
        yield (
            ("recipe",),
            f"the loss that recipe '{config.recipe}' is to learn compares with a reference: add a "
            "stage of kind reference_scores, and `reference_scores: STAGE` to this one",
        )
    if "reference_scores" in given and not is_needed:
        yield (
            ("recipe",),
            f"the loss that recipe '{config.recipe}' is to learn compares with no reference: leave "
            "`reference_scores` out",
        )


def device_problems(config: Config, num_devices: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield which settings this number of devices cannot have, whatever a search may choose."""
    for path, message in layout_problems(config, num_devices, batch="global_batch_size"):
        if config.mesh is None or path == ("num_context_shards",):
            yield path, message


def searched_settings(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the key that leaves settings to the search of `FIT_MODULE`, and those settings."""
    return {} if config.mesh is None else {"mesh": ("num_model_shards", "fsdp")}


def upstream_problems(
    config: Config, upstream: Mapping[str, Any], outputs: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield lengths beyond the model's positions, and why no optimizer can be continued."""
    begun = upstream.get("start_from")
    # The settings of a checkpoint that another kind of stage makes are known once it is made.
    if config.continue_optimizer and isinstance(begun, Config):
        drops_state = begun.keep.optimizer is not None and "/best/" in outputs["start_from"]
        has_state = begun.lora is None and not drops_state
        saved = optimizer_state_settings(begun) if has_state else None
        for message in continuation_problems(config, saved):
            yield "start_from", (), message
    if "dataset" in upstream and not _has_own_model(config.recipe):
        family = _family(config.model, find_own_recipe(config.recipe))
        for path, message in length_problems(config.model, family, upstream["dataset"]):
            yield "dataset", path, message


def artifact_problems(config: Config, slot: str, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the optimizer of a published checkpoint cannot be continued."""
    if slot == "start_from" and config.continue_optimizer:
        yield from continuation_problems(config, metadata.get(OPTIMIZER_STATE))


def code_modules(config: Config) -> list[str]:
    """The recipe, the model behind it, and the metrics."""
    metrics = map(metric_module, metrics_needed(config))
    return [recipe_module(config.recipe), *_model_modules(config), *metrics]


def _model_modules(config: Config) -> list[str]:
    """The family's module; of a model whose config.json says which it is, every one."""
    model, recipe = config.model, find_own_recipe(config.recipe)
    if model.family is None and model.name_or_path is not None:
        return [find_module_name(family) for family in FAMILIES]
    family = model.family or (recipe.default_family if recipe else None)
    return [find_module_name(family)] if family else []


def data_files(config: Config) -> list[Path]:
    """The files of a model that lies in a local directory."""
    return model_files(config.model)


def conclude(config: Config, finished: FinishedStage) -> str:
    """Have the training's run on the MLflow server, if it has one, refer to its artifacts."""
    if "mlflow" not in config.log_to:
        return ""
    return tag_outputs(finished.workspace, finished.result)
