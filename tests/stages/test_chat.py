"""Conversations through the stages: what is learnt, cut, dropped and refused; a tiny LLaMA."""

import json

import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.engine.step.loss import IGNORED_LABEL
from redco_flow.recipes.language_modeling.run import build_decoder_only
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.data.rows import BadRows, NoRows
from redco_flow.text.chat import CHATML, ChatTemplate
from redco_flow.text.conversations import Conversation
from redco_flow.tracking.row_counts import learnt_notes
from tests.text.chat_tokenizers import make_tokenizer

WORDS = ["one", "two", "three", "four", "five", "six"]
RECIPE = {"recipe": "chat"}
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}
TRAINED = {"train": {"vocab_size": 280, "type": "bpe"}}
NO_SPLITS = {"validation_fraction": 0.0}


def chat(*turns):
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]


CHATS = [chat(f"{a} {b}?", b, "And?", a) for a in WORDS for b in WORDS]


def write_chats(path, chats):
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    return str(path)


def make_dataset(bench, chats, *, data=None, **settings):
    path = write_chats(bench.root / "chats.jsonl", chats)
    own = {"train": path, "tokenizer": TRAINED, **NO_SPLITS, **(data or {})}
    return bench.run(preprocess, RECIPE | {"data": own} | settings)["dataset"]


@pytest.fixture(scope="module")
def dataset(shared_bench):
    fractions = {"validation_fraction": 0.2, "test_fraction": 0.2}
    return make_dataset(shared_bench, CHATS, data=fractions)


def test_a_tokenizer_of_characters_has_those_of_conversations_and_of_their_roles(bench):
    """No message has the letters u and s, and more characters than the vocabulary come twice.

    transformers decodes the ids to the template's text.
    """
    from transformers import AutoTokenizer

    data = {"tokenizer": {"train": {"type": "character", "vocab_size": 300}}}
    ideographs = 2 * "".join(map(chr, range(0x4E00, 0x4E00 + 400)))
    dataset = make_dataset(bench, [chat("1+1=?", "2"), chat("1+2=?", ideographs)], data=data)

    tokenizer = AutoTokenizer.from_pretrained(dataset.path / "tokenizer")
    (row,) = DatasetArtifact(dataset.path).split("train")[:1]
    expected = tokenizer.apply_chat_template(chat("1+1=?", "2"), tokenize=False)
    assert tokenizer.decode(row["target_ids"]) == expected


def test_a_datasets_ids_and_labels_are_those_of_its_tokenizers_template(dataset):
    """Engine case 62: through the stage, and as labels."""
    from transformers import AutoTokenizer

    artifact = DatasetArtifact(dataset.path)
    tokenizer = AutoTokenizer.from_pretrained(dataset.path / "tokenizer")
    (row,) = artifact.split("train")[:1]
    messages = CHATS[int(row["row_id"].rpartition(":")[2]) - 1]
    expected = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
    counts = artifact.summary.splits["train"]
    recipe = build_decoder_only(
        {"family": "llama", "config": TINY},
        artifact.tokenizer,
        source_length=counts["longest_source"],
        target_length=counts["longest_target"],
        is_whole=True,
    )

    batch = recipe.collate_fn([row])

    length = len(expected["input_ids"])
    assert row["target_ids"].tolist() == expected["input_ids"]
    assert row["source_ids"].tolist() == asked["input_ids"]
    assert batch["input_ids"][0, : length - 1].tolist() == expected["input_ids"][:-1]
    is_learnt = (batch["labels"][0] != IGNORED_LABEL).tolist()
    assert is_learnt[: length - 1] == [bool(m) for m in expected["assistant_masks"][1:]]
    assert not any(is_learnt[length - 1 :])
    assert row["references"] == [messages[-1]["content"]]


