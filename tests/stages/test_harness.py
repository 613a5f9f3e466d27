"""lm-eval asks a tiny GPT-2: its answers beside transformers' own model of the same parameters."""

import json
import random

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'redco-flow[harness]'")

from lm_eval.api.instance import Instance
from stage_kinds import harness, preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.records import read_json, read_json_lines
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.harness.language_model import HarnessModel
from redco_flow.stages.harness.run import CannotEvaluateTasks, load_tasks
from redco_flow.text.special_tokens import cut_before
from redco_flow.tracking.metrics_artifact import read_metrics

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
TINY = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 48}
RECIPE = {"recipe": "language_modeling"}
NEXT = """\
task: next_word
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{first}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXTS = """\
task: whole_texts
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
ANSWERS = """\
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{first}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: [" "], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
LAST = """\
task: last_word
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
process_docs: !function draws.with_draw
output_type: loglikelihood
doc_to_text: "{{first}}"
doc_to_target: " {{choices[answer]}}"
metric_list: [{metric: perplexity, higher_is_better: false}, {metric: acc}]
"""
DRAWS = """\
import random

def with_draw(dataset):
    return dataset.map(lambda doc: {"draw": random.getrandbits(40)})
"""


@pytest.fixture(scope="module")
def tasks(shared_bench):
    folder = shared_bench.root / "tasks"
    folder.mkdir()
    for name, text in {"next": NEXT, "texts": TEXTS, "answers": ANSWERS, "last": LAST}.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "draws.py").write_text(DRAWS)
    questions = [
        {"first": f"{word} {WORDS[(i + 1) % 8]}", "choices": WORDS[:4], "answer": i % 4}
        for i, word in enumerate(WORDS * 3)
    ]
    # The last text is longer than what the model reads at once.
    texts = [{"text": " ".join(WORDS * n)} for n in (1, 2, 12)]
    for name, rows in {"questions": questions, "texts": texts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def checkpoint(shared_bench):
    path = shared_bench.root / "texts.jsonl"
    lines = [json.dumps({"text": " ".join((WORDS * 3)[i % 8 :][:8])}) + "\n" for i in range(640)]
    path.write_text("".join(lines))
    data = {
        "train": str(path),
        "tokenizer": {"train": {"vocab_size": 280, "type": "bpe"}},
        "text_key": "text",
        "validation_fraction": 0.2,
    }
    dataset = shared_bench.run(preprocess, RECIPE | {"data": data, "max_target_length": 32})
    settings = RECIPE | {
        "model": {"family": "gpt2", "config": TINY},
        "num_epochs": 3,
        "global_batch_size": 8,
        "learning_rate": 0.01,
    }
    return shared_bench.run(train, settings, {"dataset": [dataset["dataset"]]})["checkpoint/last"]


@pytest.fixture(scope="module")
def reference(checkpoint, tmp_path_factory):
    """Transformers' model of the same parameters, and our tokenizer."""
    torch = pytest.importorskip("torch", reason="torch is not installed: redco-flow[reference]")
    from transformers import GPT2LMHeadModel

    artifact = CheckpointArtifact(checkpoint.path)
    recipe = artifact.build_recipe()
    folder = tmp_path_factory.mktemp("reference")
    recipe.save_pretrained(artifact.load_params(recipe, Deployer()), folder)
    model = GPT2LMHeadModel.from_pretrained(folder).eval()

    def log_likelihood(context, continuation):
        ids = torch.tensor([[*context, *continuation]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids[:, :-1]).logits[0].double(), dim=-1)
        scored = scores[-len(continuation) :]
        wanted = torch.tensor(continuation)
        is_greedy = bool((scored.argmax(-1) == wanted).all())
        return float(scored[range(len(continuation)), wanted].sum()), is_greedy

    return log_likelihood, model


def model_of(checkpoint, **settings):
    config = harness.Config(tasks=["next_word"], **{"batch_size": 8} | settings)
    return HarnessModel(CheckpointArtifact(checkpoint.path), config, lambda *progress: None)


def asked(kind, *arguments):
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


@pytest.mark.parametrize(
    "settings", [{"batch_size": 8}, {"batch_size": 4, "num_model_shards": 2, "fsdp": 2}]
)
def test_log_likelihoods_equal_transformers_for_any_batch_size_and_mesh(
    checkpoint, reference, settings
):
    log_likelihood, _ = reference
    model = model_of(checkpoint, **settings)
    pairs = [("one two", f" {word}") for word in WORDS]
    pairs += [("", "six seven"), ("one ", "two"), ("five six seven", " one two three")]

    found = model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)

    for (context, continuation), (score, is_greedy) in zip(pairs, found, strict=True):
        first = model.tok_encode(context.rstrip()) or [model.eot_token_id]
        whole = model.tok_encode(context + continuation)
        rest = whole[len(first) :] if context else whole
        expected = log_likelihood(first, rest)
        assert score == pytest.approx(expected[0], abs=1e-4)
        assert is_greedy == expected[1]
    assert {is_greedy for _, is_greedy in found} == {True, False}


