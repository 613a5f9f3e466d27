"""Rows of the usual chat formats, read as one: messages with roles, in an order that can be learnt.

Known are the columns of TRL (`messages`; `prompt` and `completion`), ShareGPT and Alpaca. Rows
that are not conversations are reported with a reason and a detail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redco_flow.errors import UnusableRow
from redco_flow.spec.names import nearest

Message = dict[str, Any]

DEFAULT_KEYS = {"messages": "messages", "sharegpt": "conversations"}
"""The column of the messages, by format, where the pipeline names none."""

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
"""Who may say something in a conversation."""

_ROLE_OF_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
_CALLS = ("function_call", "tool_call")


class BadConversation(UnusableRow):
    """A row that is no conversation to learn from."""


@dataclass(frozen=True)
class Conversation:
    """Messages and tools that a chat template renders.

    Args:
        messages: each with `role` and `content`, and whatever else its template knows
            (`tool_calls`, `reasoning_content`); no value is None.
        tools: JSON schemas of functions that may be called; None: the row has none.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def to_json(self) -> str:
        """Return it as text that `from_json` reads."""
        values = {"messages": self.messages, "tools": self.tools}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    @property
    def answers(self) -> list[int]:
        """The places of the assistant's messages."""
        return [i for i, one in enumerate(self.messages) if one["role"] == "assistant"]


class ChatColumns(NamedTuple):
    """Columns of a row that hold a conversation.

    Args:
        format: messages, sharegpt, alpaca or prompt_completion.
        messages_key: the column of messages; None: the format's own.
        default_system_message: begins conversations that have no system message.
    """

    format: str = "messages"
    messages_key: str | None = None
    default_system_message: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that every row has."""
        if self.format in DEFAULT_KEYS:
            return (self.messages_key or DEFAULT_KEYS[self.format],)
        return ("prompt", "completion") if self.format == "prompt_completion" else _ALPACA_KEYS

    def read(self, fields: Mapping[str, Any]) -> Conversation:
        """Read a row that ends with an answer.

        Raises:
            BadConversation: it cannot be learnt from.
        """
        for key in self.needed:
            if key not in fields:
                names = [*map(str, fields)]
                hint = nearest(key, names).removesuffix(".")
                listed = ", ".join(names) or "(none)"
                raise BadConversation(f"no field '{key}'", f"its fields are {listed}{hint}")
        messages = [_with_values(one) for one in self._messages(fields)]
        if self.default_system_message and messages and messages[0]["role"] not in SYSTEM_ROLES:
            messages.insert(0, {"role": "system", "content": self.default_system_message})
        check_messages(messages)
        return Conversation(messages, read_tools(fields.get("tools")))

    def _messages(self, fields: Mapping[str, Any]) -> list[Message]:
        if self.format in DEFAULT_KEYS:
            (key,) = self.needed
            return _READERS[self.format](fields, key)
        return _from_alpaca(fields) if self.format == "alpaca" else _from_prompt(fields)


def read_messages(value: Any, key: str) -> list[Message]:
    """Return a column's messages; a text may hold them as JSON.

    Raises:
        BadConversation: it is no list of messages with a known role.
    """
    value = _parsed(value, key)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadConversation(f"field '{key}' is no conversation", f"it is {_shown(value)}")
    return [_message(one, turn) for turn, one in enumerate(value, 1)]


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return a row's tools; a text may hold them as JSON, or one of them, or its `parameters`.

    Raises:
        BadConversation: they are no list of JSON objects.
    """
    value = _parsed(value, "tools") if value else None
    if not value:
        return None
    if isinstance(value, list):
        value = [_with_parameters(_parsed(one, "tools")) for one in value]
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise BadConversation("field 'tools' is no list of schemas", f"it is {_shown(value)}")
    return value


def _with_parameters(tool: Any) -> Any:
    """Return a tool's schema with its parameters as a mapping, which templates write as JSON."""
    inner = tool.get("function") if isinstance(tool, dict) else None
    if isinstance(inner, dict):
        return {**tool, "function": _with_parameters(inner)}
    if not isinstance(tool, dict) or not isinstance(tool.get("parameters"), str):
        return tool
    return {**tool, "parameters": _parsed(tool["parameters"], "parameters")}


def check_messages(messages: Sequence[Message], *, ends_with_answer: bool = True) -> None:
    """Check the order of roles, and that each message says something.

    Args:
        ends_with_answer: False of a prompt alone.

    Raises:
        BadConversation: with the turn, counted from 1.
    """
    if not messages:
        raise BadConversation("a conversation without messages")
    before = "start"
    for turn, message in enumerate(messages, 1):
        _check_role(message["role"], turn)
        role = _place_of(message)
        if before not in _MAY_FOLLOW[role]:
            detail = f"turn {turn} is the {message['role']}'s, after {_AFTER[before]}"
            raise BadConversation("roles out of order", detail)
        _check_content(message, turn)
        before = role
    last = messages[-1]["role"]
    if ends_with_answer and last != "assistant":
        raise BadConversation(
            f"a conversation that ends with a {last}'s turn",
            f"turn {len(messages)} is the last, and no answer to it is there to be learnt",
        )


