"""Settings and encoding of the preference recipe: pairs of answers to token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from redco_flow.recipes.language_modeling.config import encode
from redco_flow.recipes.recipe import BadExample, Batch, Example
from redco_flow.spec.model import NonNegativeFloat, OfTraining, PositiveFloat, StrictModel
from redco_flow.text.chat import ChatTemplate
from redco_flow.text.conversations import (
    BadConversation,
    Conversation,
    Message,
    check_messages,
    read_messages,
)
from redco_flow.text.rendering import for_template
from redco_flow.text.tokenizer import TextTokenizer

COLUMNS = ("prompt", "chosen", "rejected")
TEXT_COLUMNS = COLUMNS
TAKES_MESSAGES = True

_ANSWERS = ("chosen", "rejected")
_OF_A_REFERENCE = ("dpo", "ipo")
_DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "orpo": 0.1, "simpo": 2.0}
_UNCUT = 2**31 - 1


class Loss(StrictModel):
    """The loss of a pair of answers.

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


class _Messages(NamedTuple):
    """A prompt, which ends with what is answered, and both answers to it."""

    prompt: list[Message]
    chosen: Message
    rejected: Message

    @property
    def conversations(self) -> list[Conversation]:
        return [Conversation([*self.prompt, answer]) for answer in (self.chosen, self.rejected)]


def collate_fn(examples: Sequence[Example], _settings: Settings) -> Batch:
    """Check rows; batches are of what `encode_row` makes of them.

    Raises:
        BadExample, BadConversation: a text is missing or empty, messages are no conversation, or
            both answers are the same.
    """
    for example in examples:
        answers = [example[name] for name in _ANSWERS]
        if found := _messages_of(example):
            answers = [_said(answer) for answer in (found.chosen, found.rejected)]
        else:
            for name in COLUMNS:
                _check_text(name, example[name])
        _check_differ(*answers)
    return {}


def conversations(row: Mapping[str, Any]) -> list[Conversation]:
    """Return what the chat template renders of a row: the prompt with either answer; none of texts.

    Raises:
        BadExample, BadConversation: it is not a prompt with two answers.
    """
    found = _messages_of(row)
    return [] if found is None else found.conversations


def split_key(example: Example) -> bytes:
    """Return what decides whether a row is held out: its prompt, as a finetuning's."""
    if found := _messages_of(example):
        return Conversation(found.prompt).to_json().encode()
    return str(example["prompt"]).encode()


def encode_row(
    row: Mapping[str, Any],
    tokenizer: TextTokenizer,
    settings: Settings,
    *,
    source_prefix: str,
    source_suffix: str,
    template: Callable[[], ChatTemplate] | None = None,
) -> dict[str, Sequence[int]]:
    """Return the token ids of a prompt, with what begins it, and of both answers.

    Texts are encoded as language_modeling does, messages as chat.

    Args:
        template: gives what renders messages.

    Raises:
        BadExample, BadConversation: there are more tokens than `settings.max_length`, or messages
            that cannot be rendered.
    """
    found = _messages_of(row)
    if found is None:
        ids = _encode_texts(row, tokenizer, source_prefix, source_suffix)
    elif source_prefix or source_suffix:
        raise BadExample(
            "messages with a source_prefix or source_suffix",
            "the chat template puts what belongs around them: leave both out",
        )
    else:
        ids = _encode_messages(found, template)
    longest = len(ids["source_ids"]) + max(len(ids[f"{name}_ids"]) for name in _ANSWERS)
    if longest > settings.max_length:
        raise BadExample(
            "longer than max_length",
            f"prompt and answer have {longest} tokens; settings.max_length is "
            f"{settings.max_length}",
        )
    return ids


