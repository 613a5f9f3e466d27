"""Which points `--sweep` means, and what is told where it means none."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.overrides import read_points


def test_the_points_are_every_combination_and_the_last_setting_changes_fastest():
    points = read_points(["stages.train.learning_rate=1e-4,3e-4", "seed=1,2"])

    assert points == [
        ("stages.train.learning_rate=1e-4", "seed=1"),
        ("stages.train.learning_rate=1e-4", "seed=2"),
        ("stages.train.learning_rate=3e-4", "seed=1"),
        ("stages.train.learning_rate=3e-4", "seed=2"),
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1", ["1"]),
        ("a='x,y',z", ["'x,y'", "z"]),
        ("a=[1,2],[3]", ["[1,2]", "[3]"]),
        ('a={b: [1,2], c: "]"},null', ['{b: [1,2], c: "]"}', "null"]),
        ("a=don't,can't", ["don't", "can't"]),
        ("prefix=say: ,", ["say: ", ""]),
    ],
)
def test_a_comma_within_quotes_or_brackets_belongs_to_the_value(text, values):
    key = text.partition("=")[0]

    assert read_points([text]) == [(f"{key}={value}",) for value in values]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate", "is not KEY=VALUE,VALUE|neither key=value"),
        ("a=1,1", "has the value 1 twice"),
        ("a=0.1,1e-1", "has the value 0.1 twice"),
        ("a=[1,2", "the value of"),
        ("=1,2", "neither key=value"),
    ],
)
def test_what_is_no_setting_with_different_values_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read_points([text])


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        read_points(["a=1,1", "b", "c=1", "c=2"])

    said = str(caught.value)
    assert "'a=1,1' has the value 1 twice" in said
    assert "'b'" in said
    assert "'c' is given 2 times" in said
