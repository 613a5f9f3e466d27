"""Data paths of several files: patterns, lists, what the record and the settings say of them."""

from __future__ import annotations

import pytest

from redco_flow.spec.data_files import names_of
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.yaml import read_yaml, write_yaml

PIPELINE = """\
name: logs
recipe: text_to_text
data:
  tokenizer: {train: {vocab_size: 300}}
  train: logs/*.jsonl
stages:
  preprocess: {}
"""


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Write data files of one row; the test's folder is the current one."""
    monkeypatch.chdir(tmp_path)

    def put(*names: str) -> None:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"source": "a", "target": "b"}\n')

    return put


def files_of(resolved):
    return resolved.stages["preprocess"].config.data.train


def test_a_pattern_is_the_files_that_match_in_the_order_of_their_paths(load, put, tmp_path):
    put("logs/b.jsonl", "logs/a.jsonl", "logs/c.jsonl", "logs/.hidden.jsonl", "logs/notes.txt")

    resolved = load(PIPELINE)

    assert files_of(resolved) == [str(tmp_path / "logs" / f"{name}.jsonl") for name in "abc"]
    assert resolved.stages["preprocess"].settings["data"]["train"] == [
        f"{name}.jsonl" for name in "abc"
    ]
    assert resolved.notes == ("'data.train': logs/*.jsonl is 3 files: a.jsonl, b.jsonl, c.jsonl",)


def test_what_is_recorded_names_the_files_so_that_a_later_one_changes_nothing(load, put, write):
    put("logs/a.jsonl", "logs/b.jsonl")
    resolved = load(PIPELINE)
    record = write(write_yaml(resolved.document), "resolved.yaml")
    put("logs/c.jsonl")

    again = load_pipeline(record)

    assert files_of(again) == files_of(resolved)
    assert again.stages["preprocess"].settings == resolved.stages["preprocess"].settings
    assert read_yaml(record.read_text(), "r").values["data"]["train"] == files_of(resolved)


def test_a_pattern_that_matches_one_file_is_that_file(load, put):
    put("logs/a.jsonl")

    by_pattern, by_name = load(PIPELINE), load(PIPELINE, "data.train=logs/a.jsonl")

    assert by_pattern.stages["preprocess"].settings == by_name.stages["preprocess"].settings


def test_patterns_stand_on_the_command_line_in_lists_and_in_stages_too(load, put, tmp_path):
    put("x/1/a.jsonl", "x/2/a.jsonl", "z.jsonl")
    in_stage = PIPELINE.replace("preprocess: {}", "preprocess: {data: {train: x/**/*.jsonl}}")
    both = [str(tmp_path / "x" / day / "a.jsonl") for day in "12"]

    assert files_of(load(PIPELINE, "data.train=x/*/a.jsonl")) == both
    assert files_of(load(PIPELINE, "data.train=[z.jsonl, x/**/*.jsonl]")) == [
        str(tmp_path / "z.jsonl"),
        *both,
    ]
    resolved = load(in_stage, "data.train=z.jsonl")
    assert files_of(resolved) == both
    assert resolved.stages["preprocess"].settings["data"]["train"] == ["1/a.jsonl", "2/a.jsonl"]


def test_a_name_with_brackets_is_its_own_file(load, put, tmp_path):
    put("logs/a[1].jsonl", "logs/a1.jsonl")

    assert files_of(load(PIPELINE, "data.train=logs/a[1].jsonl")) == str(
        tmp_path / "logs" / "a[1].jsonl"
    )


def test_a_pattern_that_matches_nothing_is_told_with_its_place(problems, put, tmp_path):
    put("other.jsonl")

    [problem] = problems(PIPELINE)

    assert (problem.line, problem.message) == (
        5,
        f"'data.train': no file matches '{tmp_path / 'logs' / '*.jsonl'}'",
    )


def test_a_pattern_that_takes_a_file_of_another_split_is_told(problems, put):
    put("logs/a.jsonl", "logs/test.jsonl")

    [problem] = problems(PIPELINE, "data.test=logs/test.jsonl")

    assert problem.line == 5
    assert "test.jsonl, which is of 'data.test' too" in problem.message


def test_files_are_named_below_the_folder_that_all_are_in():
    assert names_of(["/d/x.csv"]) == ["x.csv"]
    assert names_of(["/d/1/x.csv", "/d/2/x.csv"]) == ["1/x.csv", "2/x.csv"]
    assert names_of([]) == []
