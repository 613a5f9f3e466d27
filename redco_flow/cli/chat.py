"""The verbs chat and serve-model: converse with a checkpoint, here or behind OpenAI's API."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from redco_flow.cli.arguments import (
    Verbs,
    add_checkpoint,
    add_json,
    add_workspace,
    cannot_listen,
    check_port,
    workspace_of,
)
from redco_flow.errors import UsageError
from redco_flow.terminal_text import visible
from redco_flow.tracking.artifacts import Artifact

if TYPE_CHECKING:
    from redco_flow.orchestrate.checkpoints.chat import ChatProcess


_NEW, _QUIT = "/new", "/quit"
_LINES_OF_LOG = 20

TOKEN_VARIABLE = "REDCO_FLOW_MODEL_TOKEN"  # noqa: S105 (a name)
_PORT = 8000


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    chat = verbs.add("chat", _chat)
    add_checkpoint(chat, or_published=True)
    chat.add_argument(
        "--message", metavar="TEXT", help="send this message, print the answer and exit"
    )
    chat.add_argument("--system", metavar="TEXT", help="begin with this system message")
    chat.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sample with this temperature (default: greedy)",
    )
    chat.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    chat.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens of probability P"
    )
    chat.add_argument("--seed", type=int, default=0, help="seed of the samples (0)")
    _add_model_options(chat)
    add_json(chat)
    add_workspace(chat)
    _add_serve_model(verbs)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the process with the model; `_model_request` reads them."""
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="longest answer, in tokens (256)",
    )
    parser.add_argument(
        "--template",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the chat template, such as enable_thinking=false",
    )
    parser.add_argument(
        "--num-model-shards",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the model (1)",
    )


