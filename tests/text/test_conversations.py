"""Rows of the usual formats are read as one; what is no conversation is told with its turn."""

import pytest

from redco_flow.text.conversations import (
    BadConversation,
    ChatColumns,
    Conversation,
    check_messages,
)

ASKED = {"role": "user", "content": "Why?"}
ANSWERED = {"role": "assistant", "content": "So."}
CALL = {"name": "add", "arguments": {"a": 1}}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": CALL}],
}
TOLD = {"role": "tool", "content": "3"}


@pytest.mark.parametrize(
    ("columns", "row", "messages"),
    [
        (ChatColumns(), {"messages": [ASKED, {**ANSWERED, "name": None}]}, [ASKED, ANSWERED]),
        (ChatColumns(messages_key="chat"), {"chat": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
        (
            ChatColumns(),
            {"messages": '[{"role":"user","content":"Why?"},{"role":"assistant","content":"So."}]'},
            [ASKED, ANSWERED],
        ),
        (
            ChatColumns(),
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
                    ANSWERED,
                ]
            },
            [ASKED, ANSWERED],
        ),
        (
            ChatColumns("sharegpt"),
            {
                "conversations": [
                    {"from": "human", "value": "Why?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "3"},
                    {"from": "gpt", "value": "So."},
                ]
            },
            [ASKED, CALLING, TOLD, ANSWERED],
        ),
        (
            ChatColumns("alpaca"),
            {
                "instruction": "Add.",
                "input": "1 2",
                "output": "3",
                "system": "Be brief.",
                "history": [["Why?", "So."]],
            },
            [
                {"role": "system", "content": "Be brief."},
                ASKED,
                ANSWERED,
                {"role": "user", "content": "Add.\n1 2"},
                {"role": "assistant", "content": "3"},
            ],
        ),
        (
            ChatColumns("prompt_completion", default_system_message="Be brief."),
            {"prompt": "Why?", "completion": "So."},
            [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED],
        ),
        (
            ChatColumns("prompt_completion"),
            {"prompt": [ASKED], "completion": [ANSWERED], "system": "Be brief."},
            [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED],
        ),
        (
            ChatColumns("prompt_completion"),
            {
                "prompt": [{"role": "developer", "content": "Be kind."}, ASKED],
                "completion": [ANSWERED],
                "system": "Be brief.",
            },
            [{"role": "developer", "content": "Be kind."}, ASKED, ANSWERED],
        ),
        (
            ChatColumns("prompt_completion"),
            {"prompt": [ASKED], "completion": [ANSWERED], "system": True},
            [ASKED, ANSWERED],
        ),
        (
            ChatColumns("alpaca"),
            {"instruction": "4?", "output": "Yes", "history": '[["3?", "No"]]'},
            [
                {"role": "user", "content": "3?"},
                {"role": "assistant", "content": "No"},
                {"role": "user", "content": "4?"},
                {"role": "assistant", "content": "Yes"},
            ],
        ),
    ],
)
def test_rows_of_every_format_are_read_as_messages(columns, row, messages):
    assert columns.read(row).messages == messages


def test_a_default_system_message_leaves_a_conversations_own_alone():
    own = {"role": "system", "content": "Be long."}
    columns = ChatColumns(default_system_message="Be brief.")

    assert columns.read({"messages": [own, ASKED, ANSWERED]}).messages[0] == own


def test_tools_travel_with_their_conversation_unchanged():
    tools = [{"type": "function", "function": {"name": "é", "parameters": {"x": None}}}]
    chat = ChatColumns().read({"messages": [ASKED, CALLING, TOLD, ANSWERED], "tools": tools})

    assert Conversation.from_json(chat.to_json()) == chat
    assert chat.tools == tools
    assert chat.answers == [1, 3]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([ASKED], "a conversation that ends with a user's turn: turn 1 is the last"),
        ([ASKED, CALLING, TOLD], "a conversation that ends with a tool's turn"),
        ([ASKED, ASKED, ANSWERED], "roles out of order: turn 2 is the user's, after the user's"),
        ([ANSWERED], "roles out of order: turn 1 is the assistant's, after the start"),
        ([ASKED, ANSWERED, ANSWERED], "roles out of order: turn 3 is the assistant's"),
        ([ASKED, ANSWERED, TOLD], "roles out of order: turn 3 is the tool's"),
        ([ASKED, CALLING, ASKED, ANSWERED], "after the assistant's call of a tool"),
        (
            [ASKED, {"role": "system", "content": "x"}, ANSWERED],
            "roles out of order: turn 2 is the system's",
        ),
        ([ASKED, {"role": "assistant", "content": " \n"}], "an empty answer: turn 2"),
        ([ASKED, {"role": "assistant", "content": None}], "an empty answer: turn 2"),
        ([{"role": "user", "content": ""}, ANSWERED], "an empty message: turn 1 is the user's"),
        ([{"role": "machine", "content": "x"}], "an unknown role: turn 1 is of 'machine'; known"),
        ([{"content": "x"}], "a message without a role: turn 1"),
        ([{"role": "user", "content": 3}, ANSWERED], "whose content is no text: turn 1: 3"),
        ([{"role": "user", "content": "a\0"}, ANSWERED], "NUL byte: in turn 1"),
        ([{"role": "user", "content": "\ud800"}, ANSWERED], "half a surrogate pair: in turn 1"),
        ("Why?", "'messages' is no JSON"),
        ([], "field 'messages' is no conversation"),
    ],
)
def test_what_cannot_be_learnt_from_is_told_with_its_turn(messages, told):
    with pytest.raises(BadConversation) as raised:
        ChatColumns().read({"messages": messages})

    assert told in str(raised.value)


def test_a_missing_column_is_told_with_those_that_there_are():
    with pytest.raises(BadConversation, match="no field 'conversations': its fields are messages"):
        ChatColumns("sharegpt").read({"messages": []})
    with pytest.raises(BadConversation, match="Output; did you mean 'Output'"):
        ChatColumns("alpaca").read({"instruction": "a", "Output": "b"})


def test_a_prompt_of_an_unknown_role_is_refused_with_its_turn():
    with pytest.raises(BadConversation, match="turn 2 is of 'function'; known: system, developer"):
        check_messages([ASKED, {"role": "function", "content": "4"}], ends_with_answer=False)
