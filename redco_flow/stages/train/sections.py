"""Sections of a training's settings, such as schedule, keep, eval, batching and lora."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from redco_flow.bounded import search_problem
from redco_flow.local_paths import expanded, is_folder
from redco_flow.metrics.settings import MetricSettings
from redco_flow.models.find import find_config
from redco_flow.models.hub.layouts import TensorLayout
from redco_flow.models.hub.model_files import CONFIG_FILE
from redco_flow.models.hub.module_names import (
    ALL_LINEAR,
    find_targets,
    flat_layouts,
    is_convolution,
    is_matrix,
)
from redco_flow.records import read_json
from redco_flow.spec.metric import find_metric
from redco_flow.spec.model import (
    Fraction,
    NonNegativeInt,
    OnlyWhereSet,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Text,
    Texts,
    checked_regex,
)
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.stage_kind import StageConfig

_PLAIN_NAME = re.compile(r"[\w.-]+")  # takes no time to search
# What a model may have or not; which it is, its files say.
_HEADS = ("has_head", "has_pooler", "has_classifier")
_LABELS = TensorLayout(
    "model labels", "labels model", "classifier.weight", aliases=("score.weight",)
)

OPTIMIZER_STATE = "optimizer_state"
"""The key of a checkpoint's metadata with the settings that its optimizer state depends on."""

_KEYS = ("recipe", "optimizer", "mu_dtype", "param_dtype", "frozen_dtype", "freeze")


def targets_problem(
    targets: str | list[str], family: str, model: ModelSection, *, has_labels: bool
) -> str | None:
    """Say which targets match nothing; None where all match, or the model is not here to ask.

    Args:
        family: one of ours.
        has_labels: whether the recipe gives the model a head of labels.
    """
    try:
        config = _config(family, model)
    except (OSError, ValueError):  # reported for itself, or read when the stage runs
        return None
    if config is None:
        return None
    layouts = _layouts(config, has_labels=has_labels)
    entries = [targets] if isinstance(targets, str) else targets
    patterns = [entry for entry in entries if not _PLAIN_NAME.fullmatch(entry)]
    names = [*layouts, *(one.name for one in layouts.values())]
    if patterns and (problem := search_problem(patterns, names)):
        return problem
    try:
        found = find_targets(targets, layouts, renamings=config.module_renamings)
    except ValueError as error:
        return str(error)
    if found.pattern == ALL_LINEAR:
        return None
    chosen = {path for path in layouts if found.pattern and re.search(found.pattern, path)}
    if has_labels and all(path.startswith("classifier/") for path in chosen | {*found.modules}):
        return (
            f"{', '.join(entries)} means only the head of labels, which is trained in full anyway: "
            f"name modules of the model too, or {ALL_LINEAR}"
        )
    return None


def in_feed_forward(path: str) -> bool:
    """Say whether a kernel is of a dense feed-forward layer, which `num_mlp_chunks` cuts."""
    return "mlp" in path.split("/")


def is_head(path: str) -> bool:
    """Say whether a kernel scores the vocabulary, which `num_loss_chunks` cuts."""
    return path.rpartition("/")[2] == "lm_head"


def dropout_problem(
    targets: str | list[str],
    family: str,
    model: ModelSection,
    chunks: tuple[int | str | None, int | str | None],
    *,
    has_labels: bool,
) -> str | None:
    """Say which of the targets' kernels cannot have `lora.dropout`, and why; None: all can.

    Args:
        targets: those in which `targets_problem` finds no problem.
        family, has_labels: as of `targets_problem`.
        chunks: `num_mlp_chunks` and `num_loss_chunks`.
    """
    try:
        config = _config(family, model)
    except (OSError, ValueError):
        return None
    if config is None:
        return None
    layouts = _layouts(config, has_labels=has_labels)
    found = find_targets(targets, layouts, renamings=config.module_renamings)
    has_tied_head = not has_labels and not any(map(is_head, layouts))

    def is_table(path: str) -> bool:
        return has_tied_head and "vocabulary" in layouts[path].dims

    def is_meant(path: str) -> bool:
        if has_labels and (is_head(path) or path.startswith("classifier/")):
            return False  # the one is not there, the other trained in full
        if found.pattern == ALL_LINEAR:
            return path not in found.without and not is_head(path) and not is_table(path)
        return path in found.modules or bool(found.pattern and re.search(found.pattern, path))

    kernels = [
        path
        for path, one in layouts.items()
        if (is_matrix(one) or "expert" in one.dims)
        and sum(dims != ["expert"] for dims in one.tensor_dims) > 1
        and is_meant(path)
    ]
    causes: dict[str, Callable[[str], bool]] = {
        "experts": lambda path: "expert" in layouts[path].dims,
        "a convolution": lambda path: is_convolution(layouts[path]),
        "rows are looked up": is_table,
    }
    of_mlp, of_loss = chunks
    of_mlp = getattr(config, "num_mlp_chunks", 1) if of_mlp is None else of_mlp
    if isinstance(of_mlp, int) and of_mlp > 1:
        causes[f"num_mlp_chunks is {of_mlp}"] = in_feed_forward
    if isinstance(of_loss, int) and of_loss > 1:
        causes[f"num_loss_chunks is {of_loss}"] = is_head
    problems = [
        f"{', '.join(refused)} ({cause})"
        for cause, holds in causes.items()
        if (refused := [path for path in kernels if holds(path)])
    ]
    if not problems:
        return None
    return (
        f"falls on what kernels are multiplied with, and cannot with {'; '.join(problems)}: leave "
        "these out of `targets`, leave the chunks out, or set dropout to 0"
    )


