"""Preferences through the stages: bad pairs, a reference's scores, a training on top of another."""

import json
import math

import numpy as np
import pytest
from stage_kinds import evaluate, predict, preprocess, reference_scores, train

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.artifacts.reference_scores import WrongReference
from redco_flow.stages.data.rows import BadRows
from redco_flow.stages.predict.run import CannotPredict
from redco_flow.tracking.metrics_artifact import read_metrics

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
# Of different lengths; the chosen answer repeats the prompt's first word, the other its second.
PAIRS = [
    {"prompt": f"{a} {b}", "chosen": " ".join([a] * (1 + i % 3)), "rejected": f"{b} {a}"}
    for i, a in enumerate(WORDS)
    for b in WORDS
    if a != b
]
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
MODEL = {"model": {"family": "gpt2", "config": TINY}}
LANGUAGE, PREFERENCE = {"recipe": "language_modeling"}, {"recipe": "preference"}
TRAIN = {"num_epochs": 2, "global_batch_size": 8, "learning_rate": 0.01, "log_every_steps": 1}
PREFER = PREFERENCE | MODEL | TRAIN
LORA = {"lora": {"rank": 4, "targets": "layers/"}}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data_of(path, **more):
    return {"train": path, "validation_fraction": 0.2, "test_fraction": 0.2, **more}


@pytest.fixture(scope="module")
def finetuned(shared_bench):
    """What was finetuned on the chosen answers: its dataset and its checkpoint."""
    tokenizer = {"train": {"vocab_size": 280, "type": "bpe"}}
    path = write(shared_bench.root / "pairs.jsonl", PAIRS)
    data = data_of(path, source_key="prompt", target_key="chosen", tokenizer=tokenizer)
    lengths = {"max_source_length": 16, "max_target_length": 16}
    dataset = shared_bench.run(preprocess, LANGUAGE | {"data": data} | lengths)["dataset"]
    made = shared_bench.run(train, LANGUAGE | MODEL | TRAIN, {"dataset": [dataset]})
    return dataset, made["checkpoint/last"]


@pytest.fixture(scope="module")
def pairs(shared_bench, finetuned):
    data = data_of(str(shared_bench.root / "pairs.jsonl"))
    inputs = {"tokenizer_of": [finetuned[0]]}
    return shared_bench.run(preprocess, PREFERENCE | {"data": data}, inputs)["dataset"]


@pytest.fixture(scope="module")
def scored(shared_bench, finetuned, pairs):
    inputs = {"dataset": [pairs], "checkpoint": [finetuned[1]]}
    return shared_bench.run(reference_scores, PREFERENCE | {"batch_size": 8}, inputs)[
        "reference_scores"
    ]


BAD = [
    ({"chosen": "two", "rejected": " two"}, r"2: chosen equals rejected: both are 'two'"),
    ({"chosen": " ", "rejected": "two"}, r"2: field 'chosen' is empty"),
    ({"chosen": "two", "rejected": 3}, r"2: field 'rejected' is not text: it is int"),
    ({"chosen": ["two"], "rejected": "three"}, r"2: field 'chosen' is not text: it is a list"),
    ({"chosen": "two"}, r"2: no field 'rejected'"),
    (
        {"chosen": "two", "rejected": "three " * 40},
        r"2: longer than max_length: prompt and answer have \d+ tokens; settings.max_length is 24",
    ),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message[3:24] for _, message in BAD])
def test_a_pair_that_cannot_be_used_is_told_with_file_and_row_or_skipped(bench, bad, message):
    path = write(bench.root / "pairs.jsonl", [PAIRS[0], {"prompt": "one", **bad}])
    tokenizer = {"train": {"vocab_size": 280, "type": "bpe"}}
    data = {"train": path, "validation_fraction": 0.0, "tokenizer": tokenizer}
    settings = PREFERENCE | {"settings": {"max_length": 24}}

    with pytest.raises(BadRows, match=f"{path}:{message}"):
        bench.run(preprocess, settings | {"data": data})
    made = bench.run(preprocess, settings | {"data": data | {"on_bad_row": "skip"}})["dataset"]

    summary = DatasetArtifact(made.path).summary
    assert summary.splits["train"]["rows"] == 1
    assert sum(summary.skipped_rows.values()) == 1


TURNS = [
    {"prompt": [{"role": "user", "content": one["prompt"]}]}
    | {name: [{"role": "assistant", "content": one[name]}] for name in ("chosen", "rejected")}
    for one in PAIRS[:8]
]


