"""Answer a conversation turn by turn with a checkpoint, in a process of its own.

`python -m redco_flow.stages.predict.conversation` reads lines of JSON from standard input and
writes one for each: first a `ChatRequest`, answered by a `Ready`, then a `Question`, answered by an
`Answer`, before which there may be `Piece`s; or {"error": …}. The line `enough` ends the answer
that is generated. It ends with its input. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from time import monotonic
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.errors import EngineError
from redco_flow.engine.predictor import Predictor
from redco_flow.errors import ArtifactError, RedcoFlowError
from redco_flow.recipes.find import shares_model
from redco_flow.recipes.parts.model import end_ids
from redco_flow.recipes.recipe import (
    Generation,
    RandomChoice,
    Recipe,
    TokenLengths,
    matmul_precision,
)
from redco_flow.runtime.process_group import describe_devices
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact, TrainedModel
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER
from redco_flow.stages.artifacts.pretrained import PretrainedModel
from redco_flow.stages.artifacts.tokenizer import save_pretrained_tokenizer
from redco_flow.text.chat import ChatTemplate
from redco_flow.text.conversations import (
    BadConversation,
    Conversation,
    check_characters,
    check_messages,
)
from redco_flow.text.special_tokens import cut_before, settled, with_start
from redco_flow.text.tokenizer import TextTokenizer

_RECIPE = "chat"
_ENOUGH = "enough"
_NUM_PREDICTORS = 16
_NUM_BEFORE = 8  # tokens that an answer is decoded with: more than a character or a space has
_SMALLEST_WIDTH = 64  # of prompts: each power of two from here on compiles once


@dataclass(frozen=True)
class ChatRequest:
    """The checkpoint and the settings of a conversation.

    Args:
        checkpoint: the artifact's files, or a published model's.
        dtype: of a published model's products; None: it is a checkpoint's files.
        max_new_tokens: of an answer.
        temperature: what logits are divided by before a token is drawn; None: the likeliest one.
        top_k, top_p, seed: of draws; see `predict`.
        template_kwargs: what the chat template gets besides the messages.
        num_model_shards: devices that split every product among them.
        needs_template: whether a tokenizer without a chat template is an error at once; with
            False, conversations alone are refused.
    """

    checkpoint: str
    max_new_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_model_shards: int = 1
    needs_template: bool = True
    dtype: str | None = None


@dataclass(frozen=True)
class Question:
    """A prompt that the model continues.

    Args:
        messages: a conversation that ends with a question.
        prompt: a text, instead of a conversation.
        changes: fields of the `ChatRequest` with other values for this question alone; draws with
            the same `seed` are the same, and without one each question has other draws.
        stop: strings of which the first that the answer has ends it, and is left out.
        in_pieces: whether `Piece`s are written as they are generated.
        checks_alone: nothing is generated: the answer is empty, or the error that there would be.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    in_pieces: bool = False
    checks_alone: bool = False

    @property
    def reads_tokens(self) -> bool:
        """Whether tokens are read while they are generated.

        Programs that do so are in no persistent cache: they compile in every process.
        """
        return self.in_pieces or bool(self.stop)


@dataclass(frozen=True)
class Piece:
    """A part of an answer; all of them together are its text."""

    piece: str


@dataclass(frozen=True)
class Ready:
    """A loaded model that can answer.

    Args:
        devices: in words.
        max_length: tokens of a conversation, the next answer included.
    """

    recipe: str
    step: int
    devices: str
    max_length: int


@dataclass(frozen=True)
class Answer:
    """The model's next message.

    Args:
        num_tokens: of it, with what ends it.
        num_prompt_tokens: that it read.
        is_whole: whether it ended by itself or a stop string, and not at `max_new_tokens`.
        seconds: that it took; the first of a longer prompt compiles.
    """

    text: str
    num_tokens: int
    num_prompt_tokens: int
    is_whole: bool
    seconds: float


