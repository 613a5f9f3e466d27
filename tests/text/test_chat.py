"""Chat templates: ids and masks are those of transformers, and what cannot be learnt is refused."""

import importlib.util
from pathlib import Path

import pytest

from redco_flow.text.chat import CHATML, ChatTemplate, TooLong
from redco_flow.text.conversations import BadConversation, Conversation
from tests.text.chat_tokenizers import load_template, make_tokenizer

TRL = importlib.util.find_spec("trl")
needs_trl = pytest.mark.skipif(
    TRL is None, reason="published templates: pip install --no-deps trl==1.16.0"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
UNMARKED_CHATML = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# What the first answer is marked as in the same template: by what surrounds it.
MARKED = {
    "mistral": (
        MISTRAL,
        MISTRAL.replace(
            "{{ message['content'] + eos_token}}",
            "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}",
        ),
    ),
    "zephyr": (
        ZEPHYR,
        ZEPHYR.replace(
            "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n",
            "{{ '<|assistant|>\n' }}{% generation %}{{ message['content'] + eos_token + '\n' }}"
            "{% endgeneration %}",
        ),
    ),
    "chatml": (UNMARKED_CHATML, CHATML),
}
ENDS = {
    "llama": "<|eot_id|>",
    "phi": "<|end|>",
    "gemma": "<end_of_turn>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "mistral": "</s>",
    "zephyr": "</s>",
}


def user(content):
    return {"role": "user", "content": content}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief!"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> & more.",
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": None}}}
CHATS = {
    "one turn": Conversation([user("What is one?"), says("It is 1 é 🙂, friend")]),
    "multi-turn": Conversation(
        [user("One?"), says("1"), user("Two? "), says(" and 2\n"), user("!"), says("The end.")]
    ),
    "system": Conversation([SYSTEM, user("One?"), says("1"), user("Two?"), says("2")]),
    "thinking": Conversation([user("Why?"), says("So.", reasoning_content="I thought of it")]),
    "tools": Conversation(
        [
            user("What is 1 and 2?"),
            says("", tool_calls=[CALL]),
            {"role": "tool", "content": "3", "name": "add"},
            says("It is 3."),
        ],
        [ADD],
    ),
}


def ending_of(name):
    return next((end for start, end in ENDS.items() if name.startswith(start)), "<|im_end|>")


def published(name):
    """A template of trl's, or one that stands here."""
    if name in MARKED:
        return MARKED[name][1]
    return (
        Path(TRL.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    ).read_text()


def reference(tokenizer, chat, **more):
    return tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask=True, **more
    )


@needs_trl
@pytest.mark.parametrize(
    ("name", "unfit"),
    [
        ("llama3_training", ""),
        ("qwen2_5_training", ""),
        ("qwen3_training", ""),
        ("qwen3_instruct_2507_training", ""),
        ("gemma_training", "system tools"),
        ("phi3_training", ""),
        ("phi3_5_training", ""),
        ("deepseekv3_training", ""),
        ("mistral", "system tools"),
        ("zephyr", ""),
        ("chatml", "tools"),
    ],
)
def test_ids_and_masks_of_published_templates_are_those_of_transformers(name, unfit, tmp_path):
    """Engine case 62: with tools, several turns, a system message and reasoning."""
    tokenizer = make_tokenizer(published(name), eos=ending_of(name))
    template = load_template(tokenizer, tmp_path)

    for kind, chat in CHATS.items():
        (found,) = template.encode([chat])
        if kind in unfit.split():
            assert isinstance(found, BadConversation)
            assert found.reason == "the chat template fails"
            continue
        expected = reference(tokenizer, chat)
        prompt = Conversation(chat.messages[:-1], chat.tools)
        asked = reference(tokenizer, prompt, add_generation_prompt=True)
        assert found.ids == expected["input_ids"], kind
        assert found.mask == expected["assistant_masks"], kind
        assert found.prompt_ids == asked["input_ids"] == template.encode_prompt(prompt), kind
        assert not found.misses_end


@needs_trl
@pytest.mark.parametrize("name", ["llama3", "gemma", "phi3", "phi3_5", "qwen3_instruct_2507"])
def test_without_marks_the_answers_of_published_templates_are_those_of_the_marked_ones(
    name, tmp_path
):
    """Engine case 62: by trl's own templates with blocks."""
    tokenizer = make_tokenizer(published(name), eos=ending_of(name))
    template = load_template(tokenizer, tmp_path)
    tokenizer.chat_template = published(f"{name}_training")

    for kind in ("one turn", "multi-turn"):
        (found,) = template.encode([CHATS[kind]])
        expected = reference(tokenizer, CHATS[kind])
        assert found.ids == expected["input_ids"]
        assert found.mask == expected["assistant_masks"], kind


@pytest.mark.parametrize("name", MARKED)
def test_without_marks_an_answer_is_what_it_adds_to_the_text(name, tmp_path):
    """Engine case 62: where published templates have no blocks, for those that trl has not."""
    unmarked, marked = MARKED[name]
    tokenizer = make_tokenizer(unmarked, eos=ending_of(name))
    template = load_template(tokenizer, tmp_path)
    tokenizer.chat_template = marked

    for kind in ("one turn", "multi-turn", *(("system",) if name != "mistral" else ())):
        (found,) = template.encode([CHATS[kind]])
        expected = reference(tokenizer, CHATS[kind])
        assert found.ids == expected["input_ids"]
        assert found.mask == expected["assistant_masks"], kind


def test_a_token_over_the_edge_of_an_answer_is_learnt(tmp_path):
    # With no special token between them, the user's last letters and the answer's first are one.
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer(UNMARKED_CHATML)
    tokenizer.chat_template = plain
    marked = plain.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    template = load_template(tokenizer, tmp_path)
    tokenizer.chat_template = marked
    chat = Conversation([user("What is the ans"), says("wer is three")])

    (found,) = template.encode([chat])

    assert found.ids != template.encode_prompt(Conversation(chat.messages[:1])) + found.ids[3:]
    assert found.mask == reference(tokenizer, chat)["assistant_masks"]
    assert found.ids[: found.start] != found.prompt_ids


def test_of_an_answers_last_character_as_many_tokens_are_learnt_as_by_transformers(tmp_path):
    inner = CHATML.replace(" + '<|im_end|>\\n' }}{% endg", " }}{% endg").replace(
        "{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\\n' }}"
    )
    tokenizer = make_tokenizer(inner)
    template = load_template(tokenizer, tmp_path)
    chat = Conversation([user("One?"), says("It is 🙂")])

    (found,) = template.encode([chat])

    assert inner != CHATML
    assert found.mask == reference(tokenizer, chat)["assistant_masks"]


def test_the_last_turn_alone_or_all_tokens_can_be_learnt(tmp_path):
    template = load_template(make_tokenizer(CHATML), tmp_path)
    chat = CHATS["multi-turn"]

    (last,) = template.encode([chat], train_on="last")
    (everything,) = template.encode([chat], train_on="all")

    decode = template.tokenizer.backend.decode
    learnt = [token for token, is_learnt in zip(last.ids, last.mask, strict=True) if is_learnt]
    assert decode(learnt, skip_special_tokens=False) == "The end.<|im_end|>\n"
    assert everything.learnt == [(0, len(everything.ids))]


@needs_trl
def test_a_template_that_renders_an_answer_otherwise_later_is_refused_but_for_the_last_turn(
    tmp_path,
):
    """Engine case 62: Qwen 3's, of several turns."""
    template = load_template(make_tokenizer(published("qwen3")), tmp_path)

    (every,) = template.encode([CHATS["multi-turn"]])
    (last,) = template.encode([CHATS["multi-turn"]], train_on="last")

    assert "renders an answer otherwise once more messages follow (message 2)" in str(every)
    decoded = template.tokenizer.backend.decode(last.ids[last.start :], skip_special_tokens=False)
    assert decoded == "<think>\n\n</think>\n\nThe end.<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHATML.replace("'assistant' %}{% gen", "'machine' %}{% gen"),
            "lets nothing be learnt",
        ),
        (
            "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
            "lets everything be learnt",
        ),
        ("{{ raise_exception('no way') }}", "the chat template fails: no way"),
        ("{% for m in messages %}", "the chat template fails"),
        (
            UNMARKED_CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>model\\n'"),
            "asks for an answer by another text than stands before it",
        ),
    ],
)
def test_a_template_that_cannot_be_trained_with_is_refused(template, message, tmp_path):
    """Engine case 62: what masks all or nothing."""
    with pytest.raises(ValueError, match="cannot be trained with") as raised:
        load_template(make_tokenizer(template), tmp_path)

    assert message in str(raised.value)


