"""Tool calls whose arguments are JSON in a text are rendered as transformers renders mappings."""

import json

import pytest

from redco_flow.recipes.chat.config import encode
from redco_flow.text.conversations import BadConversation, ChatColumns, read_tools
from redco_flow.text.rendering import for_template
from tests.text.chat_tokenizers import load_template, make_tokenizer
from tests.text.test_chat import ADD, ending_of, needs_trl, published

ARGUMENTS = {"city": "Paris", "days": [1, 2], "note": 'é "x"'}
AS_TEXT = json.dumps(ARGUMENTS)
# Of a published form: the text is written as it is, and a mapping as Python writes it.
AS_IT_IS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
    "{% endfor %}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def row(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    return {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
                **more,
            },
            {"role": "tool", "content": "20", "name": "weather"},
            {"role": "assistant", "content": "It is 20."},
        ],
        "tools": [ADD],
    }


def encoded(template, arguments):
    chat = ChatColumns().read(row(arguments))
    pairs = encode(
        [chat.to_json()], template, train_on="assistant", max_length=4096, on_too_long="error"
    )
    assert not pairs.unusable
    return next(iter(pairs.target_ids)), pairs.counts["parsed_arguments"]


def expected(tokenizer, arguments):
    chat = ChatColumns().read(row(arguments))
    return tokenizer.apply_chat_template(chat.messages, tools=chat.tools, return_dict=False)


@needs_trl
@pytest.mark.parametrize(
    "name", ["qwen2_5_training", "qwen3_training", "llama3_training", "deepseekv3_training"]
)
def test_a_template_that_takes_mappings_gets_one(name, tmp_path):
    """Oracle: transformers' apply_chat_template with the mapping."""
    tokenizer = make_tokenizer(published(name), eos=ending_of(name))
    template = load_template(tokenizer, tmp_path)
    right = expected(tokenizer, ARGUMENTS)

    assert encoded(template, AS_TEXT) == (right, 1)
    assert encoded(template, ARGUMENTS) == (right, 0)


@needs_trl
def test_the_text_would_be_quoted_once_more(tmp_path):
    """Why it is parsed: what transformers gives for the same row."""
    tokenizer = make_tokenizer(published("qwen2_5_training"))

    assert '"{\\"city\\"' in tokenizer.decode(expected(tokenizer, AS_TEXT))


def test_a_template_that_writes_a_mapping_as_python_does_keeps_the_text(tmp_path):
    tokenizer = make_tokenizer(AS_IT_IS)
    template = load_template(tokenizer, tmp_path)

    assert encoded(template, AS_TEXT) == (expected(tokenizer, AS_TEXT), 0)


def test_a_template_that_joins_texts_keeps_the_text(tmp_path):
    joining = AS_IT_IS.replace("{{ c.function.arguments }}", "{{ '' + c.function.arguments }}")
    tokenizer = make_tokenizer(joining)
    template = load_template(tokenizer, tmp_path)

    assert encoded(template, AS_TEXT) == (expected(tokenizer, AS_TEXT), 0)


@pytest.mark.parametrize("arguments", ["[1]", "Paris", "", "{", '"{}"', 3, None, "[" * 100_000])
def test_what_is_no_json_object_is_left_alone(tmp_path, arguments):
    tojson = AS_IT_IS.replace("c.function.arguments", "c.function.arguments | tojson")
    template = load_template(make_tokenizer(tojson), tmp_path)
    chat = ChatColumns().read(row(arguments))

    assert for_template(chat, template) is chat


def test_calls_of_sharegpt_have_their_arguments_parsed_too(tmp_path):
    tojson = AS_IT_IS.replace("c.function.arguments", "c.function.arguments | tojson")
    template = load_template(make_tokenizer(tojson), tmp_path)
    call = json.dumps({"name": "weather", "arguments": AS_TEXT})
    turns = [("human", "Weather?"), ("function_call", call), ("observation", "20"), ("gpt", "20.")]
    columns = ChatColumns("sharegpt")
    chat = columns.read({"conversations": [{"from": who, "value": what} for who, what in turns]})

    found = for_template(chat, template)

    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


PARAMETERS = json.dumps(ADD["function"]["parameters"])
WITH_TEXT = {**ADD, "function": {**ADD["function"], "parameters": PARAMETERS}}


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_call_without_content_is_read_like_one_with_empty_content(content):
    asked, call, *rest = row(ARGUMENTS)["messages"]

    found = ChatColumns().read({"messages": [asked, call | {"content": content}, *rest]})

    assert found.messages[1]["content"] == ""


@pytest.mark.parametrize(
    "tools", [json.dumps([ADD]), [json.dumps(ADD)], [WITH_TEXT], json.dumps([WITH_TEXT])]
)
def test_tools_and_their_parameters_may_be_json_in_a_text(tools):
    assert read_tools(tools) == [ADD]


@pytest.mark.parametrize("tools", ["{", [3], ["{"], [{"name": "a", "parameters": "{"}]])
def test_tools_that_are_no_schemas_are_a_bad_row(tools):
    with pytest.raises(BadConversation):
        read_tools(tools)
