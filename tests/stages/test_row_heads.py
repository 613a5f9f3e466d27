"""Rows that preprocessing cannot use are reported by a plan, with file and row, all at once."""

import json
import math
import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.preprocess.heads import head_problems
from redco_flow.text.chat import CHATML
from tests.text.chat_tokenizers import make_tokenizer

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def turns(*contents):
    roles = ["user", "assistant"] * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


GOOD_CHAT = {"messages": turns("1+1?", "2")}
CALLS = {"messages": [*turns("2?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
PAIR = {"prompt": turns("1+1?"), "chosen": turns("", "2")[1:], "rejected": turns("", "3")[1:]}
TRAINED = "tokenizer: {train: {vocab_size: 400}}"
SKIP = "fix them, or leave them out and count them with data.on_bad_row: skip"
NO_TEMPLATE = "no chat template for messages: the tokenizer has no chat template: give"


@pytest.fixture
def problems(tmp_path):
    """Load a pipeline over rows; return what is wrong with it, without the place in the file."""

    def problems_of(recipe, rows, data=TRAINED, settings="", name="rows.jsonl"):
        path = tmp_path / name
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        pipeline = tmp_path / "pipeline.yaml"
        pipeline.write_text(
            f"name: heads\nrecipe: {recipe}\nmodel: {{family: llama}}\n"
            f"data:\n  train: {path}\n  {data}\nsettings: {{{settings}}}\n"
            "stages:\n  preprocess: {}\n"
        )
        try:
            load_pipeline(pipeline, looks_into_data=True)
        except ConfigError as error:
            texts = [str(problem).partition("': ")[2] for problem in error.problems]
            return [text.replace(f"{tmp_path}/", "") for text in texts]
        return []

    return problems_of


LABELS = [{"source": "a", "target": t} for t in ("yes", "no", None, "x", "y", "yes")]
OF_CLASSES = "classes: [no, yes]"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_null_labels_and_labels_of_no_class_are_reported(problems, name):
    found = problems("classification", LABELS, settings=OF_CLASSES, name=name)

    assert found == [
        f"{name}:3: field 'target' is no class: it is null; classes are texts, whole numbers "
        "or booleans (so are 2 more of the first 6 rows); 3 of the first 6 rows are bad: " + SKIP
    ]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_split_whose_labels_are_hidden_is_no_problem_but_others_are(tmp_path, ending):
    def write(split, labels):
        rows = [{"source": "a", "target": label} for label in labels]
        if ending == "parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
        else:
            lines = [f"{json.dumps(row)}\n" for row in rows]
            (tmp_path / f"{split}.jsonl").write_text("".join(lines))

    def found(recipe, **settings):
        return list(head_problems(DataSection.from_json(data), recipe, settings))

    data = {"dataset": str(tmp_path)}
    write("train", ["yes", "no"])
    for hidden in (None, "-1"):
        write("test", [hidden, hidden])
        assert found("classification", classes=["no", "yes"]) == []
        assert found("text_to_text") == []
    write("test", [None, "yes"])
    assert "it is null" in found("classification", classes=["no", "yes"])[0][1]
    write("test", ["yes"])
    write("train", [None, None])
    assert "it is null" in found("classification", classes=["no", "yes"])[0][1]


def test_numbers_are_checked_like_classes(problems):
    rows = [{"source": "a", "target": value} for value in (1, "2.5", None)]

    (found,) = problems("regression", rows)

    assert found.startswith("rows.jsonl:3: field 'target' is no number: it is None")


def test_a_null_text_of_a_table_is_reported(problems):
    rows = [{"source": "a", "target": "b"}, {"source": "a", "target": None}]

    (found,) = problems("text_to_text", rows, name="rows.parquet")

    assert found.startswith("rows.parquet:2: field 'target' is not text: it is null")


CHATML_FAILS = "the chat template fails: chatml has no tool calls"


@pytest.mark.parametrize("data", [TRAINED, f"chat_template: chatml\n  {TRAINED}"])
def test_a_conversation_that_the_template_cannot_render_is_reported(problems, data):
    found = problems("chat", [GOOD_CHAT, CALLS, GOOD_CHAT], data)

    assert found == [f"rows.jsonl:2: {CHATML_FAILS}; 1 of the first 3 rows is bad: {SKIP}"]


def test_the_template_of_a_file_and_of_a_local_tokenizer_are_tried(problems, tmp_path):
    strict = "{{ raise_exception('no ' + messages[0]['role'] + bos_token) }}"
    (tmp_path / "own.jinja").write_text(strict)
    make_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")

    of_file = f"chat_template: {tmp_path / 'own.jinja'}\n  tokenizer: {{name_or_path: any/hub}}"
    of_folder = f"tokenizer: {{name_or_path: {tmp_path / 'tokenizer'}}}"

    assert problems("chat", [GOOD_CHAT], of_file) == [
        "rows.jsonl:1: the chat template fails: no user<bos_token>"
    ]
    assert problems("chat", [GOOD_CHAT], of_folder) == []
    (found,) = problems("chat", [GOOD_CHAT, CALLS], of_folder)
    assert found.startswith(f"rows.jsonl:2: {CHATML_FAILS}")


@pytest.mark.slow
def test_a_template_that_never_ends_holds_a_plan_up_for_seconds(problems, tmp_path):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "loop.jinja").write_text(loop)
    data = f"tokenizer: {{name_or_path: any/model}}\n  chat_template: {tmp_path}/loop.jinja"

    (found,) = problems("chat", [GOOD_CHAT] * 100, data)

    assert "the chat template fails: it needs more than 2 s of CPU time" in found
    assert " of the first 100 rows" not in found  # each would take another two seconds


def test_pairs_of_messages_without_a_template_are_reported(problems):
    texts = {"prompt": "a", "chosen": "b", "rejected": "c"}

    (found,) = problems("preference", [texts, PAIR])

    assert found.startswith(f"rows.jsonl:2: {NO_TEMPLATE} data.chat_template a name (chatml) or")
    assert problems("preference", [PAIR], f"chat_template: chatml\n  {TRAINED}") == []
    assert problems("preference", [texts]) == []


def test_a_trained_tokenizer_takes_no_other_template_than_chatml(problems, tmp_path):
    (tmp_path / "own.jinja").write_text(CHATML)

    found = problems("preference", [PAIR], f"chat_template: {tmp_path / 'own.jinja'}\n  {TRAINED}")

    assert any("a trained tokenizer has the special tokens of chatml alone" in one for one in found)


def test_rows_that_a_recipes_collate_fn_refuses_are_reported(problems):
    image = {"image": [[0, 255], [255, 0]], "label": "a"}
    rows = [image, image | {"image": [0, 1]}, image | {"label": None}]
    outside = {"image": {"bytes": None, "path": "/dev/zero"}, "label": "a"}

    found = problems("image_classification", [*rows, outside], "columns: {}")

    assert [text.partition(": ")[0] for text in found] == [f"rows.jsonl:{n}" for n in (2, 3, 4)]
    assert "no image: an array of shape (2,)" in found[0]
    assert "field 'label' is no class" in found[1]
    assert "a row may only name files below" in found[2]


def test_data_whose_rows_all_have_one_fault_are_a_problem_though_bad_rows_are_skipped(problems):
    skip = f"on_bad_row: skip\n  {TRAINED}"

    assert problems("chat", [GOOD_CHAT, CALLS], skip) == []
    assert problems("chat", [CALLS] * 3, skip) == [
        f"rows.jsonl:1: {CHATML_FAILS} (so are 2 more of the first 3 rows)"
    ]


WORDS = ["", "a", "user", "assistant", "\0", "\ud800", "1e400", "nan", "{", '{"a":1}', None, True]


def test_more_bad_rows_than_the_allowed_number_are_reported(problems):
    rows = [{"source": "a", "target": text} for text in ("b", None, None)]

    assert not problems("text_to_text", rows, f"on_bad_row: {{skip: 2}}\n  {TRAINED}")
    (found,) = problems("text_to_text", rows, f"on_bad_row: {{skip: 1}}\n  {TRAINED}")

    assert found.startswith("rows.jsonl:2: field 'target' is not text")
    assert found.endswith("fix them, or raise the limit; data.on_bad_row: {skip: 1} allows 1")


def test_a_share_of_bad_rows_is_of_all_rows_and_reported_where_all_were_read(problems):
    rows = [{"source": "a", "target": text} for text in ("b", None, *["c"] * 98)]
    share = f"on_bad_row: {{skip: 1 %}}\n  {TRAINED}"

    assert not problems("text_to_text", rows, share)
    assert len(problems("text_to_text", rows[:99], share)) == 1
    assert not problems("text_to_text", [*rows, *rows[2:]], share)


NUMBERS = [0, -1, 10**30, 3.5, math.inf, math.nan]
KEYS = ["role", "content", "tool_calls", "function", "arguments", "name", "type", "bytes", "path"]
COLUMNS = {
    "chat": ("messages", "tools"),
    "preference": ("prompt", "chosen", "rejected"),
    "classification": ("source", "target"),
    "regression": ("source", "target"),
    "image_classification": ("image", "label"),
    "image_to_text": ("image", "caption"),
}
TOJSON = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def junk(source, depth=0):
    kind = source.randrange(4 if depth < 4 else 2)
    if kind < 2:
        return source.choice([WORDS, NUMBERS][kind])
    if kind == 2:
        return [junk(source, depth + 1) for _ in range(source.randrange(3))]
    return {source.choice(KEYS): junk(source, depth + 1) for _ in range(source.randrange(4))}


def nearly_messages(source):
    function = {"name": "f", "arguments": source.choice(['{"a":1}', "{", {"a": 1}, None, 3])}
    calls = [[{"type": "function", "function": function}], junk(source), None]
    contents = ["a", None, [], [{"type": "text", "text": "x"}], junk(source)]
    return [
        {"role": role, "content": source.choice(contents), "tool_calls": source.choice(calls)}
        for role in source.choices(["user", "assistant", "tool", "system", "x"], k=3)
    ]


@pytest.mark.parametrize("recipe", COLUMNS)
def test_whatever_a_row_holds_its_problem_has_file_and_row(tmp_path, recipe):
    source, path = random.Random(7), tmp_path / "rows.jsonl"
    (tmp_path / "own.jinja").write_text(TOJSON)
    makers = [junk, nearly_messages] if recipe in ("chat", "preference") else [junk]
    rows = [
        {key: source.choice(makers)(source) for key in COLUMNS[recipe] if source.random() < 0.95}
        for _ in range(100)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"train": str(path), "chat_template": str(tmp_path / "own.jinja")}

    found = [text for _, text in head_problems(DataSection.from_json(data), recipe, {})]

    assert found
    assert all(re.match(rf"{path}:\d+: ", text) for text in found)
    assert not [text for text in found if re.search("(Type|Key|Attribute|Recursion)Error", text)]


@pytest.mark.slow
def test_trying_rows_out_never_imports_jax(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD_CHAT) + "\n")
    script = (
        "import sys\n"
        "from redco_flow.stages.preprocess.config import Config, data_problems\n"
        f"data = {{'train': {str(path)!r}, 'tokenizer': {{'train': {{'vocab_size': 400}}}}}}\n"
        "assert not list(data_problems(Config.from_json({'recipe': 'chat', 'data': data})))\n"
        "assert not {'jax', 'torch', 'datasets'} & set(sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
