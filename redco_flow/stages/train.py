"""train: a dataset in, checkpoints out: the last one, and the best by each metric asked for.

Light at the top, for plans read its Config; the work is in `training`, imported when it runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from redco_flow.metrics.metric import find_metric, find_metric_of, metric_module
from redco_flow.models.find import FAMILIES, find_config, find_module_name
from redco_flow.recipes.recipe import recipe_module
from redco_flow.spec.model import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Placement,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Text,
)
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.context import StageContext, StageOutputs
from redco_flow.stages.local_model import model_files

SECTIONS = ("recipe", "model")
INPUTS = {"dataset": InputSlot(kind="dataset")}
OUTPUTS = {"checkpoint": "checkpoint"}
SEVERAL_PROCESSES = True
EVAL_LOSS = "eval_loss"
DEFAULT_FAMILY = "t5"


class Schedule(StrictModel):
    """The learning rate over the optimizer steps.

    Args:
        warmup_ratio: share of all steps; give this or warmup_steps.
    """

    type: Literal["linear", "cosine", "constant", "inverse_sqrt", "wsd"] = "linear"
    warmup_ratio: Fraction | None = None
    warmup_steps: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _one_warmup(self) -> Schedule:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("give 'warmup_ratio' or 'warmup_steps', not both")
        return self


class Keep(StrictModel):
    """Which checkpoints to keep.

    Args:
        last: how many of the newest.
        best: also the best by each of these scores: rouge2, bleu, eval_loss, ….
    """

    last: PositiveInt = 1
    best: list[Text] = Field(default_factory=list)

    @field_validator("best")
    @classmethod
    def _known(cls, best: list[str]) -> list[str]:
        for key in best:
            if key != EVAL_LOSS:
                find_metric_of(key)
        if len(set(best)) < len(best):
            raise ValueError("names a score twice")
        return best


class Evaluation(StrictModel):
    """Evaluation on the validation split during training.

    Args:
        every_epochs, every_steps: give one; once per epoch by default. The end is always scored.
        num_examples: the first ones of the split; None: all.
        metrics: whose scores to compute on generated texts, besides those `keep.best` needs.
        num_beams: for generating them; 1 is greedy.
    """

    every_epochs: PositiveInt | None = None
    every_steps: PositiveInt | None = None
    num_examples: PositiveInt | None = None
    metrics: list[Text] = Field(default_factory=list)
    num_beams: PositiveInt = 1

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: list[str]) -> list[str]:
        for name in metrics:
            find_metric(name)
        return metrics

    @model_validator(mode="after")
    def _one_interval(self) -> Evaluation:
        if self.every_epochs is not None and self.every_steps is not None:
            raise ValueError("give 'every_epochs' or 'every_steps', not both")
        return self


class Lora(StrictModel):
    """Train low-rank factors beside kernels; the checkpoints that come out are merged.

    Args:
        rank: of the factors.
        alpha: their product counts alpha / rank times.
        targets: a regex searched in the kernels' paths.
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    targets: Text

    @field_validator("targets")
    @classmethod
    def _regex(cls, targets: str) -> str:
        return _checked_regex(targets)


class Config(StageConfig):
    """Training.

    Args:
        global_batch_size: examples per optimizer step, whatever the number of devices.
        per_device_batch_size: examples a device works on at once; the rest is accumulated.
        dropout_rate: None leaves the model's own.
        num_model_shards: devices that split every product among them.
        fsdp: data-parallel devices that share one copy of parameters and optimizer state, or
            `auto`: as few as their memory allows.
        freeze: a regex searched in the parameters' paths: those stay as they are.
        on_nonfinite: whether a step whose loss or gradient is not finite ends the training or is
            skipped, at most max_skipped - 1 in a row.
        save_every_steps: checkpoints besides those at evaluations and ends of epochs.
    """

    recipe: Text = "text_to_text"
    model: ModelSection = ModelSection()
    num_epochs: PositiveInt = 1
    global_batch_size: PositiveInt = 32
    per_device_batch_size: Annotated[PositiveInt | None, Placement()] = None
    optimizer: Literal["adamw", "adafactor", "lion", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 1e-4
    schedule: Schedule = Schedule()
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat | None = 1.0
    lora: Lora | None = None
    freeze: Text | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: PositiveInt = 10
    dropout_rate: Fraction | None = None
    num_model_shards: Annotated[PositiveInt, Placement()] = 1
    fsdp: Annotated[PositiveInt | Literal["auto"], Placement()] = 1
    seed: NonNegativeInt = 0
    keep: Keep = Keep()
    eval: Evaluation = Evaluation()
    log_every_steps: Annotated[PositiveInt, Placement()] = 10
    save_every_steps: Annotated[PositiveInt | None, Placement()] = None

    @field_validator("freeze")
    @classmethod
    def _regex(cls, freeze: str | None) -> str | None:
        return None if freeze is None else _checked_regex(freeze)

    @model_validator(mode="after")
    def _one_way_to_freeze(self) -> Config:
        if self.lora is not None and self.freeze is not None:
            raise ValueError("give 'lora' or 'freeze', not both: lora freezes all of the model")
        return self

    @field_validator("model")
    @classmethod
    def _known_model_keys(cls, model: ModelSection) -> ModelSection:
        # What can be checked before anything runs; a model's own config.json is read later.
        family = model.family or DEFAULT_FAMILY
        find_module_name(family)
        if model.name_or_path is None and family in FAMILIES:
            _check_config(family, model.config)
        return model


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regex: {error}") from error
    return pattern


def _check_config(family: str, changes: Mapping[str, Any]) -> None:
    """Refuse keys and values that no model of the family has.

    Raises:
        ValueError: one of them; the message names it.
    """
    defaults = find_config(family)()
    # Those of the tokenizer take their places, and a small vocabulary lacks the defaults.
    tokens = {
        field.name: 0 for field in dataclasses.fields(defaults) if field.name.endswith("_token_id")
    }
    defaults.updated({**tokens, **changes})


def metrics_needed(config: Config) -> list[str]:
    """Return the metrics to compute on generated texts, each once."""
    for_best = (find_metric_of(key) for key in config.keep.best if key != EVAL_LOSS)
    return list(dict.fromkeys([*config.eval.metrics, *for_best]))


def output_names(config: Config) -> list[str]:
    """Return `checkpoint/last` and `checkpoint/best/<score>` of each score."""
    return ["checkpoint/last", *(f"checkpoint/best/{key}" for key in config.keep.best)]


def code_modules(config: Config) -> list[str]:
    """The recipe, the model behind it, and the metrics."""
    metrics = map(metric_module, metrics_needed(config))
    return [recipe_module(config.recipe), *_model_modules(config.model), *metrics]


def _model_modules(model: ModelSection) -> list[str]:
    """The family's module; of a model whose config.json says which it is, every one."""
    if model.family is None and model.name_or_path is not None:
        return [find_module_name(family) for family in FAMILIES]
    return [find_module_name(model.family or DEFAULT_FAMILY)]


def data_files(config: Config) -> list[Path]:
    """The files of a model that lies in a local directory."""
    return model_files(config.model)


def run(context: StageContext, config: Config) -> StageOutputs:
    """Train, or go on training from the last checkpoint in the work directory."""
    from redco_flow.stages.training import train

    return train(context, config)