def test_a_tokenizer_without_a_template_says_what_to_give(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)

    with pytest.raises(ValueError, match="has no chat template: give"):
        ChatTemplate.load(tmp_path)


def test_an_answer_without_the_end_token_is_told(tmp_path):
    template = load_template(make_tokenizer(CHATML, eos="<|other|>"), tmp_path)

    (found,) = template.encode([CHATS["one turn"]])

    assert found.misses_end


def test_what_is_too_long_is_cut_behind_and_asks_for_the_last_answer_that_begins_before(tmp_path):
    template = load_template(make_tokenizer(CHATML), tmp_path)
    chat = CHATS["multi-turn"]
    (whole,) = template.encode([chat])
    second = whole.learnt[1]

    (cut,) = template.encode([chat], max_length=second[0] + 1)
    (too_long,) = template.encode([chat], max_length=whole.learnt[0][0])

    assert cut.ids == whole.ids[: second[0] + 1]
    assert cut.start == second[0]
    assert cut.learnt == [whole.learnt[0], (second[0], second[0] + 1)]
    assert isinstance(too_long, TooLong)


def test_a_chat_that_is_cut_before_the_learnt_part_of_its_answer_is_too_long(tmp_path):
    thinking = CHATML.replace("{% generation %}", "<think></think>{% generation %}")
    template = load_template(make_tokenizer(thinking), tmp_path)
    chat = CHATS["one turn"]
    (whole,) = template.encode([chat])
    [(begin, _)] = whole.learnt

    ((too_long,), (cut,)) = (template.encode([chat], max_length=begin + more) for more in (0, 1))

    assert whole.start < begin
    assert isinstance(too_long, TooLong)
    assert cut.num_learnt == 1


def test_a_template_that_leaves_out_the_tools_of_conversations_is_named_once(tmp_path, caplog):
    template = load_template(make_tokenizer(CHATML), tmp_path)
    chat = CHATS["one turn"]

    plain, *of_tools = template.encode([chat, *[Conversation(chat.messages, [ADD])] * 2])
    template.encode([Conversation(chat.messages, [ADD])])

    assert of_tools == [plain, plain]
    assert [one.getMessage()[:34] for one in caplog.records] == [
        "the chat template has no tools: th"
    ]