def _model_request(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `conversation.ChatRequest` that `_add_model_options` gives."""
    for name in ("max_new_tokens", "num_model_shards"):
        if (value := getattr(options, name)) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be above 0.")
    return {
        "max_new_tokens": options.max_new_tokens,
        "num_model_shards": options.num_model_shards,
        "template_kwargs": dict(map(_template_value, options.template)),
    }


def _chat(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.checkpoints.chat import conversing, find_model, name_of

    request = _request(options)
    workspace = workspace_of(options)
    model = find_model(workspace, options.checkpoint)
    request |= conversing(model)
    is_terminal = options.message is None and sys.stdin.isatty()
    if is_terminal:
        sys.stderr.write(f"loading {name_of(model)}\n")
    with _model_process(request) as chat:
        if is_terminal:
            sys.stderr.write(_greeting(chat.ready))
        return _converse(chat, options, is_terminal=is_terminal)


@contextmanager
def _model_process(request: dict[str, Any]) -> Iterator[ChatProcess]:
    """Start the process with the model; where it dies, the error has the last lines it printed."""
    from redco_flow.orchestrate.checkpoints.chat import ChatProcess, ProcessDied

    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            with ChatProcess(request, log.fileno()) as chat:
                yield chat
        except ProcessDied as error:
            raise ProcessDied(f"{error} It said:{_end_of_log(log)}") from error


def _request(options: argparse.Namespace) -> dict[str, Any]:
    """Build a request to the model from the options."""
    drawn = {"--top-k": options.top_k, "--top-p": options.top_p}
    given = [name for name, value in drawn.items() if value is not None]
    if given and options.temperature is None:
        raise UsageError(f"without --temperature, {', '.join(given)} would change nothing.")
    limits = {"--temperature": options.temperature, **drawn}
    for name, value in limits.items():
        if value is not None and value <= 0:
            raise UsageError(f"{name} {value} must be above 0.")
    if options.top_p is not None and options.top_p > 1:
        raise UsageError(f"--top-p {options.top_p} is a share: at most 1.")
    return {
        **_model_request(options),
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": 1.0 if options.top_p is None else options.top_p,
        "seed": options.seed,
    }


def _template_value(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    try:
        found = yaml.safe_load(value)
    except yaml.YAMLError:
        equals = ""
    if not (name and equals):
        raise UsageError(f"--template {text!r}: give KEY=VALUE, as enable_thinking=false.")
    return name, found


def _greeting(ready: dict[str, Any]) -> str:
    return (
        f"recipe {ready['recipe']}, step {ready['step']}, on {ready['devices']}; up to "
        f"{ready['max_length']:,} tokens\n"
        f"{_NEW} begins a new conversation, {_QUIT} or Ctrl-D ends\n"
    )


def _converse(chat: ChatProcess, options: argparse.Namespace, *, is_terminal: bool) -> int:
    """Ask for each message, each with all before it; one that gets no answer is forgotten."""
    from redco_flow.orchestrate.checkpoints.chat import CannotConverse, ProcessDied

    begin = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(begin)
    for text in _messages(options, is_terminal=is_terminal):
        if text == _NEW:
            messages = list(begin)
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            answer = _ask(chat, asked, is_printed=is_terminal and not options.json)
        except CannotConverse as error:
            if not is_terminal or isinstance(error, ProcessDied):
                raise
            sys.stderr.write(f"{error}\n")
            continue
        messages = [*asked, {"role": "assistant", "content": answer["text"]}]
        if options.json or not is_terminal:
            print(json.dumps(answer) if options.json else visible(answer["text"]), flush=True)
        if not answer["is_whole"] and is_terminal:
            sys.stderr.write(f"(cut at {answer['num_tokens']} tokens: --max-new-tokens)\n")
    return 0


def _ask(chat: ChatProcess, messages: list[dict[str, str]], *, is_printed: bool) -> dict[str, Any]:
    """Return the answer, which is printed as it is generated."""
    if not is_printed:
        return chat.ask(messages=messages)
    for found in chat.stream(messages=messages):
        print(visible(found.get("piece", "")), end="", flush=True)
    print(flush=True)
    return found


def _messages(options: argparse.Namespace, *, is_terminal: bool) -> Iterator[str]:
    if options.message is not None:
        yield options.message
        return
    if is_terminal:
        import readline  # noqa: F401 (input() edits lines and remembers them where it is imported)
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if text == _QUIT:
            return
        if text:
            yield text


def _end_of_log(log: IO[str]) -> str:
    """Return the last lines of what the process with the model has printed."""
    log.seek(0)
    lines = log.read().splitlines()[-_LINES_OF_LOG:]
    return "".join(f"\n  {visible(line)}" for line in lines)


def _add_serve_model(verbs: Verbs) -> None:
    serve = verbs.add("serve-model", _serve)
    add_checkpoint(serve, or_published=True)
    serve.add_argument(
        "--port", type=int, default=_PORT, metavar="N", help=f"port; 0 takes a free one ({_PORT})"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help=f"address to listen at (127.0.0.1); others need a token in {TOKEN_VARIABLE}",
    )
    _add_model_options(serve)
    add_workspace(serve)


def _serve(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.checkpoints.chat import conversing, find_model, name_of
    from redco_flow.orchestrate.checkpoints.model_server import Completions

    model = find_model(workspace_of(options), options.checkpoint)
    request = {**_model_request(options), **conversing(model), "needs_template": False}
    names = [name_of(model), options.checkpoint]
    if isinstance(model, Artifact):
        names = list(dict.fromkeys([*names, model.id]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _listening(options) as server:
        sys.stderr.write(f"loading {names[0]}\n")
        try:
            with _model_process(request) as chat:
                server.completions = Completions(chat, names)
                sys.stderr.write(f"{server.url} answers as model {names[0]}; Ctrl-C ends it\n")
                server.serve_forever()
                if server.died is not None:
                    raise server.died
        except KeyboardInterrupt:
            sys.stderr.write("ended\n")
    return 0


def _listening(options: argparse.Namespace) -> Any:
    """Return the server, before the model is loaded: a port that is taken is known at once."""
    from redco_flow.orchestrate.checkpoints.model_server import ModelServer
    from redco_flow.orchestrate.http_server import LOOPBACK

    token = os.environ.get(TOKEN_VARIABLE, "")
    if options.host not in LOOPBACK and not token:
        raise UsageError(
            f"--host {options.host}: other machines could ask the model. Set {TOKEN_VARIABLE} to a "
            "token that requests must have as `Authorization: Bearer TOKEN`."
        )
    check_port(options.port)
    try:
        return ModelServer(options.host, options.port, token)
    except OSError as error:
        raise cannot_listen(options.host, options.port, error) from error
