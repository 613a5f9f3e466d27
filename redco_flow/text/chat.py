"""Chat templates: a conversation as token ids, and which of them the assistant writes.

Rendered by transformers itself, in a child process with limits (`text.rendering`). What is learnt
are a template's `{% generation %}` blocks; where it has none, an answer is what one more message
adds to the text, and a template for which that is not so is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from redco_flow.bounded import BoundedError
from redco_flow.local_paths import expanded
from redco_flow.text.conversations import BadConversation, Conversation
from redco_flow.text.rendering import Chat, Rendering, Wanted, render_chats
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.text.tokenizer_files import load_pretrained

TrainOn = Literal["assistant", "last", "all"]
OnTooLong = Literal["truncate", "drop", "error"]
Span = tuple[int, int]

logger = logging.getLogger(__name__)

CHATML = (
    "{% for message in messages %}"
    "{% if message['tool_calls'] %}{{ raise_exception('chatml has no tool calls') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NAMED_TEMPLATES: Mapping[str, str] = {"chatml": CHATML}
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
TOKENIZER_DEFAULT = "tokenizer_default"
NO_TEMPLATE = (
    "the tokenizer has no chat template: give data.chat_template a name "
    f"({', '.join(NAMED_TEMPLATES)}) or a FILE.jinja."
)

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = Conversation(
    [
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": "It is four."},
    ]
)


def template_text(name: str) -> str | None:
    """Return the template of a name or a `.jinja` file; None for the tokenizer's own.

    Raises:
        ValueError: there is none of this name.
        OSError: the file cannot be read.
    """
    if name == TOKENIZER_DEFAULT:
        return None
    if name.endswith(".jinja"):
        return expanded(name).read_text("utf-8")
    if name not in NAMED_TEMPLATES:
        known = ", ".join((TOKENIZER_DEFAULT, *NAMED_TEMPLATES))
        raise ValueError(f"there is no chat template '{name}': give {known}, or a FILE.jinja.")
    return NAMED_TEMPLATES[name]


class TooLong(BadConversation):
    """A conversation of which no answer begins within the maximal length."""

    def __init__(self, num_tokens: int, max_length: int) -> None:
        super().__init__(
            "longer than max_length", f"it has {num_tokens} tokens; max_length is {max_length}"
        )


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Args:
        answers: the characters that the assistant writes, ascending.
        last: where the last answer begins; behind what asks the model for it.
        prompt: what a model is given to write the last answer.
    """

    text: str
    answers: tuple[Span, ...]
    last: int
    prompt: str


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as token ids.

    Args:
        ids: of all of it.
        learnt: [begin, end) of the tokens that the loss is of, ascending and apart.
        start: where the last answer begins.
        prompt_ids: what a model is given to write the last answer; mostly `ids[:start]`.
        is_cut: whether its end was cut off.
        misses_end: whether an answer has no end token, so that a model never learns to stop.
    """

    ids: list[int]
    learnt: list[Span]
    start: int
    prompt_ids: list[int]
    is_cut: bool = False
    misses_end: bool = False

    @property
    def num_learnt(self) -> int:
        """Number of tokens in the loss."""
        return sum(end - begin for begin, end in self.learnt)

    @property
    def mask(self) -> list[int]:
        """1 for each token that is learnt, as `apply_chat_template` has it."""
        mask = [0] * len(self.ids)
        for begin, end in self.learnt:
            mask[begin:end] = [1] * (end - begin)
        return mask


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: that of transformers, with a `chat_template`.
        text: the same one, as this project reads it.
        kwargs: what the template gets besides the messages: `enable_thinking`, `date_string`.

    Raises:
        ValueError: there is no template, or it lets nothing be learnt, or everything.
    """

    _has_warned = False

    def __init__(
        self, tokenizer: Any, text: TextTokenizer, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._hugging_face = tokenizer
        self.tokenizer = text
        self._kwargs = dict(kwargs or {})
        self._check()

    @classmethod
    def load(cls, directory: Path, kwargs: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Read a tokenizer's directory.

        Raises:
            ValueError: as of the class.
        """
        return cls(load_pretrained(directory), TextTokenizer.load(directory), kwargs)

    @classmethod
    def without_tokenizer(
        cls, text: str, special_tokens: Mapping[str, str], kwargs: Mapping[str, Any] | None = None
    ) -> ChatTemplate:
        """Return a template that renders and cannot encode, for a plan.

        Args:
            special_tokens: the tokenizer's, by name: `bos_token`.
        """
        template = cls.__new__(cls)
        template._hugging_face = _TemplateText(text, special_tokens)
        template._kwargs = dict(kwargs or {})
        return template

    @cached_property
    def asks_the_clock(self) -> bool:
        """Whether what it renders depends on the day, so that a dataset is another tomorrow."""
        return "strftime_now" in str(self._hugging_face.chat_template) and not self._kwargs

    @cached_property
    def start_id(self) -> int | None:
        """The id of the token that begins texts, where there is one."""
        token_id = self._hugging_face.bos_token_id
        return None if token_id is None else int(token_id)

    def render(
        self, chat: Conversation, num_messages: int | None = None, *, asks: bool = False
    ) -> str:
        """Return the text of the first messages; all where no number is given.

        Args:
            asks: with the generation prompt behind it.

        Raises:
            BadConversation: the template fails, or needs more time or memory than it may.
        """
        (texts,) = self._texts([chat], [[Wanted(num_messages, asks)]])
        if isinstance(texts, BadConversation):
            raise texts
        return texts[0][0]

    def rendered(self, chat: Conversation, *, only_last: bool = False) -> Rendered:
        """Render a whole conversation, and find what its assistant writes.

        Args:
            only_last: look for the last answer alone, which a template that renders earlier ones
                otherwise (Qwen 3: without their reasoning) has too.

        Raises:
            BadConversation: the template fails, or does not separate answers from the rest.
        """
        (found,) = self._rendered([chat], only_last=only_last)
        if isinstance(found, BadConversation):
            raise found
        return found

    def encode(
        self,
        chats: Sequence[Conversation],
        *,
        train_on: TrainOn = "assistant",
        max_length: int | None = None,
    ) -> list[EncodedChat | BadConversation]:
        """Render and tokenize conversations; what cannot be learnt from comes back as its reason.

        Args:
            train_on: the assistant's turns, the last of them, or all tokens.
            max_length: in tokens; what is behind is cut off, and the last answer is then the last
                one that begins before it.
        """
        found = self._rendered(chats, only_last=train_on != "assistant")
        texts = [one.text for one in found if isinstance(one, Rendered)]
        encodings = iter(self.tokenizer.backend.encode_batch(texts, add_special_tokens=False))
        return [
            one
            if isinstance(one, BadConversation)
            else self._encoded(chat, one, next(encodings), train_on, max_length)
            for chat, one in zip(chats, found, strict=True)
        ]

    def encode_prompt(self, chat: Conversation) -> list[int]:
        """Return the ids of messages and what asks for an answer to them.

        Raises:
            BadConversation: the template fails.
        """
        return self._ids(self.render(chat, asks=True))

    def _rendered(
        self, chats: Sequence[Conversation], *, only_last: bool
    ) -> list[Rendered | BadConversation]:
        wanted = [self._wanted(chat, only_last=only_last) for chat in chats]
        return [
            texts if isinstance(texts, BadConversation) else self._found(chat, of_chat, texts)
            for chat, of_chat, texts in zip(chats, wanted, self._texts(chats, wanted), strict=True)
        ]

    def _wanted(self, chat: Conversation, *, only_last: bool) -> list[Wanted]:
        """Return the renderings that tell where answers are: the whole one first."""
        last = chat.answers[-1]
        if self._is_marked(chat):
            return [Wanted(with_spans=True), Wanted(last, asks=True)]
        numbers = chat.answers[-1:] if only_last else chat.answers
        asked = [Wanted(number, asks=True) for number in numbers]
        whole = len(chat.messages)
        return [Wanted(), *asked, *(Wanted(n + 1) for n in numbers if n + 1 < whole)]

    def _found(
        self, chat: Conversation, wanted: Sequence[Wanted], renderings: Sequence[Rendering]
    ) -> Rendered | BadConversation:
        (text, spans), *_ = renderings
        texts = {one: text for one, (text, _) in zip(wanted, renderings, strict=True)}
        try:
            if not wanted[0].with_spans:
                numbers = [one.num_messages for one in wanted if one.asks]
                spans = [self._added(n, text, texts) for n in numbers if n is not None]
        except BadConversation as error:
            return error
        last = chat.answers[-1]
        return _ending(text, spans, texts[Wanted(last, asks=True)])

    def _encoded(
        self,
        chat: Conversation,
        rendered: Rendered,
        encoding: Any,
        train_on: TrainOn,
        max_length: int | None,
    ) -> EncodedChat | BadConversation:
        answers = merged(token_span(encoding, span) for span in rendered.answers)
        if train_on != "all" and (problem := _problem_of_mask(answers, len(encoding.ids))):
            return problem
        is_cut = max_length is not None and len(encoding.ids) > max_length
        if is_cut:
            cut = self._cut(chat, rendered, encoding, max_length or 0, only_last=train_on == "last")
            if cut is None:
                return TooLong(len(encoding.ids), max_length or 0)
            rendered = cut
        ids = list(encoding.ids[:max_length])
        prompt_ids = self._ids(rendered.prompt)
        start = len(prompt_ids)
        if ids[:start] != prompt_ids or start >= len(ids):
            start = max(1, token_span(encoding, (rendered.last, len(rendered.text)))[0])
        learnt = [(0, len(ids))] if train_on == "all" else answers
        if train_on == "last":
            learnt = [(begin, end) for begin, end in answers if end > start]
        learnt = [(begin, min(end, len(ids))) for begin, end in learnt if begin < len(ids)]
        if is_cut and not learnt:  # cut in what a template has before the learnt part of an answer
            return TooLong(len(encoding.ids), max_length or 0)
        ends = (self.tokenizer.eos_id in encoding.ids[begin:end] for begin, end in answers)
        return EncodedChat(
            ids,
            learnt,
            start,
            prompt_ids,
            is_cut,
            misses_end=not all(ends),
        )

    def _cut(
        self,
        chat: Conversation,
        rendered: Rendered,
        encoding: Any,
        max_length: int,
        *,
        only_last: bool,
    ) -> Rendered | None:
        """Return it with the last answer that begins before a number of tokens; None: none does."""
        for number in reversed(chat.answers[-1:] if only_last else chat.answers):
            prompt = self.render(chat, number, asks=True)
            found = _ending(rendered.text, rendered.answers, prompt)
            begin, _ = token_span(encoding, (found.last, len(found.text)))
            if max(begin, len(self._ids(found.prompt))) < max_length:
                return found
        return None

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.backend.encode(text, add_special_tokens=False).ids)

    def _added(self, number: int, text: str, texts: Mapping[Wanted, str]) -> Span:
        """Return what an answer adds to the text, where the template has no marks.

        Raises:
            BadConversation: the template changes what it said before.
        """
        asked = texts[Wanted(number, asks=True)]
        answered = texts.get(Wanted(number + 1), text)
        if not text.startswith(answered):  # Phi-3 ends a whole conversation with its end token
            answered = answered.removesuffix(str(self._hugging_face.eos_token or ""))
        if not answered.startswith(asked):
            raise _unmarked(number, "asks for an answer by another text than stands before it")
        if not text.startswith(answered):
            raise _unmarked(number, "renders an answer otherwise once more messages follow")
        return len(asked), len(answered)

    def _texts(
        self, chats: Sequence[Conversation], wanted: Sequence[Sequence[Wanted]]
    ) -> list[list[Rendering] | BadConversation]:
        """Return the wanted renderings of each conversation, or why there are none."""
        self._warn_of_tools(chats)
        found = render_chats(
            self._hugging_face,
            [Chat(one.messages, one.tools, some) for one, some in zip(chats, wanted, strict=True)],
            **self._kwargs,
        )
        return [
            BadConversation("the chat template fails", str(one))
            if isinstance(one, BoundedError)
            else one
            for one in found
        ]

    def _warn_of_tools(self, chats: Sequence[Conversation]) -> None:
        """Say once that the template does not render the tools of conversations."""
        if self._has_warned:
            return
        if any(one.tools and "tools" not in self._template(one) for one in chats):
            self._has_warned = True
            logger.warning(
                "the chat template has no tools: those in the field 'tools' of rows are left out "
                "of the texts"
            )

    def _template(self, chat: Conversation) -> str:
        return str(self._hugging_face.get_chat_template(None, chat.tools))

    def _is_marked(self, chat: Conversation) -> bool:
        return _MARKED.search(self._template(chat)) is not None

    def _check(self) -> None:
        """Try the template out on two messages."""
        if not self._hugging_face.chat_template:
            raise ValueError(NO_TEMPLATE)
        (found,) = self.encode([_PROBE])
        if isinstance(found, BadConversation):
            raise ValueError(
                "the chat template (data.chat_template, else the tokenizer's own) cannot be "
                f"trained with: {found}"
            )


@dataclass(frozen=True)
class _TemplateText:
    """The part of transformers' tokenizers that renders a template."""

    chat_template: str
    special_tokens_map: Mapping[str, str]

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    def get_chat_template(self, _template: None, _tools: Any) -> str:
        return self.chat_template


def token_span(encoding: Any, span: Span) -> Span:
    """Return the tokens [begin, end) that have a character of a span; none of an empty one.

    As transformers does: a token on an edge counts, for it stands for both sides of it, and of a
    last character of several tokens the first one alone.

    Args:
        encoding: a `tokenizers.Encoding`.
        span: of characters.
    """
    first, last = span
    inside = (encoding.char_to_token(place) for place in range(first, last))
    begin = next((token for token in inside if token is not None), None)
    if begin is None:
        return len(encoding.ids), len(encoding.ids)
    from_behind = (encoding.char_to_token(place) for place in reversed(range(first, last)))
    return begin, 1 + next(token for token in from_behind if token is not None)


def _ending(text: str, answers: Sequence[Span], prompt: str) -> Rendered:
    """Return a conversation with the answer to a prompt as its last one."""
    start = len(prompt) if text.startswith(prompt) else _first_after(answers, text, prompt)
    return Rendered(text, tuple(answers), start, prompt)


def _first_after(spans: Sequence[Span], text: str, prompt: str) -> int:
    """Find the first answer that ends behind the common prefix of two texts."""
    common = next(
        (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text)
    )
    return next((begin for begin, end in spans if end > common), len(text))


def _problem_of_mask(answers: Sequence[Span], num_ids: int) -> BadConversation | None:
    num_learnt = sum(end - begin for begin, end in answers)
    if not num_learnt:
        detail = "it has {% generation %} blocks, and none around an answer"
        return BadConversation("the chat template lets nothing be learnt", detail)
    if num_learnt == num_ids:
        detail = "its {% generation %} blocks hold the user's turns too"
        return BadConversation("the chat template lets everything be learnt", detail)
    return None


def _unmarked(number: int, what: str) -> BadConversation:
    return BadConversation(
        "the chat template does not separate answers from the rest",
        f"it has no {{% generation %}} blocks and {what} (message {number + 1}); give a template "
        "with such blocks as data.chat_template: FILE.jinja",
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch."""
    joined: list[Span] = []
    for begin, end in spans:
        if begin == end:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