class Conversant:
    """A checkpoint that answers.

    Args:
        request: see there.

    Raises:
        ArtifactError: it is no checkpoint of a model that converses.
        CheckpointError: it is damaged.
    """

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._folder = tempfile.TemporaryDirectory(prefix="redco-flow-chat-")
        self._checkpoint, tokenizer = _load(request, Path(self._folder.name))
        record = self._checkpoint.record
        if not shares_model(record.recipe, _RECIPE):
            raise ArtifactError(
                f"the checkpoint is of recipe '{record.recipe}', which does not converse; recipes "
                "chat, preference and language_modeling do."
            )
        self._tokenizer = self._checkpoint.tokenizer
        self._template, self._lacks_template = None, ""
        try:
            self._template = ChatTemplate.load(tokenizer, request.template_kwargs)
        except ValueError as error:
            self._lacks_template = f"the checkpoint does not converse: {error}"
            if request.needs_template:
                raise ArtifactError(self._lacks_template) from error
        self._deployer = Deployer(
            request.num_model_shards,
            seed=request.seed,
            matmul_precision=matmul_precision(record.model),
        )
        recipe = self._recipe(1)
        example = {"row_id": "", "source_ids": [0], "target_ids": [0, 0]}
        shapes, batch = recipe.abstract_params(), recipe.collate_fn([example])
        self._rules = self._deployer.get_sharding_rules(shapes, recipe.loss_fn, batch, None, False)
        self._params = self._checkpoint.load_params(recipe, self._deployer, self._rules)
        self._predictors: dict[tuple[int, Generation], Predictor] = {}
        likelihoods = recipe.token_likelihoods
        assert likelihoods is not None, "every decoder-only model tells how likely tokens are"
        self.ready = Ready(record.recipe, record.step, describe_devices(), likelihoods.max_length)

    def answer(
        self, question: Question, turn: int, enough: Event, write: Callable[[str], None]
    ) -> Answer:
        """Return what the assistant says next.

        Args:
            turn: draws of another one are others.
            enough: ends the answer when it is set.
            write: called with each piece, where the question asks for them.

        Raises:
            BadConversation: there is nothing to answer, or the template fails.
            ArtifactError: the conversation is longer than the model reads.
        """
        request = replace(self._request, **question.changes)
        seed = request.seed if "seed" in question.changes else request.seed + turn
        ids = self._ids(question)
        began, width = monotonic(), self._width(len(ids), request.max_new_tokens)
        if question.checks_alone:
            return Answer("", 0, len(ids), False, 0.0)
        predictor = self._predictor(width, request, reads_tokens=question.reads_tokens)
        example = {"row_id": "prompt", "source_ids": ids, "target_ids": [0]}
        ends = {self._tokenizer.eos_id, *end_ids(self._checkpoint.record.model)}
        before = ids if question.messages is None else ()
        growing = GrowingAnswer(self._tokenizer, ends, question, enough, write, before)
        self._add = growing.add
        (tokens,) = predictor.predict([example], self._params, seed=seed)
        if not question.reads_tokens:
            any(map(growing.add, tokens.tolist()))  # until one is the last
        text = growing.finish()
        took = monotonic() - began
        return Answer(text, growing.num_tokens, len(ids), growing.is_whole, took)

    def _on_token(self, tokens: Any, _position: Any) -> NDArray[np.bool_]:
        """Add the first row's token; the others only fill the batch, and end with it."""
        tokens = np.asarray(tokens)
        return np.full(tokens.shape, self._add(int(tokens[0])))

    def _ids(self, question: Question) -> list[int]:
        if question.messages is None:
            prompt = question.prompt or ""
            check_characters(prompt, "the prompt")
            (encoded,) = self._tokenizer.encode_batch([prompt])
            ids = with_start(encoded, self._tokenizer.prefix_ids)
            if not ids:
                raise BadConversation("the prompt is empty")
            return ids
        if self._template is None:
            raise ArtifactError(self._lacks_template)
        asked = [dict(message) for message in question.messages]
        check_messages(asked, ends_with_answer=False)
        return self._template.encode_prompt(Conversation(asked))

    def _width(self, num_tokens: int, max_new_tokens: int) -> int:
        """The width that a prompt is padded to."""
        room = self.ready.max_length - max_new_tokens
        if num_tokens > room:
            raise ArtifactError(
                f"the prompt has {num_tokens} tokens, and the model reads "
                f"{self.ready.max_length}, of which an answer may take {max_new_tokens}: begin a "
                "new one, or allow fewer new tokens."
            )
        width = _SMALLEST_WIDTH
        while width < num_tokens:
            width *= 2
        return min(width, room)

    def _predictor(self, width: int, request: ChatRequest, *, reads_tokens: bool) -> Predictor:
        sampling = None
        if request.temperature is not None:
            sampling = RandomChoice(request.temperature, request.top_k, request.top_p)
        on_token = self._on_token if reads_tokens else None
        generation = Generation(
            max_length=request.max_new_tokens, sampling=sampling, on_token=on_token
        )
        key = (width, generation)
        if key not in self._predictors:
            while len(self._predictors) >= _NUM_PREDICTORS:
                del self._predictors[next(iter(self._predictors))]  # with what it has compiled
            recipe = self._recipe(width)
            self._predictors[key] = Predictor(
                self._deployer,
                collate_fn=recipe.collate_for_prediction,
                pred_fn=recipe.make_pred_fn(generation),
                sharding_rules=self._rules,
                batch_size=self._deployer.num_data_shards,
            )
        self._predictors[key] = self._predictors.pop(key)  # the last one used is the last
        return self._predictors[key]

    def _recipe(self, width: int) -> Recipe:
        return self._checkpoint.build_recipe(width, 2, recipe=_RECIPE)