@pytest.mark.parametrize("train_with_template", [True, False])
def test_messages_are_rendered_by_the_template_that_a_tokenizer_without_one_is_given(
    bench, finetuned, train_with_template
):
    """Oracle: transformers' apply_chat_template with the dataset's own tokenizer."""
    from transformers import AutoTokenizer

    inputs = {} if train_with_template else {"tokenizer_of": [finetuned[0]]}
    data = {
        "train": write(bench.root / "turns.jsonl", TURNS),
        "validation_fraction": 0.0,
        "chat_template": "chatml",
        **({"tokenizer": {"train": {"vocab_size": 280}}} if train_with_template else {}),
    }

    made = bench.run(preprocess, PREFERENCE | {"data": data}, inputs)["dataset"]

    tokenizer = AutoTokenizer.from_pretrained(made.path / "tokenizer")
    for row, turns in zip(DatasetArtifact(made.path).split("train"), TURNS, strict=True):
        for name in ("chosen", "rejected"):
            ids = tokenizer.apply_chat_template(turns["prompt"] + turns[name], return_dict=False)
            assert [*row["source_ids"], *row[f"{name}_ids"]] == ids


@pytest.mark.slow
def test_a_prompt_that_finetuning_does_not_see_is_held_out_of_the_pairs_too(finetuned, pairs):
    encoded, own = (DatasetArtifact(one.path) for one in (finetuned[0], pairs))

    for split in ("train", "validation", "test"):
        sources = [row["source"] for row in encoded.split(split)]
        rows = list(own.split(split))
        assert [row["prompt"] for row in rows] == sources
        ids = [row["chosen_ids"].tolist() for row in rows]
        assert ids == [row["target_ids"].tolist() for row in encoded.split(split)]
    assert own.tokenizer_digest == encoded.tokenizer_digest


PIPELINE = """
name: pairs
recipe: preference
model: {family: gpt2}
data: {train: pairs.jsonl, tokenizer: {train: {vocab_size: 280}}}
stages:
  pairs: {kind: preprocess}
  reference: {kind: reference_scores, checkpoint: "@base/production"}
  train: {reference_scores: reference, start_from: "@base/production"}
"""