def _layouts(config: Any, *, has_labels: bool) -> dict[str, TensorLayout]:
    layouts = flat_layouts(config.tensor_layouts())
    return {**layouts, "classifier/kernel": _LABELS} if has_labels else layouts


def _config(family: str, model: ModelSection) -> Any:
    """Return the model's configuration, with all heads; None where it is not here."""
    kind = find_config(family)
    config = kind()
    if model.name_or_path is not None:
        values = _config_values(model)
        if values is None:
            return None
        config = kind.from_hugging_face(values)
    heads = {name: True for name in _HEADS if hasattr(config, name)}
    return config.updated({**model.config, **heads})


def _config_values(model: ModelSection) -> Mapping[str, Any] | None:
    """Return the content of the model's config.json, of a hub's where the cache has it."""
    assert model.name_or_path is not None
    folder = expanded(model.name_or_path)
    if not is_folder(folder):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.name_or_path, CONFIG_FILE, revision=model.revision)
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    values = read_json(folder / CONFIG_FILE)
    return values if isinstance(values, dict) else None


class ScheduleConfig(StrictModel):
    """The learning rate over the optimizer steps.

    Args:
        type: what follows the linear warmup: a linear or cosine decay to 0, none, the inverse
            square root of the step (without a warmup, of the step + 10,000), or `wsd`: constant,
            then a linear decay over the last fifth.
        warmup_ratio, warmup_steps: of the linear warmup, as a share of all steps or as a number.
        min_lr_ratio: the least rate after the warmup, as a share of `learning_rate`: what a decay
            ends at instead of 0.
    """

    type: Literal["linear", "cosine", "constant", "inverse_sqrt", "wsd"] = "linear"
    warmup_ratio: Fraction | None = None
    warmup_steps: NonNegativeInt | None = None
    min_lr_ratio: Annotated[Fraction, OnlyWhereSet()] = 0.0

    @model_validator(mode="after")
    def _one_warmup(self) -> ScheduleConfig:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("give 'warmup_ratio' or 'warmup_steps', not both")
        return self

    @model_validator(mode="after")
    def _falls_to_its_least(self) -> ScheduleConfig:
        if self.min_lr_ratio and self.type == "constant":
            raise ValueError("'min_lr_ratio' is of no use to type constant, whose rate stays")
        return self


def _without_split(score: str) -> str:
    """Return the key of a score that is named as in tables: `val/rouge2` is `rouge2`."""
    return score.removeprefix("val/")


class Keep(StrictModel):
    """Retention of checkpoints.

    Args:
        last: how many of the newest.
        best: also the best by each of these scores: rouge2, bleu, eval_loss, …, also written
            val/rouge2; a key of a metric that `eval.metrics` names; or the dotted module of one
            (MODULE.KEY if it has several).
        optimizer: `last`: only the newest carry optimizer state, from which a training can be
            continued, and the best have their parameters alone, with adamw a third of the bytes;
            null: all carry it.
    """

    last: PositiveInt = 1
    best: Texts = Field(default_factory=list)
    optimizer: Annotated[Literal["last"] | None, OnlyWhereSet()] = None

    @field_validator("best")
    @classmethod
    def _each_once(cls, best: list[str]) -> list[str]:
        best = [_without_split(name) for name in best]
        if len(set(best)) < len(best):
            raise ValueError("names a score twice")
        return best


class EvaluationConfig(StrictModel):
    """Evaluation on the validation split during training.

    Args:
        every_epochs, every_steps: give one; once per epoch by default. The end is always scored.
        num_examples: the first ones of the split; None: all.
        metrics: whose scores to compute on generated texts, besides those `keep.best` needs.
        metric_settings: by metric: settings such as `{bleu: {tokenize: zh}}`.
        num_beams: for generating them; 1 is greedy.
    """

    every_epochs: PositiveInt | None = None
    every_steps: PositiveInt | None = None
    num_examples: PositiveInt | None = None
    metrics: Texts = Field(default_factory=list)
    metric_settings: Annotated[MetricSettings, OnlyWhereSet()] = Field(default_factory=dict)
    num_beams: PositiveInt = 1

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: list[str]) -> list[str]:
        for name in metrics:
            find_metric(name)
        return metrics

    @model_validator(mode="after")
    def _one_interval(self) -> EvaluationConfig:
        if self.every_epochs is not None and self.every_steps is not None:
            raise ValueError("give 'every_epochs' or 'every_steps', not both")
        return self


