"""`data.on_bad_row`: words and limits that are allowed, and what is said of the others."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline

TEXT = """
name: limits
model: {name_or_path: any/model}
data:
  train: rows.jsonl
  on_bad_row: %s
stages:
  preprocess: {}
"""
RULE = "must be a share of the rows (1 %, or 0.01) or a number of rows (20)"
WORDS = "'data.on_bad_row' must be one of 'error' or 'skip'"


def load(tmp_path, value):
    path = tmp_path / "limits.yaml"
    (tmp_path / "rows.jsonl").write_text('{"source": "a", "target": "b"}\n')
    path.write_text(TEXT.replace("rows.jsonl", str(tmp_path / "rows.jsonl")) % value)
    return load_pipeline(path)


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("{skip: 1 %}", 3), ("{skip: 0.5%}", 1), ("{skip: 0.01}", 3), ("{skip: 7}", 7)],
)
def test_a_limit_is_a_share_or_a_number_of_rows(tmp_path, value, allowed):
    policy = load(tmp_path, value).stages["preprocess"].config.data.on_bad_row

    assert policy.allowed(300) == allowed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{skip: 1.0}", RULE),
        ("{skip: -1}", RULE),
        ("{skip: 101 %}", RULE),
        ("{skip: few}", RULE),
        ("{skip: true}", RULE),
        ("{limit: 1 %}", "has no key 'limit'"),
        ("1 %", WORDS),
        ("false", WORDS),
        ("[skip]", WORDS),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(tmp_path, value, message):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, value)

    assert message in str(raised.value)
    assert "limits.yaml:6" in str(raised.value)
