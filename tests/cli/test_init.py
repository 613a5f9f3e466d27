"""`redco-flow init --data`: a pipeline for the user's own file, recognised by its first rows."""

import json
import random
import re
from itertools import pairwise

import pytest
import transformers
import yaml

from redco_flow.cli.main import run_command
from redco_flow.stages.preprocess.first_pipeline import first_pipeline, ready_configurations
from redco_flow.stages.preprocess.recognition import MAX_ROWS

WORDS = ("red", "green", "blue", "black", "white")


def texts(number=60):
    source = random.Random(0)
    return [" ".join(source.choices(WORDS, k=source.randint(2, 5))) for _ in range(number)]


def turns(text, answer, role="role", content="content", user="user", assistant="assistant"):
    return [{role: user, content: text}, {role: assistant, content: answer}]


def rows_of(make):
    return [make(text, number) for number, text in enumerate(texts())]


KNOWN = {
    "conversations": (
        "chat",
        {"messages_key": "messages"},
        lambda text, n: {"messages": turns(text, "yes"), "source": "web", "id": n},
    ),
    "sharegpt": (
        "chat",
        {"format": "sharegpt", "messages_key": "conversations"},
        lambda text, n: {
            "conversations": turns(text, "yes", "from", "value", "human", "gpt"),
            "system": "Be brief.",
        },
    ),
    "alpaca": (
        "chat",
        {"format": "alpaca"},
        lambda text, n: {
            "instruction": text,
            "input": "",
            "output": "yes",
            "text": f"{text} yes",
            "system": "Be brief.",
            "history": [["Hello", "Hi"]],
        },
    ),
    "completions": (
        "chat",
        {"format": "prompt_completion"},
        lambda text, n: {"prompt": text, "completion": "yes"},
    ),
    "prompts": (
        "language_modeling",
        {"source_key": "question", "target_key": "answer", "source_suffix": "\n"},
        lambda text, n: {"id": n, "question": text, "answer": text[::-1]},
    ),
    "summaries": (
        "text_to_text",
        {"source_key": "document", "target_key": "summary"},
        lambda text, n: {"document": text, "summary": text[:3], "id": str(n)},
    ),
    "two_texts": (
        "text_to_text",
        {"source_key": "mr", "target_key": "ref"},
        lambda text, n: {"mr": f"{text} {n}", "ref": f"{n}: {text}"},
    ),
    "preferences": (
        "preference",
        {"columns": {"prompt": "question"}},
        lambda text, n: {"question": text, "chosen": "yes", "rejected": "no", "score": 0.5},
    ),
    "compared_conversations": (
        "preference",
        {"columns": {"prompt": "chosen"}},
        lambda text, n: {"chosen": turns(text, "yes"), "rejected": turns(text, "no")},
    ),
    "labels": (
        "classification",
        {"source_key": "Text", "target_key": "label"},
        lambda text, n: {"Text": text, "label": n % 2},
    ),
    "pairs_with_labels": (
        "classification",
        {"source_key": "premise", "pair_key": "hypothesis", "target_key": "label"},
        lambda text, n: {"premise": text, "hypothesis": text[::-1], "label": n % 3, "idx": n},
    ),
    "unnamed_classes": (
        "classification",
        {"source_key": "ticket", "target_key": "team"},
        lambda text, n: {"team": f"team {n % 4}", "ticket_id": n, "ticket": f"{text} {n}"},
    ),
    "numbers": (
        "regression",
        {"source_key": "sentence1", "pair_key": "sentence2", "target_key": "label"},
        lambda text, n: {"sentence1": text, "sentence2": text, "label": n / 4},
    ),
    "columns_with_odd_names": (
        "classification",
        {"source_key": "a\n- b: $${c} #", "target_key": "label"},
        lambda text, n: {"a\n- b: ${c} #": f"{text} {n}", "label": n % 2},
    ),
    "unnamed_numbers": (
        "regression",
        {"source_key": "house", "target_key": "area"},
        lambda text, n: {"house": f"{text} {n}", "area": f"{n}.5"},
    ),
    "target_beside_other_columns": (
        "classification",
        {"source_key": "text", "target_key": "target"},
        lambda text, n: {"Unnamed: 0": n, "keyword": "fire", "text": text, "target": n % 2},
    ),
    "flags": (
        "classification",
        {"source_key": "text", "target_key": "is_spam"},
        lambda text, n: {"text": text if n else "photo.png", "is_spam": n % 2 == 1},
    ),
    "many_whole_numbers": (
        "regression",
        {"source_key": "text", "target_key": "label"},
        lambda text, n: {"text": text, "label": n * 1000},
    ),
    "some_empty_conversations": (
        "chat",
        {"messages_key": "messages"},
        lambda text, n: {"messages": turns(text, "yes") if n % 9 else []},
    ),
    "plain": (
        "language_modeling",
        {"text_key": "text"},
        lambda text, n: {"text": text, "url": f"https://x.y/{n}", "meta": {"votes": n}},
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("REDCO_FLOW_WORKSPACE", str(tmp_path / "workspace"))
    return tmp_path


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def init(*words):
    return run_command(["init", "out", *map(str, words)])


def written(here):
    (path,) = (here / "out" / "pipelines").iterdir()
    return path, yaml.safe_load(path.read_text())


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_is_recognised_and_its_pipeline_plans_with_each_key_explained(here, capsys, name):
    recipe, data, make = KNOWN[name]
    file = write(here / f"{name}.jsonl", rows_of(make))

    assert init("--data", file, "--model", "scratch") == 0

    path, pipeline = written(here)
    split = {"dataset": str(file), "validation_fraction": 0.2, "test_fraction": 0.2}
    chosen = {key: one for key, one in pipeline["data"].items() if key not in EVERYWHERE}
    assert (pipeline["recipe"], chosen) == (recipe, {**split, **data})
    lines = path.read_text().splitlines()
    for before, line in pairwise(lines):
        assert not line or "# " in line or before.strip().startswith("# "), line
    out = capsys.readouterr().out
    assert f"recognised: {recipe}, " in out
    assert out.endswith(f"cd out && redco-flow run pipelines/{name}.yaml\n")
    assert run_command(["plan", str(path)]) == 0


EVERYWHERE = ("on_bad_row", "tokenizer", "chat_template")


def write_images(folder):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            image.new("RGB", (8, 8), (number, 0, 0)).save(folder / name / f"{number}.png")
    return folder


def test_a_folder_of_images_is_recognised(here):
    data = write_images(here / "pets")

    assert init("--data", data, "--model", "scratch") == 0

    path, pipeline = written(here)
    assert (pipeline["recipe"], pipeline["settings"]) == (
        "image_classification",
        {"image_size": 32},
    )
    assert "columns" not in pipeline["data"]
    assert run_command(["plan", str(path)]) == 0


def test_data_in_the_project_are_named_relative_to_it(here, monkeypatch):
    data = write_images(here / "out" / "my pets")

    assert init("--data", data, "--model", "scratch") == 0

    path, pipeline = written(here)
    assert pipeline["data"]["dataset"] == "./my pets"
    monkeypatch.chdir(here / "out")
    assert run_command(["plan", str(path)]) == 0


def test_splits_that_the_folder_has_are_used_and_a_published_model_needs_no_network(here):
    (here / "data").mkdir()
    make = KNOWN["labels"][2]
    for split in ("train", "test"):
        write(here / "data" / f"{split}.jsonl", rows_of(make))

    assert init("--data", "data", "--columns", "Text,label") == 0

    _, pipeline = written(here)
    assert pipeline["model"] == {"name_or_path": "google-bert/bert-base-uncased"}
    assert "test_fraction" not in pipeline["data"]
    assert pipeline["data"]["validation_fraction"] == 0.2


def test_a_file_with_semicolons_is_read_with_them(here):
    lines = [f"{text}, {n};{n % 2}\n" for n, text in enumerate(texts())]
    (here / "data.csv").write_text("".join(["text;label\n", *lines]))

    assert init("--data", "data.csv", "--model", "scratch") == 0

    path, pipeline = written(here)
    assert (pipeline["recipe"], pipeline["data"]["csv"]) == ("classification", {"delimiter": ";"})
    assert run_command(["plan", str(path)]) == 0


def test_the_rows_after_the_head_are_not_read(here, capsys):
    file = write(here / "many.jsonl", [{"text": "a text"}] * (MAX_ROWS + 1))
    with file.open("a") as lines:
        lines.write('{"text": 1}\n"damaged')

    assert init("--data", file) == 0

    assert f"looked at: the first {MAX_ROWS:,} rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        ({"a": True, "b": [1]}, [], "the columns fit no recipe. Its columns: a (booleans), b (n"),
        ({"a": "x y", "n": 3}, [], "the columns fit classification and regression equally well"),
        ({"a": "x y", "n": 3}, ["--recipe", "chat"], "the columns do not fit chat. Its columns"),
        ({"text": "x"}, ["--recipe", "clasification"], "did you mean 'classification'?"),
        ({"text": "x"}, ["--columns", "text,tag"], "--columns: data.jsonl has no column 'tag'"),
        ({"text": "x"}, ["--from", "bert"], "there is no such configuration; did you mean 'bert-"),
    ],
)
def test_columns_that_do_not_decide_on_one_recipe_are_named_and_nothing_is_written(
    here, capsys, row, words, said
):
    rows = [
        {**row, "a": f"{row.get('a')} {n}", "n": n % 3} if "n" in row else row for n in range(24)
    ]
    write(here / "data.jsonl", rows)

    assert init("--data", "data.jsonl", *words) == 2

    assert said in capsys.readouterr().err
    assert not (here / "out").exists()


PLAIN = "look like language_modeling of 'text', which does not use "
DOUBTFUL = {
    "answers_to_compare_without_a_prompt": (
        lambda text, n: {"chosen": f"{text} {n}", "rejected": f"{n} {text}"},
        "shows what recipes read.\n  preference: prompt|question|instruction + ",
    ),
    "unknown_name_of_a_label": (
        lambda text, n: {"text": text, "stars_given": n % 5, "day": "May 1"},
        PLAIN,
    ),
    "several_labels": (lambda text, n: {"text": text, "tags": ["a"]}, f"{PLAIN}'tags'"),
    "a_context": (
        lambda text, n: (
            {"instruction": text, "context": "", "response": "y"}
            | ({"context": text} if n > 50 else {})
        ),
        "which does not use 'context'. If that is right, give --columns instruction,response.",
    ),
    "a_system_prompt": (
        lambda text, n: {"system": "Be brief", "question": text, "chosen": "y", "rejected": "n"},
        "which does not use 'system'. If that is right, give --columns question,chosen,rejected.",
    ),
    "answers_that_are_labelled": (
        lambda text, n: {"prompt": text, "response": text, "label": n % 2},
        "which does not use 'label'",
    ),
    "names_of_images": (
        lambda text, n: {"filename": f"{n}.png", "label": n % 2},
        "filename (names of image files; a folder",
    ),
    "two_targets": (
        lambda text, n: {"text": text, "sentiment": "ab"[n % 2], "topic": "xyz"[n % 3]},
        "which does not use 'topic'. If that is right, give --columns text,sentiment.",
    ),
    "sorted_by_class": (
        lambda text, n: {"ticket": f"{text} {n}", "team": "billing"},
        "team (short texts, 1 different)",
    ),
    "as_many_classes_as_rows": (
        lambda text, n: {"text": text, "category": f"class {n * 2 // 3}"},
        f"{PLAIN}'category'",
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_column_is_not_left_out_or_taken_for_another_if_that_may_be_wrong(here, capsys, name):
    make, said = DOUBTFUL[name]
    file = write(here / "data.jsonl", rows_of(make))

    assert init("--data", file, "--model", "scratch") == 2

    assert said in capsys.readouterr().err
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("make", "words", "noted"),
    [
        (lambda n: {"day": n}, ["--columns", "Text,label"], "not used: 'day'"),
        (lambda n: {"label": "ab"[n % 2], "is_reply": n % 3 == 0}, [], "not used: 'is_reply'"),
        (lambda n: {"label": "ab"[n % 2] if n % 9 else ""}, [], "'label' is empty in 7 rows"),
        (lambda n: {"label": n * 1000}, ["--recipe", "regression"], "'label' has mean 2.95e+04"),
        (lambda n: {"label": "one"}, [], "'label' is 'one' in all these rows"),
        (lambda n: {"Text": "long " * 500}, [], "max_source_length 512 (capped)"),
    ],
)
def test_what_may_surprise_is_noted(here, capsys, make, words, noted):
    rows = [{"Text": text, "label": n % 2, **make(n)} for n, text in enumerate(texts())]
    file = write(here / "data.jsonl", rows)

    assert init("--data", file, "--model", "scratch", *words) == 0

    assert noted in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "source", "target"),
    [("summary,text", "summary", "text"), ('"a, b",summary', "a, b", "summary")],
)
def test_columns_are_read_in_the_order_that_the_user_gives(here, columns, source, target):
    rows = [{"text": one, "summary": one[:9], "a, b": one} for one in texts()]
    file = write(here / "data.jsonl", rows)

    assert init("--data", file, "--columns", columns, "--recipe", "text_to_text") == 0

    data = written(here)[1]["data"]
    assert (data["source_key"], data["target_key"]) == (source, target)


