"""Render chat templates in a child process, with limits of time, memory and length.

A template is a program written by the author of a tokenizer. The sandbox of jinja keeps it from
files and modules, but does not limit what it computes. Tool calls in OpenAI's format, whose
`arguments` are JSON in a text, become what a template of Hugging Face's wants: a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from redco_flow.bounded import BoundedError, BoundedProcess
from redco_flow.text.conversations import BadConversation, Conversation, Message

SECONDS_TO_RENDER = 2.0
"""CPU time for the renderings of one conversation; one rendering usually takes 0.3 ms."""
_MOST_TIMES_LONGER = 20
_CHARACTERS_ALWAYS_ALLOWED = 100_000

Rendering = tuple[str, list[tuple[int, int]]]
"""A text, and its spans of characters in `{% generation %}` blocks."""


class Wanted(NamedTuple):
    """One rendering of a conversation.

    Args:
        num_messages: only the first ones; None: all.
        asks: with the generation prompt behind them.
        with_spans: with the characters of each `{% generation %}` block.
        continues: without what the template writes behind the last message.
    """

    num_messages: int | None = None
    asks: bool = False
    with_spans: bool = False
    continues: bool = False


class Chat(NamedTuple):
    """Arguments of one rendering of a conversation.

    Args:
        messages: JSON objects with `role` and `content`.
        tools: JSON schemas of functions; None: no tools.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] | None
    wanted: Sequence[Wanted]


def render_chats(tokenizer: Any, chats: Sequence[Chat], **variables: Any) -> list[Any]:
    """Return the renderings of each conversation, or the BoundedError in their place.

    Args:
        tokenizer: that of transformers, with a `chat_template`.
        variables: what the template gets besides messages, tools and special tokens.
    """
    answers: list[Any] = [None] * len(chats)
    # A tokenizer may have one template for conversations with tools and one for those without.
    for has_tools in sorted({bool(chat.tools) for chat in chats}):
        chosen = [i for i, chat in enumerate(chats) if bool(chat.tools) is has_tools]
        found = _process().ask_many(
            [chats[i]._asdict() for i in chosen],
            template=str(tokenizer.get_chat_template(None, chats[chosen[0]].tools)),
            variables={**tokenizer.special_tokens_map, **variables},
        )
        for i, answer in zip(chosen, found, strict=True):
            answers[i] = answer if isinstance(answer, BoundedError) else _renderings(answer)
    return answers


def render_chat(tokenizer: Any, chat: Chat, **variables: Any) -> list[Rendering]:
    """Return the wanted renderings of one conversation.

    Raises:
        BoundedError: the template fails, or needs more than it may.
    """
    (answer,) = render_chats(tokenizer, [chat], **variables)
    if isinstance(answer, BoundedError):
        raise answer
    return list(answer)


@lru_cache(maxsize=1)
def _process() -> BoundedProcess:
    """The one child of this process: importing transformers takes a second."""
    return BoundedProcess(f"{__name__}:render_here", seconds=SECONDS_TO_RENDER)


def _renderings(answer: Any) -> list[Rendering]:
    return [(text, [(begin, end) for begin, end in spans]) for text, spans in answer]


def prepare_child() -> None:
    """Import what rendering needs: seconds that no template is charged for."""
    _render("{{ messages[0].role }}", {}, [{"role": "user"}], None, Wanted())


def render_here(
    template: str, variables: dict[str, Any], messages: Any, tools: Any, wanted: Any
) -> list[Rendering]:
    """Render in the calling process, which is the child.

    Raises:
        ValueError: a text is far longer than template and conversation.
        Exception: whatever the template raises.
    """
    most = _MOST_TIMES_LONGER * (len(template) + len(str(messages)) + len(str(tools)))
    most = max(most, _CHARACTERS_ALWAYS_ALLOWED)
    found = [_render(template, variables, messages, tools, Wanted(*one)) for one in wanted]
    longest = max((len(text) for text, _ in found), default=0)
    if longest > most:
        raise ValueError(
            f"it makes {longest:,} characters of a conversation and a template for which at most "
            f"{most:,} are allowed"
        )
    return found


def _render(
    template: str, variables: dict[str, Any], messages: Any, tools: Any, wanted: Wanted
) -> Rendering:
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template  # its annotation names a text alone
    texts, spans = render(
        conversations=[messages[: wanted.num_messages]],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=wanted.with_spans,
        continue_final_message=wanted.continues,
        add_generation_prompt=wanted.asks,
        **variables,
    )
    return texts[0], spans[0] if wanted.with_spans else []


class Renders(Protocol):
    """A chat template."""

    def render(self, chat: Conversation) -> str:
        """Return the text of a conversation.

        Raises:
            BadConversation: the template fails.
        """
        ...


def for_template(chat: Conversation, template: Renders) -> Conversation:
    """Return a conversation whose arguments in JSON are mappings, where the template takes those.

    It is the same object where nothing is changed: there are no such texts, or the template fails
    on a mapping, or writes it as Python does.
    """
    parsed = [_with_mappings(message) for message in chat.messages]
    if all(one is other for one, other in zip(parsed, chat.messages, strict=True)):
        return chat
    changed = Conversation(parsed, chat.tools)
    try:
        text = template.render(changed)
    except BadConversation:
        return chat
    is_of_python = any(repr(found) in text for found in _arguments(parsed) if found)
    return chat if is_of_python else changed


def _with_mappings(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    parsed = [_parsed_call(call) for call in calls]
    if all(one is other for one, other in zip(parsed, calls, strict=True)):
        return message
    return {**message, "tool_calls": parsed}


def _parsed_call(call: Any) -> Any:
    """A call, `{"function": {"name", "arguments"}}` or without the outer mapping."""
    if not isinstance(call, Mapping):
        return call
    inner = call.get("function")
    if isinstance(inner, Mapping):
        parsed = _parsed_call(inner)
        return call if parsed is inner else {**call, "function": parsed}
    arguments = call.get("arguments")
    found = _json_object(arguments) if isinstance(arguments, str) else None
    return call if found is None else {**call, "arguments": found}


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _arguments(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            inner = call.get("function", call) if isinstance(call, Mapping) else {}
            yield inner.get("arguments") if isinstance(inner, Mapping) else None
