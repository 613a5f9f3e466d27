"""The files that `redco-flow predict -o` writes."""

import csv

import pytest

from redco_flow.cli.predict import write_answers
from redco_flow.errors import UsageError

ROWS = [{"text": "caf\u00e9 \ud83d", "probabilities": {"ja": 0.5, "n\u00f6": 0.5}}]


def test_a_text_that_is_no_unicode_is_escaped_in_csv_and_refused_by_parquet(tmp_path):
    write_answers(tmp_path / "a.csv", ROWS)

    (row,) = csv.DictReader((tmp_path / "a.csv").open(encoding="utf-8", newline=""))
    assert row == {"text": "café \\ud83d", "probabilities": '{"ja": 0.5, "nö": 0.5}'}
    with pytest.raises(UsageError, match=r"-o OUT\.jsonl"):
        write_answers(tmp_path / "a.parquet", ROWS)