def _load(request: ChatRequest, folder: Path) -> tuple[TrainedModel, Path]:
    """Return the model, and the directory of its tokenizer; that of a published one is `folder`."""
    path = Path(request.checkpoint)
    if request.dtype is None:
        return CheckpointArtifact(path), path / TOKENIZER_FOLDER
    save_pretrained_tokenizer(str(path), folder)
    section = {"name_or_path": str(path), "dtype": request.dtype}
    texts = TokenLengths(TextTokenizer.load(folder), 1, 2)
    return PretrainedModel.load(section, _RECIPE, texts), folder


class GrowingAnswer:
    """An answer while its tokens are generated.

    Args:
        ends: tokens that end it.
        before: tokens of the text that it continues: some tokenizers leave out a text's first
            space.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        ends: Collection[int],
        question: Question,
        enough: Event,
        write: Callable[[str], None],
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._ends, self._question = tokenizer, ends, question
        self._enough, self._write = enough, write
        self._ids = list(_last_whole(tokenizer, before))
        self._text_before, self._before, self._settled = "", 0, len(self._ids)
        self._written = ""
        self.num_tokens = 0
        self.is_whole = False

    def add(self, token: int) -> bool:
        """Add a token; return whether the answer is complete."""
        if self.is_whole or self._enough.is_set():
            return True
        self.num_tokens += 1
        if token in self._ends:
            self.is_whole = True
            return True
        if token < self._tokenizer.vocab_size:
            self._ids.append(token)
        if self._question.stop or self._question.in_pieces:
            text = self._text()
            kept = cut_before(text, self._question.stop)
            self.is_whole = kept != text
            if not self.is_whole:
                self._write_to(self._outer(settled(text, self._question.stop)))
        return self.is_whole

    def finish(self) -> str:
        """Write the rest, and return all of the text; in pieces that is what was written.

        Of a text that is cut within a character, a tokenizer may decode the one before differently.
        """
        text = self._outer(cut_before(self._text(), self._question.stop))
        self._write_to(text)
        return self._written if self._question.in_pieces else text

    def _text(self) -> str:
        """Return all of the text; of settled tokens only the last are decoded again.

        Those before `_settled` are whole characters. From `_before` on they are decoded with what
        follows, as a tokenizer may leave out the space before the first.
        """
        window = self._ids[self._before : self._settled], self._ids[self._before :]
        known, text = self._tokenizer.decode_whole(window)
        more = self._text_before + text[len(known) :]
        if len(text) > len(known) and not text.endswith("\ufffd"):
            self._text_before = more
            self._before, self._settled = self._settled, len(self._ids)
        return more

    def _outer(self, text: str) -> str:
        return text if self._question.messages is None else text.strip()

    def _write_to(self, text: str) -> None:
        piece = text.removeprefix(self._written)
        if self._question.in_pieces and piece and text.startswith(self._written):
            self._write(piece)
            self._written = text


def _last_whole(tokenizer: TextTokenizer, ids: Sequence[int]) -> Sequence[int]:
    """Return a text's last tokens, from the beginning of a character on.

    ByteFallback, in LLaMA 2's decoder, decodes adjacent byte tokens as U+FFFD each if they are not
    whole characters, also those of the answer that follows.
    """
    start = max(len(ids) - _NUM_BEFORE, 0)
    while start and tokenizer.decode_whole([ids[start:]])[0].startswith("\ufffd"):
        start -= 1
    return ids[start:]


def main(lines: Iterable[str], answers: TextIO) -> None:
    """Answer until the input ends."""
    conversant: Conversant | None = None
    enough = Event()

    def write(answer: Ready | Piece | Answer | _Refusal) -> None:
        answers.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
        answers.flush()

    def answered(line: str, turn: int) -> Ready | Answer:
        nonlocal conversant
        if conversant is None:
            conversant = Conversant(ChatRequest(**json.loads(line)))
            return conversant.ready
        question = Question(**json.loads(line))
        return conversant.answer(question, turn, enough, lambda piece: write(Piece(piece)))

    for answer in _answers(_questions(lines, enough), answered):
        write(answer)


def _questions(lines: Iterable[str], enough: Event) -> Iterator[str]:
    """Yield the lines, read ahead, but for those that end an answer."""
    waiting: Queue[str | None] = Queue()

    def read() -> None:
        for line in lines:
            if line.strip() == _ENOUGH:
                enough.set()
            else:
                waiting.put(line)
        enough.set()
        waiting.put(None)

    Thread(target=read, daemon=True).start()
    for line in iter(waiting.get, None):
        enough.clear()
        yield line


@dataclass(frozen=True)
class _Refusal:
    error: str


def _answers(
    lines: Iterable[str], answered: Callable[[str, int], Ready | Answer]
) -> Iterator[Ready | Answer | _Refusal]:
    for turn, line in enumerate(lines):
        try:
            yield answered(line, turn)
        except (BadConversation, EngineError, RedcoFlowError, OSError, ValueError) as error:
            yield _Refusal(str(error))
        except Exception as error:  # noqa: BLE001 (the next question may have an answer)
            traceback.print_exc()
            yield _Refusal(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(sys.stdin, own_output)