_MAY_FOLLOW = {
    "system": ("start",),
    "user": ("start", "system", "assistant"),
    "assistant": ("user", "tool"),
    "call": ("user", "tool"),
    "tool": ("call", "tool"),
}
_AFTER = {
    "start": "the start",
    "system": "the system's",
    "user": "the user's",
    "assistant": "the assistant's",
    "call": "the assistant's call of a tool",
    "tool": "the tool's",
}


def _check_role(role: str, turn: int) -> None:
    if role not in ROLES:
        detail = f"turn {turn} is of '{role}'; known: {', '.join(ROLES)}"
        raise BadConversation("an unknown role", detail)


def _place_of(message: Message) -> str:
    role = message["role"]
    if role in SYSTEM_ROLES:
        return "system"
    return "call" if role == "assistant" and message.get("tool_calls") else str(role)


def check_characters(text: str, whose: str) -> None:
    """Refuse a text with characters that no tokenizer takes.

    Raises:
        BadConversation: with `whose`.
    """
    if "\0" in text:
        raise BadConversation("NUL byte", f"in {whose}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadConversation("half a surrogate pair", f"in {whose}") from error


def _check_content(message: Message, turn: int) -> None:
    content = message.get("content", "")
    whose = f"turn {turn}"
    if not isinstance(content, str):
        raise BadConversation("a message whose content is no text", f"{whose}: {_shown(content)}")
    check_characters(content, whose)
    is_said_otherwise = message.get("tool_calls") or message["role"] == "tool"
    if not content.strip() and not is_said_otherwise:
        empty = "an empty answer" if message["role"] == "assistant" else "an empty message"
        raise BadConversation(empty, f"{whose} is the {message['role']}'s")


def _message(value: Any, turn: int) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise BadConversation("a message without a role", f"turn {turn} is {_shown(value)}")
    _check_role(value["role"], turn)
    content = value.get("content")
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(one, Mapping) and one.get("type") == "text" for one in parts):
        content = "".join(str(one.get("text", "")) for one in parts)
    if content in (None, []) and (value.get("tool_calls") or value["role"] == "tool"):
        content = ""  # OpenAI's null beside calls: most templates join it to other text
    return _with_values({**value, "content": content})


def _from_messages(fields: Mapping[str, Any], key: str) -> list[Message]:
    return read_messages(fields[key], key)


def _from_sharegpt(fields: Mapping[str, Any], key: str) -> list[Message]:
    turns = _parsed(fields[key], key)
    if not isinstance(turns, list):
        raise BadConversation(f"field '{key}' is no conversation", f"it is {_shown(turns)}")
    messages = list(_from_turns(turns))
    return [*_system(fields.get("system")), *messages]


def _from_turns(turns: Sequence[Any]) -> Iterator[Message]:
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str):
            raise BadConversation("a turn without 'from'", f"turn {number} is {_shown(turn)}")
        if turn["from"] not in _ROLE_OF_SHAREGPT:
            known = ", ".join(_ROLE_OF_SHAREGPT)
            raise BadConversation(
                "an unknown role", f"turn {number} is from '{turn['from']}'; known: {known}"
            )
        role, value = _ROLE_OF_SHAREGPT[turn["from"]], turn.get("value")
        if turn["from"] in _CALLS:
            called = _parsed(value, f"turn {number}")
            calls = called if isinstance(called, list) else [called]
            tool_calls = [{"type": "function", "function": one} for one in calls]
            yield {"role": role, "content": "", "tool_calls": tool_calls}
        else:
            yield {"role": role, "content": value}


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], list[Message]]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
}
_ALPACA_KEYS = ("instruction", "output")


def _from_alpaca(fields: Mapping[str, Any]) -> list[Message]:
    messages = _system(fields.get("system"))
    history = _parsed(fields.get("history") or [], "history") or []
    for pair in history if isinstance(history, Sequence) else [history]:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadConversation(
                "field 'history' is no list of pairs", f"one of them is {_shown(pair)}"
            )
        messages += _exchange(*pair)
    asked = fields["instruction"]
    if fields.get("input"):
        asked = f"{asked}\n{fields['input']}"
    return messages + _exchange(asked, fields["output"])


def _from_prompt(fields: Mapping[str, Any]) -> list[Message]:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        messages = _exchange(prompt, completion)
    else:
        messages = read_messages(prompt, "prompt") + read_messages(completion, "completion")
        system = fields.get("system")
        if messages[0]["role"] in SYSTEM_ROLES or not isinstance(system, str):
            return messages
    return [*_system(fields.get("system")), *messages]


def _system(content: Any) -> list[Message]:
    return [{"role": "system", "content": content}] if content else []


def _exchange(asked: Any, answer: Any) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _parsed(value: Any, key: str) -> Any:
    """Return what a text says in JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadConversation(f"'{key}' is no JSON", f"{error}: {_shown(value)}") from error


def _with_values(message: Message) -> Message:
    """Leave out a message's keys without a value: Parquet has every key, and so do some APIs."""
    return {key: value for key, value in message.items() if value is not None}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