def test_a_pipeline_for_data_is_written_here_where_no_directory_is_named(here, capsys):
    (here / "texts.csv").write_text("".join(["text\n", *(f"{text}\n" for text in texts())]))

    assert run_command(["init", "--data", "texts.csv", "--model", "scratch"]) == 0

    assert "\n\nredco-flow run pipelines/texts.yaml\n" in capsys.readouterr().out
    assert "dataset: ./texts.csv" in (here / "pipelines" / "texts.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["out", "--recipe", "chat"], "--recipe needs --data PATH"),
        (["out", "--data", "nothing.csv"], "there is no file or directory 'nothing.csv'"),
        (["out", "--data", "empty.csv"], "there are no rows to train on"),
        (["out", "--data", "data.xlsx"], "unknown ending '.xlsx'"),
        (["out", "--data", "org/name"], "there is no file or directory 'org/name'"),
        (["out", "--data", "python:json"], "there is no file or directory 'python:json'"),
        (["out", "--data", "few.csv"], "3 rows are too few"),
        (["out", "--data", "bad.csv"], "9 of the first 60 rows are bad, the first"),
        (["out", "--data", "texts.csv", "--model", ""], "--model is empty"),
        (["out", "--data", "texts.csv", "--model", "./none"], "there is no directory './none'"),
        (["out", "--data", "texts.csv", "--columns", ""], "texts.csv has no column ''"),
        (["out", "--data", "texts.csv", "--columns", "text,text"], "names a column twice"),
        (["texts.csv", "--data", "texts.csv"], "these exist, nothing was written: texts.csv"),
        ([], "name the DIRECTORY to write, or --data PATH"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_written(here, capsys, words, said):
    (here / "empty.csv").write_text("text,label\n")
    (here / "data.xlsx").write_text("PK")
    lines = [f"{text}\n" for text in texts()]
    (here / "few.csv").write_text("".join(["text\n", *lines[:3]]))
    (here / "bad.csv").write_text("".join(["text\n", *lines[9:], *["a,b\n"] * 9]))
    (here / "texts.csv").write_text("".join(["text\n", *lines]))

    assert run_command(["init", *words]) == 2

    assert said in capsys.readouterr().err
    assert not (here / "out").exists()


def test_the_user_decides_between_recipes_and_columns(here):
    make = KNOWN["unnamed_numbers"][2]
    rows = [{**make(text, n), "day": f"day {n}", "n": n % 3} for n, text in enumerate(texts())]
    file = write(here / "data.jsonl", rows)

    assert init("--data", file, "--columns", "house,n", "--recipe", "regression") == 0

    _, pipeline = written(here)
    assert pipeline["recipe"] == "regression"
    assert (pipeline["data"]["source_key"], pipeline["data"]["target_key"]) == ("house", "n")


READY = {name: found[:2] for name, found in ready_configurations().items()}
FAMILIES = {
    "qwen": "qwen2",
    "llama": "llama",
    "gemma": "gemma3_text",
    "smollm": "llama",
    "bert": "bert",
    "roberta": "roberta",
    "t5": "t5",
    "bart": "bart",
    "gpt2": "gpt2",
    "vit": "vit",
}
DATA_OF = {
    "chat": "conversations",
    "preference": "preferences",
    "classification": "labels",
    "regression": "unnamed_numbers",
    "text_to_text": "summaries",
    "language_modeling": "prompts",
}


def write_model(folder, family):
    transformers.AutoConfig.for_model(family).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_the_ready_configurations_are_listed(capsys):
    assert run_command(["init", "--list"]) == 0

    out = capsys.readouterr().out
    for name, (model, recipe) in READY.items():
        assert re.search(rf"^{name} +{model} +{recipe} ", out, re.MULTILINE)


@pytest.mark.parametrize("name", READY)
def test_a_ready_configuration_is_written_and_plans_with_a_model_of_its_family(here, name):
    """The plan reads a folder in place of the hub's model: the family's default configuration."""
    model, recipe = READY[name]
    if recipe == "image_classification":
        data = write_images(here / "pets")
    else:
        data = write(here / "data.jsonl", rows_of(KNOWN[DATA_OF[recipe]][2]))
    folder = write_model(here / "model", FAMILIES[name.partition("-")[0]])

    assert init("--from", name, "--data", data) == 0

    path, pipeline = written(here)
    assert (pipeline["recipe"], pipeline["model"]["name_or_path"]) == (recipe, model)
    assert run_command(["plan", str(path), f"model.name_or_path={folder}"]) == 0


def test_a_model_in_a_folder_is_used_and_one_of_another_family_refused(here, capsys):
    file = write(here / "data.jsonl", rows_of(KNOWN["labels"][2]))
    write_model(here / "t5", "t5")
    write_model(here / "bert", "bert")

    assert init("--data", file, "--model", "t5") == 2
    assert "recipe 'classification' trains bert, roberta" in capsys.readouterr().err
    assert not (here / "out").exists()
    assert init("--data", file, "--model", "bert") == 0

    assert written(here)[1]["model"] == {"name_or_path": str(here / "bert")}


@pytest.mark.parametrize(
    ("model", "num_gpus", "memory_gib", "shards"),
    [
        ("meta-llama/Llama-3.1-70B", 8, 80.0, 4),  # 140 GB in bfloat16, and room: not on two
        ("Qwen/Qwen2.5-0.5B-Instruct", 8, 80.0, 1),
        ("meta-llama/Llama-3.1-8B", 4, 24.0, 2),
        ("meta-llama/Llama-3.1-8B", 0, None, 1),
    ],
)
def test_sizes_are_those_of_the_devices(here, model, num_gpus, memory_gib, shards):
    file = write(here / "data.jsonl", rows_of(KNOWN["conversations"][2]))

    values, _ = first_pipeline(
        file, name="d", model=model, num_gpus=num_gpus, memory_gib=memory_gib
    )

    train = values["stages"]["train"]
    assert train.get("num_model_shards", 1) == shards
    assert train["resources"] == {"gpus_per_host": num_gpus}
    assert train["lora"]["rank"] == 16
    assert ("frozen_dtype" in train, "dtype" in values["model"]) == (num_gpus > 0,) * 2
    at_once = train["per_device_batch_size"] * max(1, num_gpus // shards)
    assert train["global_batch_size"] % at_once == 0
