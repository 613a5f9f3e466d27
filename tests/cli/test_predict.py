"""`redco-flow predict`: a checkpoint's answers for the rows of a new file."""

import csv
import json
import random

import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from redco_flow.cli.main import run_command
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_cache")]

TEXTS = """\
name: texts
recipe: language_modeling
model: {family: gpt2, config: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 64}}
data:
  train: train.csv
  test: test.csv
  source_key: question
  target_key: reply
  source_prefix: "say: "
  source_suffix: " ="
  tokenizer: {train: {vocab_size: 300, type: bpe}}
stages:
  preprocess: {max_source_length: 12, max_target_length: 16}
  train: {max_steps: 1, global_batch_size: 8, learning_rate: 1e-2}
  predict: {num_beams: 2, min_new_tokens: 3}
"""
CLASSES = """\
name: classes
recipe: classification
model:
  family: bert
  config:
    {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32,
     max_position_embeddings: 64}
data:
  train: train.csv
  test: test.csv
  source_key: question
  pair_key: reply
  target_key: label
  tokenizer: {train: {vocab_size: 300, type: bpe}}
stages:
  preprocess: {max_source_length: 24}
  train: {max_steps: 12, global_batch_size: 8, learning_rate: 3e-2, mesh: auto}
  predict: {}
"""
IMAGES = """\
name: images
recipe: image_classification
settings: {image_size: 4, num_channels: 1}
model:
  config:
    {patch_size: 2, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2,
     intermediate_size: 16, initializer_range: 0.2}
data: {train: shades.jsonl, validation_fraction: 0.0}
stages:
  preprocess: {}
  train: {num_epochs: 6, global_batch_size: 8, learning_rate: 3e-2}
"""
OWN = """\
name: doubled
recipe: python:doubling
data: {train: numbers.csv, validation_fraction: 0.0, columns: {x: number}}
stages:
  preprocess: {}
  train: {max_steps: 1, global_batch_size: 8, learning_rate: 1e-12}
"""
DOUBLING = """\
import numpy as np

COLUMNS = ("x", "label")

def init_params(key):
    return {"w": np.float32(2.0)}

def collate_fn(examples):
    columns = {name: [float(one[name]) for one in examples] for name in COLUMNS}
    return {name: np.array(values, np.float32) for name, values in columns.items()}

def loss_fn(params, batch, rngs, is_training):
    return ((params["w"] * batch["x"] - batch["label"]) ** 2).mean()

def pred_fn(params, batch, rngs):
    return params["w"] * batch["x"]
"""
WORDS = ("red", "green", "blue", "black", "white")


def rows(number, seed):
    """Questions of some words, which a reply has in reverse; a label is the first word."""
    source = random.Random(seed)
    for index in range(number):
        words = source.choices(WORDS, k=source.randint(1, 6))
        reply = " ".join(reversed(words))
        yield {"nr": index, "question": " ".join(words), "reply": reply, "label": words[0]}


def write(path, found):
    found = list(found)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A command, and the runs of both pipelines."""
    folder = tmp_path_factory.mktemp("predicting")
    write(folder / "train.csv", rows(40, seed=0))
    write(folder / "test.csv", rows(9, seed=1))
    command, processes = Command(folder), {}
    save_shades(folder, range(0, 250, 10))
    write(folder / "numbers.csv", ({"number": n, "label": 2 * n} for n in range(20)))
    (folder / "doubling.py").write_text(DOUBLING)
    pipelines = {"texts": TEXTS, "classes": CLASSES, "images": IMAGES, "doubled": OWN}
    for name, text in pipelines.items():
        (folder / f"{name}.yaml").write_text(text)
        processes[name] = command.start("run", f"{name}.yaml", "--json")
    said = {name: process.communicate(timeout=500) for name, process in processes.items()}
    assert not any(process.returncode for process in processes.values()), said
    return command, {name: json.loads(out.splitlines()[-1]) for name, (out, _) in said.items()}


def save_shades(folder, shades):
    """Images of one colour each, which are dark or light, and a file that names them."""
    lines = []
    for shade in shades:
        image = {"path": f"{shade}.png", "bytes": None}
        Image.new("L", (4, 4), shade).save(folder / image["path"])
        lines.append(json.dumps({"image": image, "label": "dark" if shade < 125 else "light"}))
    (folder / "shades.jsonl").write_text("\n".join(lines))


def predicted(command, run):
    """What the run's own predict stage made of the test split."""
    store = ArtifactStore(Workspace(command.folder / "redco-workspace"))
    path = store.get(run["stages"]["predict"]["artifacts"]["predictions"]).path
    lines = (path / "predictions.jsonl").read_text().splitlines()
    return [json.loads(line)["prediction"] for line in lines]


def state_of(command):
    workspace = command.folder / "redco-workspace"
    return sorted(path.name for name in ("runs", "predict") for path in workspace.glob(f"{name}/*"))


def test_texts_of_a_file_without_targets_are_those_of_the_pipelines_predict_stage(trained):
    command, runs = trained
    new = [{"nr": row["nr"], "question": row["question"]} for row in rows(9, seed=1)]
    write(command.folder / "new.csv", new)

    command("predict", runs["texts"]["run"], "new.csv", "-o", "answers.csv")

    answers = list(csv.DictReader((command.folder / "answers.csv").open(newline="")))
    assert [one.pop("prediction") for one in answers] == predicted(command, runs["texts"])
    assert answers == [{key: str(one) for key, one in row.items()} for row in new]
    checkpoint = runs["texts"]["stages"]["train"]["artifacts"]["checkpoint/last"]
    assert f"artifact checkpoint {checkpoint[:12]}" in command("why", "predict")
    again = command.json("predict", checkpoint[:12], "new.csv")
    assert (again["rows"], again["predicted"]) == (9, 9)
    made = ArtifactStore(Workspace(command.folder / "redco-workspace")).get(again["predictions"])
    lines = (made.path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["references"] for line in lines] == [[]] * 9  # none is made up
    state = command.json("status", again["run"])
    assert all(stage["reused"] for stage in state["stages"].values())