def test_a_sweep_over_the_loss_leaves_rows_and_reference_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pairs.jsonl", PAIRS)
    (tmp_path / "pairs.yaml").write_text(PIPELINE)

    def settings(*overrides):
        stages = load_pipeline(tmp_path / "pairs.yaml", overrides).stages
        return {name: stage.settings for name, stage in stages.items()}

    one, other = (settings(f"settings.loss.beta={beta}") for beta in (0.1, 0.3))
    longer = settings("settings.max_length=2048")

    assert one["train"]["settings"]["loss"]["beta"] != other["train"]["settings"]["loss"]["beta"]
    assert one["pairs"] == other["pairs"] != longer["pairs"]
    assert one["reference"] == other["reference"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["~stages.train.reference_scores"], "add a stage of kind reference_scores"),
        (["settings.loss.type=orpo"], "compares with no reference: leave `reference_scores` out"),
        (["~stages.reference.checkpoint"], "there is no reference: give the stage a `checkpoint`"),
        (["settings.loss.type=ipo", "settings.loss.label_smoothing=0.1"], "would change nothing"),
        (["data.columns.rejected=worse"], r"pairs\.jsonl:1: no field 'worse'"),
    ],
)
def test_a_plan_tells_what_keeps_a_preference_training_from_starting(
    tmp_path, monkeypatch, changes, message
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pairs.jsonl", PAIRS)
    (tmp_path / "pairs.yaml").write_text(PIPELINE)

    with pytest.raises(ConfigError, match=message):
        load_pipeline(tmp_path / "pairs.yaml", changes, looks_into_data=True)


def records_of(bench):
    return {one["step"]: one for one in bench.records() if one["kind"] == "training"}


@pytest.mark.slow
@pytest.mark.covers("stages by themselves", family="gpt2", recipe="preference")
def test_factors_learn_preferences_with_their_base_as_reference(bench, finetuned, pairs, scored):
    """Engine case 63: resumed in the middle, on two model shards, as on one."""
    inputs = {"dataset": [pairs], "start_from": [finetuned[1]], "reference_scores": [scored]}
    lora = {"lora": LORA["lora"] | {"dropout": 0.1}}
    settings = PREFER | lora | {"eval": {"metrics": ["preference_accuracy"]}, "keep": {"last": 2}}
    bench.run(train, settings, inputs, work="whole")
    whole = records_of(bench)

    work = bench.rewind("whole", max(whole) // 2)
    made = bench.run(train, settings | {"num_model_shards": 2}, inputs, work=work)
    resumed = records_of(bench)

    # Factors begin as a product of zeros: the policy is its reference.
    assert whole[1]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert whole[1]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert max(whole) == max(resumed) > min(resumed) > 1
    for name in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins"):
        found, expected = ([one[step][name] for step in resumed] for one in (resumed, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert whole[max(whole)]["rewards/margins"] > 0.1
    inputs = {"dataset": [pairs], "checkpoint": [made["checkpoint/last"]]}
    with pytest.raises(CannotPredict, match="give this stage the training's `reference_scores`"):
        bench.run(predict, PREFERENCE, inputs)
    asked = {"metrics": ["preference_accuracy"]}
    predictions = bench.run(predict, PREFERENCE, inputs | {"reference_scores": [scored]})
    metrics = bench.run(evaluate, asked, {"predictions": [predictions["predictions"]]})["metrics"]
    summary, _ = read_metrics(metrics.path)
    lines, _ = read_predictions(predictions["predictions"].path)
    correct = [one.prediction["chosen_reward"] > one.prediction["rejected_reward"] for one in lines]
    assert summary.metrics["preference_accuracy"] == pytest.approx(100 * np.mean(correct))
    assert summary.baselines["chance"]["metrics"]["preference_accuracy"] == 50
    assert set(summary.baselines) == {"chance", "longer_answer"}


@pytest.mark.slow
def test_what_learnt_preferences_generates_and_begins_finetuning_again(bench, finetuned, pairs):
    """Without a reference, in buckets; then as the language model that it is."""
    settings = {"settings": {"loss": {"type": "simpo"}}, "batching": {"type": "bucketed"}}
    inputs = {"dataset": [pairs], "start_from": [finetuned[1]]}

    made = bench.run(train, PREFER | settings | {"num_epochs": 1}, inputs)["checkpoint/last"]
    few = {"num_examples": 8, "max_target_length": 4}
    texts = bench.run(predict, LANGUAGE | few, {"dataset": [finetuned[0]], "checkpoint": [made]})
    again = bench.run(
        train,
        LANGUAGE | MODEL | TRAIN | {"num_epochs": 1},
        {"dataset": [finetuned[0]], "start_from": [made]},
    )

    lines, _ = read_predictions(texts["predictions"].path)
    assert {type(line.prediction) for line in lines} == {str}
    assert CheckpointArtifact(made.path).record.recipe == "preference"
    assert CheckpointArtifact(again["checkpoint/last"].path).record.recipe == "language_modeling"


@pytest.mark.slow
def test_scores_of_other_rows_are_refused(bench, finetuned, pairs, scored):
    data = data_of(write(bench.root / "fewer.jsonl", PAIRS[:40]))
    taken = {"tokenizer_of": [finetuned[0]]}
    fewer = bench.run(preprocess, PREFERENCE | {"data": data}, taken)["dataset"]

    with pytest.raises(WrongReference, match=f"reference scores are of dataset {pairs.id[:12]}"):
        bench.run(train, PREFER, {"dataset": [fewer], "reference_scores": [scored]})


def turn(role, content):
    return {"role": role, "content": content}


def asked(words):
    return [turn("system", "Repeat."), turn("user", words)]


def messages_of(row, form):
    """The same pair in each of the forms that TRL takes."""
    prompt = asked(row["prompt"])
    answers = {name: [turn("assistant", row[name])] for name in ("chosen", "rejected")}
    if form == "prompt and answers":
        return {"prompt": prompt, **answers}
    whole = {name: [*prompt, *one] for name, one in answers.items()}
    return whole if form == "without a prompt" else {"prompt": "not read", **whole}


@pytest.fixture(scope="module")
def chats(shared_bench):
    """A dataset of conversations that are answered rightly."""
    rows = [
        {"messages": [*asked(row["prompt"]), turn("assistant", row["chosen"])]} for row in PAIRS
    ]
    path = write(shared_bench.root / "chats.jsonl", rows)
    data = data_of(path, tokenizer={"train": {"vocab_size": 300, "type": "bpe"}})
    return shared_bench.run(preprocess, {"recipe": "chat", "data": data})["dataset"]


@pytest.mark.parametrize("form", ["prompt and answers", "whole conversations", "without a prompt"])
def test_messages_have_the_ids_of_the_tokenizers_template(shared_bench, chats, form):
    from transformers import AutoTokenizer

    path = write(
        shared_bench.root / f"{form.replace(' ', '-')}.jsonl",
        [messages_of(row, form) for row in PAIRS],
    )
    inputs = {"tokenizer_of": [chats]}
    more = {"columns": {"prompt": "chosen"}} if form == "without a prompt" else {}
    settings = PREFERENCE | {"data": data_of(path, **more)}
    made = shared_bench.run(preprocess, settings, inputs)["dataset"]

    dataset = DatasetArtifact(made.path)
    tokenizer = AutoTokenizer.from_pretrained(str(made.path / "tokenizer"))
    test = dataset.split("test")
    rows = {row["row_id"]: row for row in test.__getitems__(range(len(test)))}
    assert len(rows) > 3
    for row_id, row in rows.items():
        pair = PAIRS[int(row_id.rpartition(":")[2]) - 1]
        prompt = asked(pair["prompt"])
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert list(row["source_ids"]) == list(ids)
        for name in ("chosen", "rejected"):
            whole = tokenizer.apply_chat_template(
                [*prompt, turn("assistant", pair[name])], return_dict=False
            )
            assert [*row["source_ids"], *row[f"{name}_ids"]] == list(whole)
    # A prompt that the finetuning holds out is held out here.
    held_out = DatasetArtifact(chats.path).split("test")
    numbers = {
        row["row_id"].rpartition(":")[2] for row in held_out.__getitems__(range(len(held_out)))
    }
    assert {row_id.rpartition(":")[2] for row_id in rows} == numbers


@pytest.mark.slow
def test_what_learnt_conversations_learns_preferences_over_them(shared_bench, chats):
    """Finetuned as a chat, then by low-rank factors over it, which is the reference too."""
    model = {"model": {"family": "gpt2", "config": TINY | {"n_positions": 64}}}
    tuned = shared_bench.run(train, {"recipe": "chat"} | model | TRAIN, {"dataset": [chats]})
    path = write(
        shared_bench.root / "preferred.jsonl",
        [messages_of(row, "prompt and answers") for row in PAIRS],
    )
    inputs = {"tokenizer_of": [chats]}
    pairs = shared_bench.run(preprocess, PREFERENCE | {"data": data_of(path)}, inputs)["dataset"]
    given = {"dataset": [pairs], "checkpoint": [tuned["checkpoint/last"]]}
    scores = shared_bench.run(reference_scores, PREFERENCE | {"batch_size": 8}, given)
    inputs = {
        "dataset": [pairs],
        "start_from": [tuned["checkpoint/last"]],
        "reference_scores": [scores["reference_scores"]],
    }

    made = shared_bench.run(train, PREFERENCE | model | TRAIN | LORA | {"num_epochs": 1}, inputs)

    records = [r for r in shared_bench.records() if r["kind"] == "training"]
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # as the reference itself
    assert records[-1]["rewards/margins"] > records[0]["rewards/margins"]
    asked_of = {"dataset": [chats], "checkpoint": [made["checkpoint/last"]]}
    few = {"recipe": "chat", "num_examples": 8, "max_target_length": 4}
    shared_bench.run(predict, few, asked_of)  # and answers as before


BAD_MESSAGES = [
    ({"chosen": [turn("assistant", "a")], "rejected": "b"}, "field 'rejected' has no messages"),
    ({"chosen": [turn("assistant", "a")]}, "chosen equals rejected: both are 'a'"),
    ({"prompt": [turn("assistant", "Hello.")]}, "roles out of order"),
    (
        {"chosen": [*asked("x"), turn("assistant", "a"), turn("user", "b")]},
        "field 'chosen' is not one answer to the prompt: it has 2 messages",
    ),
    ({"rejected": [turn("assistant", " ")]}, "an empty answer"),
]


@pytest.mark.parametrize(("change", "message"), BAD_MESSAGES, ids=[m for _, m in BAD_MESSAGES])
def test_messages_that_are_no_pair_are_told_with_file_and_line(bench, chats, change, message):
    good = {"prompt": asked("one"), "chosen": [turn("assistant", "one")]}
    good |= {"rejected": [turn("assistant", "a")]}
    bad = good | change
    if message.startswith("field 'chosen' is not one"):
        bad |= {"rejected": [*asked("x"), turn("assistant", "c")]}
    path = write(bench.root / "bad.jsonl", [good, bad])

    with pytest.raises(BadRows) as raised:
        bench.run(
            preprocess,
            PREFERENCE | {"data": {"train": path, "validation_fraction": 0.0}},
            {"tokenizer_of": [chats]},
        )

    assert f"bad.jsonl:2: {message}" in str(raised.value)
