"""What is said of a file that does not exist."""

from __future__ import annotations

import os

import pytest

from redco_flow.spec.data_files import missing_file


@pytest.mark.parametrize(
    ("given", "what", "message"),
    [
        ("ticket.csv", "file", "there is no file 'ticket.csv' (searched in 'HERE'); did you mean "
         "'tickets.csv'?"),
        ("dataa/train.csv", "file", "there is no file 'dataa/train.csv' ('HERE' has no folder "
         "'dataa'); did you mean 'data'?"),
        ("data/train.jsonl", "file", "there is no file 'data/train.jsonl' (searched in "
         "'HERE/data')"),
        ("task", "folder", "there is no folder 'task' (searched in 'HERE')"),
        ("a$5.jsonl", "file", "there is no file 'a$5.jsonl' (searched in 'HERE')"),
        ("data", "file", "'data' is a folder, not a file"),
        ("tickets.csv", "folder", "'tickets.csv' is not a folder"),
        ("*.jsonl", "file", "no file matches '*.jsonl'"),
        ("a\0b", "file", "there is no file 'a\\x00b'"),
    ],
)  # fmt: skip
def test_a_missing_path_is_named_with_its_folder_and_the_nearest_name(
    tmp_path, monkeypatch, given, what, message
):
    (tmp_path / "data").mkdir()
    (tmp_path / "tickets.csv").touch()
    monkeypatch.chdir(tmp_path)

    assert missing_file(given, what) == message.replace("HERE", os.fspath(tmp_path))