def test_a_row_that_cannot_be_used_gets_null_and_a_reason_and_rows_keep_their_order(trained):
    command, runs = trained
    new = [json.dumps({key: row[key] for key in ("question", "reply")}) for row in rows(9, seed=1)]
    lines = [*new[:2], '{"question": "", "reply": "x"}', "nonsense", *new[2:]]
    (command.folder / "new.jsonl").write_text("\n".join(lines))
    command("promote", f"{runs['classes']['run']}/train", "--as", "production")

    command("predict", "@production", "new.jsonl", "-o", "answers.parquet", "batch_size=4")

    answers = pyarrow.parquet.read_table(command.folder / "answers.parquet").to_pylist()
    problems = [one["prediction_problem"] for one in answers]
    assert problems[2] == "field 'question' is empty"
    assert problems[3].startswith("not JSON")
    assert (answers[2]["prediction"], answers[3]["prediction"]) == (None, None)
    usable = [one for one, problem in zip(answers, problems, strict=True) if problem is None]
    assert [one["prediction"] for one in usable] == predicted(command, runs["classes"])
    likeliest = [max(one["probabilities"], key=one["probabilities"].get) for one in usable]
    assert likeliest == [one["prediction"] for one in usable]
    assert [json.loads(line)["question"] for line in new] == [one["question"] for one in usable]


def test_a_mesh_that_is_left_to_a_search_is_that_of_data_shards_on_cpus_and_recorded_so(trained):
    command, runs = trained
    run = command.folder / "redco-workspace" / "runs" / runs["classes"]["run"]

    settings = yaml.safe_load((run / "resolved.yaml").read_text())["stages"]["train"]
    origin = json.loads((run / "origins.json").read_text())["stages.train.mesh"]

    assert [settings[key] for key in ("mesh", "num_model_shards", "fsdp")] == [None, 1, 1]
    assert origin["source"].startswith("mesh: auto, all CPU devices are data shards")


def test_images_are_files_or_named_by_rows_and_those_outside_of_a_rows_folder_are_refused(
    trained,
):
    command, runs = trained
    new = command.folder / "new"
    new.mkdir()
    for shade in (30, 220):
        Image.new("L", (5, 5), shade).save(new / f"new{shade}.png")
    names = ["new220.png", "../10.png", "new30.png"]
    (new / "new.jsonl").write_text("\n".join(json.dumps({"image": name}) for name in names))
    words = ["predict", runs["images"]["run"], "new/new30.png", "new/new.jsonl"]

    answers = [json.loads(line) for line in command(*words).splitlines()]

    assert [one["image"] for one in answers] == ["new/new30.png", *names]
    assert [one["prediction"] for one in answers] == ["dark", "light", None, "dark"]
    assert "a row may only name files below" in answers[2]["prediction_problem"]
    assert answers[0]["probabilities"] == answers[3]["probabilities"]


def test_a_recipe_of_ones_own_predicts_without_its_target(trained):
    command, runs = trained
    write(command.folder / "new.csv", [{"number": 4, "note": "a"}, {"number": 2.5, "note": "b"}])

    answers = command("predict", runs["doubled"]["run"], "new.csv")

    assert list(map(json.loads, answers.splitlines())) == [
        {"number": "4", "note": "a", "prediction": 8.0},
        {"number": "2.5", "note": "b", "prediction": 5.0},
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["CLASSES", "misfit.csv"], "reads the columns question, reply, and the file has a, b"),
        (["CLASSES", "misfit.csv", "data.source_key=a"], "reads the columns a, reply, and the"),
        (["CLASSES", "no.csv"], "no.csv: there is no such file"),
        (["CLASSES", "taken.csv"], "taken.csv: has a column 'prediction' already"),
        (["CLASSES", "test.csv", "-o", "x.txt"], "the ending must be .csv or .jsonl or .parquet"),
        (["CLASSES", "test.csv", "num_beams=2"], "command line: 'stages.predict': recipe"),
        (["abcdef123456", "test.csv"], "no artifact, run or stage of the last run is called"),
        (["FOREIGN", "test.csv"], "has no record of how its training data was preprocessed"),
    ],
)
def test_what_cannot_be_predicted_is_refused_before_anything_is_written(
    trained, words, problem, tmp_path, monkeypatch, capsys
):
    command, runs = trained
    write(command.folder / "misfit.csv", [{"a": 1, "b": 2}])
    write(command.folder / "taken.csv", [{"question": "a", "reply": "b", "prediction": "c"}])
    (tmp_path / "weights").write_text("0")
    store = ArtifactStore(Workspace(command.folder / "redco-workspace"))
    foreign = store.publish("checkpoint", tmp_path / "weights")
    named = {"CLASSES": runs["classes"]["run"], "FOREIGN": foreign.id}
    before = state_of(command)

    monkeypatch.chdir(command.folder)
    monkeypatch.delenv("REDCO_FLOW_WORKSPACE", raising=False)

    assert run_command(["predict", *(named.get(word, word) for word in words)]) == 2

    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert state_of(command) == before
