"""Chat templates that never end, or that need too much memory or length, are refused."""

import pytest
from transformers import AutoTokenizer

from redco_flow.bounded import BoundedError
from redco_flow.text.chat import CHATML, ChatTemplate
from redco_flow.text.conversations import BadConversation, Conversation
from redco_flow.text.rendering import Chat, Wanted, render_chat
from tests.text.chat_tokenizers import load_template, make_tokenizer

CHAT = Conversation(
    [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Three."}]
)


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        ("{{ 'a'|center(5000000000) }}", "more than 512 MiB"),
        ("{{ '%5000000000d' % 1 }}", "more than 512 MiB"),
        ("{{ '1'.zfill(5000000000) }}", "more than 512 MiB"),
        ("{{ 'a' * 2000000 }}", "it makes 2,000,"),
        ("{{ strftime_now('%c' * 100000) }}", "it makes 2,400,"),
    ],
)
def test_what_a_template_may_compute_is_limited_at_each_row(bomb, reason, tmp_path):
    """The template behaves well at the probe, and badly at one row.

    One that never ends: `tests/stages/test_row_heads.py`.
    """
    trap = f"{{% if messages[0].content == 'What is it?' %}}{bomb}{{% endif %}}"
    template = load_template(make_tokenizer(CHATML + trap), tmp_path)
    other = Conversation([{"role": "user", "content": "a"}, CHAT.messages[1]])

    before, found, after = template.encode([other, CHAT, other])

    assert isinstance(found, BadConversation)
    assert reason in str(found)
    assert "the chat template fails" in str(found)
    assert before.ids == after.ids


@pytest.mark.parametrize("asks", [True, False])
def test_renderings_are_those_of_transformers(asks, tmp_path):
    make_tokenizer(CHATML).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    theirs = tokenizer.apply_chat_template(
        CHAT.messages,
        tokenize=False,
        add_generation_prompt=asks,
        continue_final_message=not asks,
    )

    ((text, _),) = render_chat(
        tokenizer, Chat(CHAT.messages, None, [Wanted(asks=asks, continues=not asks)])
    )

    assert text == theirs


def test_a_template_cannot_reach_the_process(tmp_path):
    make_tokenizer(CHATML).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{{ ''.__class__.__mro__ }}"

    with pytest.raises(BoundedError, match="unsafe"):
        render_chat(tokenizer, Chat(CHAT.messages, None, [Wanted()]))


def test_a_tokenizer_with_code_is_refused_and_its_code_not_executed(tmp_path):
    """No question on a terminal either: transformers asks where the answer is not given."""
    import json

    make_tokenizer(CHATML).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]},
        "tokenizer_class": "EvilTokenizer",
    }
    path.write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'w')\n")

    with pytest.raises(ValueError, match="custom code"):
        ChatTemplate.load(tmp_path)

    assert not (tmp_path / "EXECUTED").exists()