def _encode_texts(
    row: Mapping[str, Any], tokenizer: TextTokenizer, source_prefix: str, source_suffix: str
) -> dict[str, Sequence[int]]:
    pairs = encode(
        [row["prompt"]] * 2,
        [row[name] for name in _ANSWERS],
        tokenizer,
        source_prefix=source_prefix,
        source_suffix=source_suffix,
        max_source_length=_UNCUT,
        max_target_length=_UNCUT,
    )
    prompt, _ = pairs.source_ids
    chosen, rejected = pairs.target_ids
    # What a first token needs before it, where there is no prompt.
    begin = tokenizer.prefix_ids if len(prompt) else tokenizer.prefix_ids or (tokenizer.eos_id,)
    return {"source_ids": [*begin, *prompt], "chosen_ids": chosen, "rejected_ids": rejected}


def _encode_messages(
    found: _Messages, template: Callable[[], ChatTemplate] | None
) -> dict[str, Sequence[int]]:
    try:
        renders = template() if template else None
    except ValueError as error:
        raise BadExample("no chat template for messages", str(error)) from error
    assert renders is not None, "preprocessing gives the tokenizer's template"
    sides = []
    chats = [for_template(chat, renders) for chat in found.conversations]
    for one in renders.encode(chats, train_on="last"):
        if isinstance(one, BadConversation):
            raise one
        sides.append((one.ids[: one.start], one.ids[one.start :]))
    (prompt, chosen), (other, rejected) = sides
    if prompt != other:
        raise BadExample(
            "the chat template renders a prompt otherwise with another answer",
            "what stands before the answers has other tokens",
        )
    return {"source_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _messages_of(row: Mapping[str, Any]) -> _Messages | None:
    """Read a row of messages; None where its answers are texts.

    Both answers are either whole conversations, whose beginning they share (the column of the
    prompt is not read then), or one message to the prompt.

    Raises:
        BadExample, BadConversation: it is not a prompt with two answers.
    """
    answers = [row[name] for name in _ANSWERS]
    are_messages = list(map(_are_messages, answers))
    if not any(are_messages):
        return None
    if not all(are_messages):
        name = _ANSWERS[are_messages.index(False)]
        raise BadExample(f"field '{name}' has no messages", "and the other answer has")
    chosen, rejected = map(read_messages, answers, _ANSWERS)
    if chosen == rejected:
        _check_differ(*(_said(one[-1]) for one in (chosen, rejected)))
    if chosen[0]["role"] == "assistant":
        prompt = _prompt_of(row["prompt"])
    else:
        pairs = enumerate(zip(chosen, rejected, strict=False))
        longest = min(len(chosen), len(rejected))
        count = next((at for at, (one, other) in pairs if one != other), longest)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    for name, answer in zip(_ANSWERS, (chosen, rejected), strict=True):
        if len(answer) != 1:
            raise BadExample(
                f"field '{name}' is not one answer to the prompt",
                f"it has {len(answer)} messages after those that both have",
            )
        check_messages([*prompt, *answer])
    return _Messages(prompt, chosen[0], rejected[0])


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _prompt_of(value: Any) -> list[Message]:
    if isinstance(value, str):
        _check_text("prompt", value)
        return [{"role": "user", "content": value}]
    return read_messages(value, "prompt")


def _said(answer: Message) -> str:
    """Return an answer's text and tool calls, to compare answers by."""
    calls = answer.get("tool_calls")
    return f"{answer.get('content', '')}{json.dumps(calls, sort_keys=True) if calls else ''}"


def _check_differ(chosen: str, rejected: str) -> None:
    if chosen.strip() == rejected.strip():
        raise BadExample("chosen equals rejected", f"both are {_shortened(chosen.strip())!r}")


def _check_text(name: str, value: Any) -> None:
    if isinstance(value, list):
        detail = "it is a list, and the answers are no messages"
        raise BadExample(f"field '{name}' is not text", detail)
    if not isinstance(value, str):
        raise BadExample(f"field '{name}' is not text", f"it is {type(value).__name__}")
    if not value.strip():
        raise BadExample(f"field '{name}' is empty")
    if "\0" in value:
        raise BadExample("NUL byte", f"in field '{name}'")


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