class EarlyStoppingConfig(StrictModel):
    """End a training whose score no longer improves, with the checkpoints that are there then.

    A training that was interrupted ends at the same step as one that was not.

    Args:
        metric: a score of the validation split: eval_loss, rouge2, …, named as in `keep.best`.
        patience: evaluations in a row without a better score than before.
    """

    metric: Annotated[Text, AfterValidator(_without_split)]
    patience: PositiveInt = 3


class Batching(StrictModel):
    """The batching of examples of different lengths into batches of one shape.

    `padded`: every row is as wide as the longest example. `bucketed`: batches are of examples of
    like length, in a few widths, each of which is compiled for. `packed`: several examples share a
    row, and none sees another. `windows`: plain texts, each with its end token, are one stream, of
    which every row is a window that sees all texts in it.

    Args:
        type: one of the four.
        num_buckets: widths at most, where bucketed.
        packed_length: tokens of a packed row; None: of the longest example.
        window_length: tokens that a window predicts, each from those before it in the window.
        random_offsets: whether windows of the training split begin anywhere; else one begins where
            another ends. Evaluation has those, so that it predicts each token once.
    """

    type: Literal["padded", "bucketed", "packed", "windows"] = "padded"
    num_buckets: PositiveInt = 4
    packed_length: PositiveInt | None = None
    window_length: Annotated[PositiveInt | None, OnlyWhereSet()] = None
    random_offsets: Annotated[bool, OnlyWhereSet()] = False

    @model_validator(mode="after")
    def _only_packed_has_a_length(self) -> Batching:
        if self.packed_length is not None and self.type != "packed":
            raise ValueError(f"'packed_length' is for type packed, and the type is {self.type}")
        return self

    @model_validator(mode="after")
    def _windows_have_a_length(self) -> Batching:
        if self.type == "windows":
            if self.window_length is None:
                raise ValueError("type windows needs 'window_length', in tokens")
        elif self.window_length is not None or self.random_offsets:
            raise ValueError(
                "'window_length' and 'random_offsets' are for type windows, and the type is "
                f"{self.type}"
            )
        return self


class LoraConfig(StrictModel):
    """Train low-rank factors beside kernels; the checkpoints that come out are merged.

    They keep the factors, too, for `redco-flow export`.

    Args:
        rank: of the factors.
        alpha: their product counts alpha / rank times.
        targets: modules as transformers names them (`q_proj`, `attn.c_proj`), one or a list; or
            regexes searched in the kernels' paths; or `all-linear`: every kernel but embeddings
            and the head. Each module that is named has factors of its own, as in PEFT.
        rank_stabilized: the product counts alpha / sqrt(rank) times (rsLoRA).
        dora: a magnitude for each output is trained beside the factors, which then only turn
            the weights (DoRA).
        separate: q, k and v, or an MLP's gate and what it gates, which are one kernel here, have
            factors of their own each, as in PEFT; otherwise they share one A.
        dropout: share of what the factors read that training zeroes, drawn for each number of
            each token, as in PEFT.
        base_dtype: int8 keeps the kernels that have factors in 8 bits, with a scale for each
            output, nf4 in 4 (QLoRA's levels), with a scale for each block of 64; None: as
            `frozen_dtype` says.
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    targets: Text | Annotated[list[Text], Field(min_length=1)]
    rank_stabilized: Annotated[bool, OnlyWhereSet()] = False
    dora: Annotated[bool, OnlyWhereSet()] = False
    separate: Annotated[bool, OnlyWhereSet()] = False
    dropout: Annotated[Fraction, OnlyWhereSet()] = 0.0
    base_dtype: Annotated[Literal["int8", "nf4"] | None, OnlyWhereSet()] = None

    @field_validator("targets")
    @classmethod
    def _regexes(cls, targets: str | list[str]) -> str | list[str]:
        for target in [targets] if isinstance(targets, str) else targets:
            checked_regex(target)
        return targets


class ProfileConfig(StrictModel):
    """Optimizer steps to trace with JAX's profiler, in the first process.

    Args:
        start_step: the first of them; 1 is the training's first, which is compiled within it.
        num_steps: how many.
    """

    start_step: PositiveInt
    num_steps: PositiveInt = 3


def optimizer_state_settings(config: StageConfig) -> dict[str, Any]:
    """Return a train stage's settings that are equal where an optimizer's state is continued."""
    return {key: getattr(config, key) for key in _KEYS}


def continuation_problems(config: StageConfig, saved: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield why a training cannot continue the optimizer of a checkpoint.

    Args:
        saved: the checkpoint's `optimizer_state_settings`; None where it has no such state.
    """
    if saved is None:
        yield (
            "the checkpoint has no recorded optimizer state: it is of low-rank factors, of "
            "`keep: {optimizer: last}` and not the last one, or of an earlier version. Leave "
            "`optimizer: true` out to begin with its parameters alone, or choose another checkpoint"
        )
        return
    for key, value in optimizer_state_settings(config).items():
        if saved.get(key) != value:
            yield (
                f"`optimizer: true` continues a training with {key} {_shown(saved.get(key))}, and "
                f"here it is {_shown(value)}: give both the same {key}, or leave `optimizer: true` "
                "out to begin with the parameters alone"
            )


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
