"""Tool calls in OpenAI's format, whose `arguments` are JSON in a text, as chat templates want them.

Most templates of Hugging Face's write the arguments by `tojson` and want a mapping: a text would be
quoted once more, and that is what a model would learn. The others join texts, and keep the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from redco_flow.text.conversations import BadConversation, Conversation, Message


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