def test_what_is_learnt_is_told_in_the_summary_and_shown(dataset):
    artifact = DatasetArtifact(dataset.path)
    counts = artifact.summary.splits["train"]
    rows = artifact.split("train")
    learnt = sum(int(np.diff(row["learnt"].reshape(-1, 2)).sum()) for row in rows)

    pieces = dataset.manifest["metadata"]["learnt"][0]

    rendered = "".join(text for text, _ in pieces)
    assert rendered.startswith("<|im_start|>user\none one?<|im_end|>\n<|im_start|>assistant\n")
    assert counts["learnt_tokens"] == learnt
    assert f"{learnt / counts['target_tokens']:.1%} are learnt" in next(learnt_notes(counts))
    assert [text for text, is_learnt in pieces if is_learnt] == [
        f"{text}<|im_end|>\n" for text in (WORDS[0], WORDS[0])
    ]


@pytest.mark.slow
def test_a_tiny_llama_is_trained_on_packed_conversations_and_answers(shared_bench, dataset):
    settings = RECIPE | {
        "model": {"family": "llama", "config": TINY},
        "num_epochs": 1,
        "global_batch_size": 8,
        "batching": {"type": "packed", "packed_length": 80},
        "keep": {"best": ["perplexity"]},
    }
    trained = shared_bench.run(train, settings, {"dataset": [dataset]})
    checkpoint = trained["checkpoint/best/perplexity"]
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}

    predicted = shared_bench.run(predict, RECIPE | {"score_targets": True}, inputs)["predictions"]
    scored = {"predictions": [predicted]}
    shared_bench.run(evaluate, {"metrics": ["exact_match", "perplexity"]}, scored)

    lines, _ = read_predictions(predicted.path)
    assert lines[0].source.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert all(line.references[0] in WORDS for line in lines)
    # The answer's letters, and the end token and line break of both answers.
    assert all(line.num_tokens >= 4 for line in lines)


def test_rows_that_cannot_be_learnt_from_are_all_told_with_file_and_line(bench):
    chats = [*CHATS, chat("one?"), chat("one?", " "), chat("a", "b")[::-1]]
    with pytest.raises(BadRows) as raised:
        make_dataset(bench, chats)

    told = str(raised.value)
    assert f"chats.jsonl:{len(CHATS) + 1}: a conversation that ends with a user's turn" in told
    assert f"chats.jsonl:{len(CHATS) + 2}: an empty answer" in told
    assert f"chats.jsonl:{len(CHATS) + 3}: roles out of order" in told


def test_bad_rows_are_skipped_and_counted_where_the_pipeline_says_so(bench):
    made = make_dataset(bench, [*CHATS, chat("one?")], data={"on_bad_row": "skip"})

    summary = DatasetArtifact(made.path).summary
    assert summary.splits["train"]["rows"] == len(CHATS)
    assert summary.skipped_rows == {"a conversation that ends with a user's turn": 1}


LONG = chat("one?", "two " * 60)


@pytest.mark.parametrize("on_too_long", ["truncate", "drop", "error"])
def test_what_is_too_long_is_cut_or_dropped_and_counted_or_an_error(bench, on_too_long):
    settings = {"max_length": 70, "on_too_long": on_too_long}
    if on_too_long == "error":
        with pytest.raises(BadRows, match=r"chats.jsonl:37: longer than max_length: it has"):
            make_dataset(bench, [*CHATS, LONG], **settings)
        return

    made = make_dataset(bench, [*CHATS, LONG, chat("one " * 80, "two")], **settings)

    counts = DatasetArtifact(made.path).summary.splits["train"]
    is_cut = on_too_long == "truncate"
    assert counts["longest_target"] <= 70
    assert (counts["cut_targets"], counts["dropped_rows"]) == ((1, 1) if is_cut else (0, 2))
    notes = " ".join(learnt_notes(counts))
    assert "dropped: longer than max_length" in notes
    assert ("cut at max_length" in notes) == is_cut


def test_a_split_whose_rows_are_all_too_long_is_an_error(bench):
    with pytest.raises(NoRows, match="split 'train' has no usable row: 36 are longer"):
        make_dataset(bench, CHATS, max_length=4)


