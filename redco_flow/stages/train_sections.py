"""The parts of a train stage's settings that are sections of their own, each checked by itself.

Light: read on login nodes to check a pipeline before anything is submitted.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from redco_flow.metrics.metric import find_metric
from redco_flow.spec.model import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Text,
)

EVAL_LOSS, PERPLEXITY = "eval_loss", "perplexity"
# Scores of the validation loss; all others are of generated texts.
LOSS_SCORES = (EVAL_LOSS, PERPLEXITY)


class Schedule(StrictModel):
    """The learning rate over the optimizer steps.

    Args:
        type: what follows the linear warmup: a linear or cosine decay to 0, none, the inverse
            square root of the step, or `wsd`: constant, then a linear decay over the last fifth.
        warmup_ratio, warmup_steps: of the linear warmup, as a share of all steps or as a number.
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
        best: also the best by each of these scores: rouge2, bleu, eval_loss, …; a key of a metric
            that `eval.metrics` names; or the dotted module of one (MODULE.KEY if it has several).
    """

    last: PositiveInt = 1
    best: list[Text] = Field(default_factory=list)

    @field_validator("best")
    @classmethod
    def _each_once(cls, best: list[str]) -> list[str]:
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


class Batching(StrictModel):
    """How examples of different lengths become batches of one shape.

    `padded`: every row is as wide as the longest example. `bucketed`: batches are of examples of
    like length, in a few widths, each of which is compiled for. `packed`: several examples share a
    row, and none sees another.

    Args:
        type: one of the three.
        num_buckets: widths at most, where bucketed.
        packed_length: tokens of a packed row; None: of the longest example.
    """

    type: Literal["padded", "bucketed", "packed"] = "padded"
    num_buckets: PositiveInt = 4
    packed_length: PositiveInt | None = None

    @model_validator(mode="after")
    def _only_packed_has_a_length(self) -> Batching:
        if self.packed_length is not None and self.type != "packed":
            raise ValueError(f"'packed_length' is for type packed, and the type is {self.type}")
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
        return checked_regex(targets)


def checked_regex(pattern: str) -> str:
    """Return a regex that compiles.

    Raises:
        ValueError: it is none.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regex: {error}") from error
    return pattern
