"""preference: of two answers the better one. What plans and preprocessing need of the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from redco_flow.recipes.language_modeling.config import DEFAULT_FAMILY, FAMILIES, encode
from redco_flow.recipes.recipe import BadExample, Batch, Example
from redco_flow.spec.model import NonNegativeFloat, OfTraining, PositiveFloat, StrictModel
from redco_flow.text.tokenizer import TextTokenizer

__all__ = ["DEFAULT_FAMILY", "FAMILIES", "Settings", "collate_fn", "encode_row"]

COLUMNS = ("prompt", "chosen", "rejected")
TEXT_COLUMNS = COLUMNS
SPLIT_BY = ("prompt",)
SAME_MODEL_AS = "language_modeling"

_OF_A_REFERENCE = ("dpo", "ipo")
_DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "orpo": 0.1, "simpo": 2.0}
_UNCUT = 2**31 - 1


class Loss(StrictModel):
    """What is learnt of a pair of answers.

    Args:
        type: `dpo` and `ipo` compare with a reference's log-probabilities; `orpo` and `simpo` do
            not. `orpo` also learns the chosen answer, as finetuning does.
        variant: of dpo: the logistic loss of the paper (sigmoid), a hinge (SLiC), or `robust`,
            which is unbiased where the share `label_smoothing` of the pairs is the wrong way round.
        beta: the strength: of dpo and ipo how costly it is to leave the reference, of orpo the
            weight of the odds ratio, of simpo the scale of rewards. None: 2.0 of simpo, else 0.1.
        gamma: of simpo: by how much the chosen answer's reward should be larger.
        label_smoothing: of dpo (sigmoid, robust) and simpo: the share of the pairs that is thought
            to be the wrong way round.
    """

    type: Literal["dpo", "ipo", "orpo", "simpo"] = "dpo"
    variant: Literal["sigmoid", "hinge", "robust"] = "sigmoid"
    beta: PositiveFloat | None = None
    gamma: NonNegativeFloat = 0.5
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    @property
    def strength(self) -> float:
        """`beta`, or what it is by default."""
        return _DEFAULT_BETA[self.type] if self.beta is None else self.beta

    @model_validator(mode="after")
    def _fits_its_type(self) -> Loss:
        if self.variant != "sigmoid" and self.type != "dpo":
            raise ValueError(f"'variant' is of type dpo, and the type is {self.type}")
        is_smoothed = self.type == "simpo" or (self.type == "dpo" and self.variant != "hinge")
        if self.label_smoothing and not is_smoothed:
            name = "dpo's hinge" if self.type == "dpo" else f"type {self.type}"
            raise ValueError(f"'label_smoothing' would change nothing of {name}")
        if self.gamma != 0.5 and self.type != "simpo":
            raise ValueError(f"'gamma' is of type simpo, and the type is {self.type}")
        return self


class Settings(StrictModel):
    """Keys of the pipeline's `settings`.

    Args:
        max_length: tokens of a prompt with either answer, the end token included; a longer row is
            a bad row, as `data.on_bad_row` says.
        loss: what is learnt of a pair of answers.
    """

    max_length: Annotated[int, Field(ge=3)] = 1024
    loss: Annotated[Loss, OfTraining()] = Loss()


def needs_reference(settings: Settings) -> bool:
    """Whether the loss compares with the log-probabilities of a reference."""
    return settings.loss.type in _OF_A_REFERENCE


def collate_fn(examples: Sequence[Example], _settings: Settings) -> Batch:
    """Check rows; batches are of what `encode_row` makes of them.

    Raises:
        BadExample: a text is missing or empty, or both answers are the same.
    """
    for example in examples:
        for name in COLUMNS:
            _check_text(name, example[name])
        if example["chosen"].strip() == example["rejected"].strip():
            raise BadExample(
                "chosen equals rejected", f"both are {_shortened(example['chosen'].strip())!r}"
            )
    return {}


def encode_row(
    row: Mapping[str, Any],
    tokenizer: TextTokenizer,
    settings: Settings,
    *,
    source_prefix: str,
    source_suffix: str,
) -> dict[str, Sequence[int]]:
    """Return the token ids of a prompt and of both answers, as language_modeling makes them.

    Raises:
        BadExample: there are more tokens than `settings.max_length`.
    """
    pairs = encode(
        [row["prompt"]] * 2,
        [row["chosen"], row["rejected"]],
        tokenizer,
        source_prefix=source_prefix,
        source_suffix=source_suffix,
        max_source_length=_UNCUT,
        max_target_length=_UNCUT,
    )
    prompt, _ = pairs.source_ids
    chosen, rejected = pairs.target_ids
    longest = len(tokenizer.prefix_ids) + len(prompt) + max(len(chosen), len(rejected))
    if longest > settings.max_length:
        raise BadExample(
            "longer than max_length",
            f"prompt and answer have {longest} tokens; settings.max_length is "
            f"{settings.max_length}",
        )
    return {"source_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _check_text(name: str, value: Any) -> None:
    if isinstance(value, list):
        detail = "it is a list, as of messages: write prompts and answers as texts"
        raise BadExample(f"field '{name}' is not text", detail)
    if not isinstance(value, str):
        raise BadExample(f"field '{name}' is not text", f"it is {type(value).__name__}")
    if not value.strip():
        raise BadExample(f"field '{name}' is empty")
    if "\0" in value:
        raise BadExample("NUL byte", f"in field '{name}'")


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