def test_a_template_that_fails_on_some_rows_names_them_and_one_that_masks_nothing_is_refused(
    bench, tmp_path
):
    picky = "{% if messages | length > 4 %}{{ raise_exception('too many turns') }}{% endif %}"
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    template = tmp_path / "own.jinja"
    data = {
        "tokenizer": {"name_or_path": str(tmp_path / "tokenizer")},
        "chat_template": str(template),
    }

    template.write_text(picky + CHATML)
    with pytest.raises(BadRows, match=r"chats.jsonl:37: the chat template fails: too many turns"):
        make_dataset(bench, [*CHATS, [*CHATS[0], *CHATS[1]]], data=data)
    template.write_text(CHATML.replace("'assistant' %}{% gen", "'nobody' %}{% gen"))
    with pytest.raises(ValueError, match="lets nothing be learnt"):
        make_dataset(bench, CHATS, data=data)


def test_a_double_start_and_a_missing_end_are_told(bench, tmp_path, caplog):
    template = "{{ bos_token }}{{ messages[0].content }}" + CHATML
    tokenizer = make_tokenizer(template, eos="<|other|>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = {"tokenizer": {"name_or_path": str(tmp_path / "tokenizer")}}

    make_dataset(bench, [chat("<|begin|>Why?", "So."), chat("Why?", "So.")], data=data)

    assert "train: 1 begin with the start token (BOS) twice" in caplog.text
    assert "train: 2 have an answer without the tokenizer's end token (EOS)" in caplog.text


def test_the_template_and_its_values_travel_with_the_dataset(bench, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ greeting }}" + CHATML)
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = {
        "tokenizer": {"name_or_path": str(tmp_path / "tokenizer")},
        "chat_template": str(template),
        "chat_template_kwargs": {"greeting": "Hello!"},
        "default_system_message": "Be brief.",
    }

    made = make_dataset(bench, CHATS, data=data)

    (row,) = DatasetArtifact(made.path).split("train")[:1]
    start = "Hello!<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none one?<|im_end|>"
    assert row["source"].startswith(start)
    again = ChatTemplate.load(made.path / "tokenizer", {"greeting": "Hello!"})
    asked = Conversation([{"role": "user", "content": "Why?"}])
    assert again.render(asked) == "Hello!<|im_start|>user\nWhy?<|im_end|>\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"source_key": "prompt"}}, "data.source_key would change nothing"),
        ({"data": {"chat_template": "zephyr"}}, "there is no chat template 'zephyr': give"),
        ({"data": {"chat_template": "/own.jinja"}}, "a trained tokenizer has the special tokens"),
        ({"data": {"format": "alpaca", "messages_key": "x"}}, "rows of format 'alpaca' have none"),
        ({"max_source_length": 9}, "'max_source_length' would change nothing for recipe 'chat'"),
        ({"recipe": "text_to_text", "max_length": 9}, "'max_length' would change nothing"),
        ({"recipe": "text_to_text", "data": {"format": "alpaca"}}, "in recipe chat alone"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_they_are_read(tmp_path, settings, message):
    own = {"train": write_chats(tmp_path / "a.jsonl", CHATS), "tokenizer": TRAINED}
    values = RECIPE | settings | {"data": own | settings.get("data", {})}

    with pytest.raises(ValueError, match=message):
        preprocess.Config.from_json(values)


def test_the_head_of_a_file_is_read_as_conversations_when_it_is_planned(tmp_path):
    path = write_chats(tmp_path / "a.jsonl", [*CHATS, chat("one?"), chat("two?")])
    config = preprocess.Config.from_json(RECIPE | {"data": {"train": path, "tokenizer": TRAINED}})

    ((key, told),) = preprocess.data_problems(config)

    assert key == ("data", "train")
    assert f"{path}:37: a conversation that ends with a user's turn" in told
    assert "(so are 1 more of the first 38 rows)" in told
