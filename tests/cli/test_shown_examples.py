"""`plan --show-examples`: what is learnt of the first conversations, before anything has run."""

import json

import pytest

from redco_flow.text.chat import CHATML
from tests.cli.conftest import Command
from tests.text.chat_tokenizers import make_tokenizer


@pytest.mark.slow
def test_learnt_tokens_are_marked_and_shares_and_bad_rows_are_told(tmp_path):
    make_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    asked = {"role": "user", "content": "Why?"}
    chats = [[asked, {"role": "assistant", "content": "So."}], [asked]]
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    (tmp_path / "chats.yaml").write_text(
        "name: chats\nrecipe: chat\n"
        "data: {train: chats.jsonl, tokenizer: {name_or_path: tokenizer}, on_bad_row: skip}\n"
        "stages: {preprocess: {}}\n"
    )

    said = Command(tmp_path)("plan", "chats.yaml", "--show-examples", "2")

    shown = said.partition("--- what preprocess lets a model learn\n")[2]
    assert shown.startswith("of the first 2 rows:\n1 conversations, ")
    assert "1 cannot be used, the first: " in shown
    assert f"{tmp_path}/chats.jsonl:2: a conversation that ends with a user's turn" in shown
    assert "<|im_start|>assistant\n«So.<|im_end|>\n»" in shown