def test_a_text_longer_than_the_model_reads_is_scored_in_windows(checkpoint, reference):
    log_likelihood, _ = reference
    model = model_of(checkpoint)
    text = " ".join(WORDS * 12)
    ids = model.tok_encode(text)
    size = TINY["n_positions"]

    (found,) = model.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))

    assert len(ids) > 2 * size
    expected, done = 0.0, 0
    while done < len(ids):  # each token once, after as many as fit
        end = min(done + size, len(ids))
        before = [model.eot_token_id, *ids][max(0, end - size) : done + 1]
        expected += log_likelihood(before, ids[done:end])[0]
        done = end
    assert found == pytest.approx(expected, abs=1e-3)


def test_texts_are_generated_up_to_a_stop_string(checkpoint, reference):
    _, torch_model = reference
    model = model_of(checkpoint)
    prompts = ["one two", "six seven eight"]
    arguments = {"until": [" "], "max_gen_toks": 5}
    requests = asked("generate_until", *((prompt, arguments) for prompt in prompts))

    found = model.generate_until(requests)

    import torch

    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor([model.tok_encode(prompt)])
        new = torch_model.generate(
            ids, max_new_tokens=5, do_sample=False, pad_token_id=model.eot_token_id
        )[0, ids.shape[1] :].tolist()
        new = new[: new.index(model.eot_token_id)] if model.eot_token_id in new else new
        whole = CheckpointArtifact(checkpoint.path).tokenizer.backend.decode(new)
        assert text == cut_before(whole, [" "])

    drawn = asked("generate_until", (prompts[0], arguments | {"temperature": 50.0}))
    assert model.generate_until(drawn)[0] != found[0]  # without do_sample, as lm-eval draws


def test_tasks_of_ones_own_become_a_metrics_artifact(bench, checkpoint, tasks):
    settings = {
        "tasks": ["next_word", "whole_texts", "answers", "last_word"],
        "tasks_folder": str(tasks),
        "num_examples": 8,
    }

    metrics = bench.run(harness, settings, {"checkpoint": [checkpoint]})["metrics"]

    summary, lines = read_metrics(metrics.path)
    assert {"next_word/acc", "next_word/acc_norm", "answers/exact_match"} <= set(summary.metrics)
    assert summary.directions["whole_texts/word_perplexity"] == "min"
    assert summary.checkpoint == checkpoint.id
    of_words = [line["scores"]["next_word/acc"] for line in lines if "next" in line["row_id"]]
    assert len(of_words) == 8
    assert np.mean(of_words) == pytest.approx(summary.metrics["next_word/acc"])
    said = read_json(metrics.path / "lm_eval.json")
    assert said["n-samples"]["next_word"] == {"original": 24, "effective": 8}
    answers = list(read_json_lines(metrics.path / "samples.jsonl"))
    assert {"doc", "resps", "doc_hash"} <= set(answers[0])
    # Its perplexity is no mean of the questions' log-likelihoods.
    assert summary.metrics["last_word/perplexity"] > 1
    of_last = [line["scores"] for line in lines if line["row_id"].startswith("last")]
    assert all(set(scores) == {"last_word/acc"} for scores in of_last)
    generator = random.Random(harness.Config(tasks=["last_word"]).seed)
    draws = [generator.getrandbits(40) for _ in range(8)]
    assert [one["doc"]["draw"] for one in answers if "draw" in one["doc"]] == draws


def test_draws_of_a_task_depend_on_the_seed_alone_and_are_the_same_at_each_reading(tasks):
    for seed in (1, 2, 1):
        config = harness.Config(tasks=["last_word"], tasks_folder=str(tasks), seed=seed)
        task = load_tasks(config)["tasks"]["last_word"]

        generator = random.Random(seed)
        draws = [generator.getrandbits(40) for _ in range(24)]
        for rows in (task.eval_docs, task.eval_docs, task.sampler.df):
            assert [row["draw"] for row in rows] == draws


def test_an_unknown_task_is_told(bench, checkpoint, tasks):
    settings = {"tasks": ["next_wrod"], "tasks_folder": str(tasks)}

    with pytest.raises(CannotEvaluateTasks, match="next_wrod: neither in"):
        bench.run(harness, settings, {"checkpoint": [checkpoint]})
