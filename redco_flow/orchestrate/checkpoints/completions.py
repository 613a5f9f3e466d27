"""Answers of a checkpoint in the form of OpenAI's API: chat completions and completions.

Of a request's keys those are read that change what is generated here; others that would change an
answer are refused by name. Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from redco_flow.orchestrate.checkpoints.chat import Chat
from redco_flow.orchestrate.http_server import BadRequest

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
_LEAST_TEMPERATURE = 1e-5
_NUM_SEEDS = 1 << 31


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[_Part]
    name: str | None = None
    type: str | None = None  # of a message, as lm-eval sends it

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class _PlainFormat(BaseModel):
    type: Literal["text"]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Settings(BaseModel):
    """The keys that both kinds of requests have."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    # These change no answer, or not with these values, and clients send them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    response_format: _PlainFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logprobs: Literal[False] | None = None
    echo: Literal[False] | None = None

    def question(self) -> dict[str, Any]:
        """The fields of `conversation.Question` that are not the prompt's."""
        changes: dict[str, Any] = {"temperature": None}
        if self.temperature >= _LEAST_TEMPERATURE:  # logits are divided by it, in float32
            changes = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if (limit := self.limit) is not None:
            changes["max_new_tokens"] = limit
        if self.seed is not None:
            changes["seed"] = self.seed % _NUM_SEEDS
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return {"changes": changes, "stop": [one for one in stop or () if one]}

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens

    @property
    def streams_usage(self) -> bool:
        """Whether the last event of a stream counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class _ChatRequest(_Settings):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return [{"messages": [message.plain() for message in self.messages]}]


class _TextRequest(_Settings):
    prompt: str | Annotated[list[str], Field(min_length=1)]

    @property
    def prompts(self) -> list[dict[str, Any]]:
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [{"prompt": text} for text in texts]


class Completions:
    """Answers requests by one checkpoint; one call at a time.

    Args:
        chat: the checkpoint's process.
        names: the model's names in requests; responses have the first.
    """

    def __init__(self, chat: Chat, names: Sequence[str]) -> None:
        self._chat, self._names = chat, names

    def models(self, name: str = "") -> dict[str, Any] | None:
        """Return the list of models, or the one of this name; None where it is unknown."""
        model = {"id": self._names[0], "object": "model", "created": 0, "owned_by": "redco-flow"}
        if name:
            return model if name in self._names else None
        return {"object": "list", "data": [model]}

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | Events:
        """Return the response to a request; of one with `stream`, the events as they come.

        Where these are closed before their end, the model stops. They raise CannotConverse, too.

        Args:
            path: CHAT_PATH or TEXT_PATH.

        Raises:
            BadRequest: a key is missing, unknown or has a value that is not supported.
            CannotConverse: the model gives no answer; says why.
        """
        is_chat = path == CHAT_PATH
        request = _read(_ChatRequest if is_chat else _TextRequest, body)
        if request.model not in (None, *self._names):
            raise BadRequest(f"unknown model {request.model!r}; known: {', '.join(self._names)}")
        questions = [{**prompt, **request.question()} for prompt in request.prompts]
        made = _Response(is_chat=is_chat, model=self._names[0])
        if request.stream:
            for question in questions if len(questions) > 1 else ():
                self._chat.ask(**question, checks_alone=True)
            return made.events(self._chat, questions, with_usage=request.streams_usage)
        return made.response([self._chat.ask(**question) for question in questions])


def _read(kind: type[_ChatRequest | _TextRequest], body: Mapping[str, Any]) -> Any:
    given = {key: value for key, value in body.items() if value is not None}  # null: the default
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"])) or "body"
        if found["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields)
            raise BadRequest(f"{where} is not supported; known keys: {known}") from error
        raise BadRequest(f"{where}: {found['msg']}") from error


Events = Generator[dict[str, Any], None, None]


class _Response:
    """Forms the response to one request."""

    def __init__(self, *, is_chat: bool, model: str) -> None:
        self._is_chat = is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._common = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def response(self, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        choices = [
            {**self._content(index, answer["text"]), **_reason(answer)}
            for index, answer in enumerate(found)
        ]
        return {**self._common, "choices": choices, "usage": _usage(found)}

    def events(
        self, chat: Chat, questions: Sequence[Mapping[str, Any]], *, with_usage: bool
    ) -> Events:
        """Yield each piece of an answer as an event, and its end as another."""
        common = dict(self._common)
        if self._is_chat:
            common["object"] = "chat.completion.chunk"
        open_ended = {"finish_reason": None, "logprobs": None}
        answers = []
        for index, question in enumerate(questions):
            role = {"role": "assistant"}
            with closing(chat.stream(**question)) as stream:
                for found in stream:
                    text, end = found.get("piece", ""), open_ended
                    if "piece" not in found:
                        answers.append(found)
                        end = _reason(found)
                    delta = {**role, **({"content": text} if text or role else {})}
                    content = {"delta": delta} if self._is_chat else {"text": text}
                    yield {**common, "choices": [{"index": index, **content, **end}]}
                    role = {}
        if with_usage:
            yield {**common, "choices": [], "usage": _usage(answers)}

    def _content(self, index: int, text: str) -> dict[str, Any]:
        if not self._is_chat:
            return {"index": index, "text": text}
        return {"index": index, "message": {"role": "assistant", "content": text}}


def _reason(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"finish_reason": "stop" if answer["is_whole"] else "length", "logprobs": None}


def _usage(found: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    read = sum(answer["num_prompt_tokens"] for answer in found)
    written = sum(answer["num_tokens"] for answer in found)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
