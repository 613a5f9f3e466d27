"""An HTTP server with OpenAI's API in front of a checkpoint, for trying it: one answer at a time.

On a loopback address it takes requests that name this machine as their host, so that a page of
another site cannot ask it through a browser; with a token, requests that have it. Of a request's
keys those are read that change what is generated here; others that would change an answer are
refused by name. Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import threading
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from redco_flow.orchestrate.checkpoints.chat import CannotConverse, ChatProcess, ProcessDied
from redco_flow.orchestrate.http_server import LOOPBACK, BadRequest, HttpServer, RequestHandler

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
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

    @field_validator("logprobs", mode="before")
    @classmethod
    def _asks_for_none(cls, logprobs: Any) -> Any:
        if logprobs is not False:  # 0, which equals it, asks for those of the answer's tokens
            raise ValueError("is not supported")
        return logprobs

    def question(self) -> dict[str, Any]:
        """The fields of `conversation.Question` that are not the prompt's."""
        changes: dict[str, Any] = {"temperature": None}
        if self.temperature:
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

    def __init__(self, chat: ChatProcess, names: Sequence[str]) -> None:
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
        raise BadRequest(f"{where}: {found['msg'].removeprefix('Value error, ')}") from error


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
        self, chat: ChatProcess, questions: Sequence[Mapping[str, Any]], *, with_usage: bool
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


_PATHS = (CHAT_PATH, TEXT_PATH, "/v1/models")
MAX_BODY_BYTES = 16 << 20
_OF_EVENTS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "Connection": "close",
}


class ModelServer(HttpServer):
    """Listens from its creation on; answers once `completions` is set.

    Args:
        host, port: of the address; port 0 is a free one.
        token: that requests must have; empty: none.

    Attributes:
        died: the error that ended the process with the model.

    Raises:
        OSError: it cannot listen at this address.
    """

    def __init__(self, host: str, port: int, token: str = "") -> None:
        super().__init__((host, port), _Handler)
        self.host, self.token = host, token
        self.completions: Completions | None = None
        self.died: ProcessDied | None = None
        self.turn = threading.Lock()

    @property
    def url(self) -> str:
        """The base of the API."""
        return f"http://{self.host}:{self.server_address[1]}/v1"


class _Handler(RequestHandler):
    server: ModelServer

    def do_GET(self) -> None:  # noqa: N802 (of http.server)
        if not self._is_allowed():
            return
        assert self.server.completions is not None
        models, _, name = self.path.partition("/v1/models")
        found = None
        if not models and (not name or name.startswith("/")):
            found = self.server.completions.models(unquote(name.removeprefix("/")))
        if found is not None:
            self._send(200, found)
        else:
            self._refuse(404, f"unknown path {self.path}; known: {', '.join(_PATHS)}")

    def do_POST(self) -> None:  # noqa: N802 (of http.server)
        if not self._is_allowed():
            return
        if self.path not in (CHAT_PATH, TEXT_PATH):
            self._refuse(404, f"unknown path {self.path}; known: {', '.join(_PATHS)}")
            return
        try:
            body = self.read_json(MAX_BODY_BYTES)
        except BadRequest as error:
            self._refuse(400, str(error))
            return
        assert self.server.completions is not None
        try:
            with self.server.turn:
                if self._has_gone():
                    return
                answer = self.server.completions.answer(self.path, body)
                if not isinstance(answer, dict):
                    self._send_events(answer)
                    return
        except (BadRequest, CannotConverse) as error:
            self._end_if_died(error)
            self._refuse(_status(error), str(error))
            return
        self._send(200, answer)

    def _end_if_died(self, error: Exception) -> None:
        if isinstance(error, ProcessDied):
            self.server.died = error
            threading.Thread(target=self.server.shutdown).start()

    def _has_gone(self) -> bool:
        """Whether the client has closed its connection, as after its timeout."""
        is_readable, _, _ = select.select([self.connection], [], [], 0)
        if not is_readable:
            return False
        self.close_connection = True
        return not self.connection.recv(1, socket.MSG_PEEK)

    def _is_allowed(self) -> bool:
        """Whether the request may be answered; one that may not is refused here."""
        token, host = self.server.token, self.host()
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            self._refuse(401, "the header `Authorization: Bearer TOKEN` is missing or wrong")
            return False
        if not token and host not in LOOPBACK:
            self._refuse(403, f"the request is for host {host}, not for {' or '.join(LOOPBACK)}")
            return False
        return True

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True  # what is left of the body is not read
        self._send(status, _problem(status, message))

    def _send(self, status: int, value: dict[str, Any]) -> None:
        self.write(status, "application/json", json.dumps(value).encode())

    def _send_events(self, events: Events) -> None:
        """Write events as they come; a client that has gone ends them.

        Raises:
            CannotConverse: there is no first one, and nothing was written.
        """
        with closing(events):
            first = next(events)
            self.close_connection = True  # which ends the body: its length is not known
            self.send_response(200)
            for name, value in _OF_EVENTS.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for event in chain([first], events):
                    if self._has_gone():
                        return
                    self._write_event(json.dumps(event))
                self._write_event("[DONE]")
            except CannotConverse as error:
                self._end_if_died(error)
                self._write_event(json.dumps(_problem(_status(error), str(error))))

    def _write_event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())


def _status(error: Exception) -> int:
    return 500 if isinstance(error, ProcessDied) else 400


def _problem(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": None}}
