"""A stage that runs a script: what it takes, what it makes, and every mistake before it starts."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import InputRef, load_pipeline
from redco_flow.spec.yaml import write_yaml
from redco_flow.stages.script.config import Config, words

PIPELINE = """\
name: scripts
stages:
  first:
    kind: script
    path: {path}
    arguments: {{size: 3}}
    inputs: {{rows: {rows}}}
    outputs: [params, curve]
  second:
    kind: script
    path: {path}
    inputs: {{start: first/params}}
    outputs: [table]
  third:
    kind: script
    path: {path}
    inputs: {{table: second}}
"""


@pytest.fixture
def text(tmp_path):
    """The pipeline with a script and rows that are there."""
    script, rows = tmp_path / "work.py", tmp_path / "rows.json"
    script.write_text("print('hello')\n")
    rows.write_text("[]")
    return PIPELINE.format(path=script, rows=rows)


def test_inputs_are_outputs_of_stages_or_files(load, text, tmp_path):
    stages = load(text).stages

    assert stages["first"].inputs == {}
    assert stages["first"].config.inputs == {"rows": str(tmp_path / "rows.json")}
    assert stages["second"].inputs == {"start": (InputRef("first", "params"),)}
    assert stages["second"].config.inputs == {}
    assert stages["third"].inputs == {"table": (InputRef("second", "table"),)}


def test_the_bundled_kinds_outputs_are_inputs_too(load, text, tmp_path):
    more = """\
  preprocess: {}
  train: {}
  judge: {kind: script, path: PATH, inputs: {rows: preprocess, model: train, best: train/last}}
"""
    data = f"data: {{train: {tmp_path}/rows.json, tokenizer: {{train: {{}}}}}}\n"
    model = "recipe: text_to_text\nmodel: {family: t5, config: {}}\n"
    more = more.replace("PATH", str(tmp_path / "work.py"))

    stages = load(text.replace("stages:\n", f"{model}{data}stages:\n") + more).stages

    assert stages["judge"].inputs == {
        "rows": (InputRef("preprocess", "dataset"),),
        "model": (InputRef("train", "checkpoint/last"),),
        "best": (InputRef("train", "checkpoint/last"),),
    }


def test_folders_and_where_stages_are_named_decide_nothing(load, text, tmp_path):
    settings = load(text).stages["first"].settings

    assert settings == {
        "path": "work.py",
        "arguments": {"size": 3},
        "inputs": {"rows": "rows.json"},
        "outputs": ["params", "curve"],
    }


def test_the_resolved_pipeline_means_the_same(load, text, tmp_path):
    pipeline = load(text, "stages.first.arguments.size=5")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(write_yaml(pipeline.document))

    again = load_pipeline(resolved)

    assert again.document == pipeline.document
    assert {n: s.inputs for n, s in again.stages.items()} == {
        n: s.inputs for n, s in pipeline.stages.items()
    }
    assert again.stages["first"].config.arguments == {"size": 5}


def test_every_mistake_is_told_at_once_with_its_line(write, tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    path = write(f"""\
        name: mistakes
        stages:
          gone:
            kind: script
            path: {tmp_path}/gone.py
          broken:
            kind: script
            path: {tmp_path}/broken.py
            arguments:
              inner-steps: 3
              words: [fine, -x]
            inputs:
              rows: brokn/table
              both: gone
            outputs: [table, table, rows]
        """)

    with pytest.raises(ConfigError) as caught:
        load_pipeline(path, looks_into_data=True)

    told = {(problem.line, problem.message) for problem in caught.value.problems}
    assert len(told) == len(caught.value.problems)
    for line, said in [
        (5, "there is no file"),
        (8, f"is not Python, at {tmp_path}/broken.py:2"),
        (10, "'inner-steps' is no Python identifier"),
        (11, "'-x' in a list would be taken for an option"),
        (13, "there is no stage 'brokn/table', and no such file; did you mean 'broken'?"),
        (14, "stage 'gone' makes nothing"),
        (15, "'table' is in 'outputs' already"),
        (15, "'rows' is in 'inputs' already"),
    ]:
        assert any(at == line and said in message for at, message in told), (line, said, told)
    assert len(told) == 8


def test_an_output_must_be_named_where_a_stage_makes_several(problems, text):
    (problem,) = problems(text.replace("first/params", "first"))

    assert problem.line == 12
    assert "stage 'first' makes curve, params; say which, as first/NAME" in problem.message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, ["--x", "5"]),
        (1.0e-05, ["--x", "1e-05"]),
        (-1.0e-05, ["--x=-1e-05"]),
        ("a b; rm -rf $HOME", ["--x", "a b; rm -rf $HOME"]),
        ("-v", ["--x=-v"]),
        (True, ["--x"]),
        (False, ["--no-x"]),
        (None, []),
        ([1, 2], ["--x", "1", "2"]),
        ([True], ["--x", "true"]),
        ([], ["--x"]),
    ],
)
def test_an_argument_becomes_words_of_the_command_line(value, expected):
    config = Config(path="work.py", arguments={"x": value})

    assert words(config, {}, {}) == expected
