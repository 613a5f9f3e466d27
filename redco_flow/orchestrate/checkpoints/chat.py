"""Converse with a checkpoint: a process that has JAX answers, one line of JSON for each.

What they say to each other, `stages.predict.conversation` defines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from redco_flow import search_path
from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.hub import is_hub_name
from redco_flow.local_paths import expanded
from redco_flow.orchestrate.checkpoints.export import find_checkpoint
from redco_flow.spec.names import import_named
from redco_flow.tracking.artifacts import Artifact
from redco_flow.tracking.workspace import Workspace

_ENOUGH = "enough"
_PROGRAM = "redco_flow.stages.predict.conversation"
_GRACE_SECONDS = 5.0

PUBLISHED_MODULE = "redco_flow.stages.artifacts.published"  # loaded by name: it is a stage's


class CannotConverse(RedcoFlowError):
    """The checkpoint does not answer; the message says why."""


class ProcessDied(CannotConverse):
    """The process with the model ended without an answer: its log may say why."""


class ChatProcess:
    """A checkpoint that answers, for as long as this context lasts.

    Args:
        request: `conversation.ChatRequest` as JSON.
        log: takes what the process says besides; a file's descriptor.

    Attributes:
        ready: `conversation.Ready` as JSON, once entered.
    """

    def __init__(self, request: Mapping[str, Any], log: int) -> None:
        self._request, self._log = dict(request), log
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],
            env={**os.environ, **search_path.variables()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for who asks
        )
        try:
            self.ready = self._say(self._request)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Return the answer to a question, `conversation.Answer` as JSON.

        Args:
            question: fields of `conversation.Question`.

        Raises:
            CannotConverse: there is none; the next one may be.
        """
        return self._say(question)

    def stream(self, **question: Any) -> Generator[dict[str, Any], None, None]:
        """Yield each `conversation.Piece` of an answer as it is generated, then the answer.

        Where the generator is closed before its end, the model stops.

        Raises:
            CannotConverse: as `ask`.
        """
        found = self._say({**question, "in_pieces": True})
        try:
            while "piece" in found:
                yield found
                found = self._receive()
        except GeneratorExit:
            self._send(_ENOUGH)
            while "piece" in found:
                found = self._receive()
            raise
        yield found

    def _say(self, value: Mapping[str, Any]) -> dict[str, Any]:
        self._send(json.dumps(value))
        return self._receive()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, as `_receive` says
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ProcessDied(f"the process with the model ended with exit code {code}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CannotConverse(answer["error"])
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def find_model(workspace: Workspace, text: str) -> Artifact | Path:
    """Return a checkpoint, or the directory of a published model.

    Args:
        text: as of `find_checkpoint`, or a directory with a config.json.

    Raises:
        UsageError: nothing, several, or something else has this name.
        ArtifactError: the checkpoint's files were deleted.
    """
    folder = expanded(text)
    if (folder / "config.json").is_file():
        return folder.absolute()
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{text} is a PEFT adapter, and not a model: merge it into its model with PEFT's "
            "merge_and_unload, save_pretrained into a directory, and name that."
        )
    try:
        return find_checkpoint(workspace, text)
    except UsageError as error:
        if folder.is_dir() and not (folder / "manifest.json").is_file():
            raise UsageError(
                f"{text} is a directory without a config.json, so no model of Hugging Face's "
                f"format, and no checkpoint either."
            ) from error
        if not is_hub_name(text) or "/" not in text or (workspace.runs / text).parent.is_dir():
            raise
        raise UsageError(
            f"there is no run {text.partition('/')[0]!r}. A model of the hub is downloaded first: "
            f"`hf download {text} --local-dir DIRECTORY`; then name the directory."
        ) from error


def conversing(model: Artifact | Path) -> dict[str, Any]:
    """Return the fields of `conversation.ChatRequest` that name a model.

    Raises:
        UsageError: a published model is not read here, or does not converse.
    """
    if isinstance(model, Artifact):
        return {"checkpoint": str(model.path)}
    published = import_named(PUBLISHED_MODULE).read_published(model)
    if published.recipe not in ("chat", "language_modeling"):
        raise UsageError(
            f"{model}: the model is of recipe {published.recipe}, which does not converse: "
            "`redco-flow predict` takes it."
        )
    return {"checkpoint": str(model), "dtype": published.dtype}


def name_of(model: Artifact | Path) -> str:
    """Return a model's name for people."""
    return model.short_id if isinstance(model, Artifact) else model.name
