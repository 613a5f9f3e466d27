"""Which points `--sweep` means, and what is told where it means none."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.sweep_points import Samples, ends_of, read_points, read_space


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


def test_the_ends_of_a_space_have_all_values_and_each_change_of_one_value_alone():
    space = read_space(["a=1,2,3", "b=uniform(0, 1)"])

    first, last = ("a=1", "b=0"), ("a=3", "b=1")
    assert ends_of(space) == [first, ("a=2", "b=0"), ("a=3", "b=0"), ("a=1", "b=1"), last]


def test_draws_are_within_their_bounds_repeat_with_their_seed_and_are_multiplied_with_the_grid():
    texts = ["lr=loguniform(1e-5, 1e-3)", "dropout=uniform(0,0.3)", "seed=1,2", "n=randint(2, 4)"]
    points = read_points(texts, Samples(200, seed=7))
    values = [[float(one.partition("=")[2]) for one in point] for point in points]

    assert [one.partition("=")[0] for one in points[0]] == ["lr", "dropout", "n", "seed"]
    assert len(points) == 400
    assert all(1e-5 <= lr <= 1e-3 and 0 <= dropout <= 0.3 for lr, dropout, *_ in values)
    assert sum(lr < 1e-4 for lr, *_ in values) == pytest.approx(200, abs=40)  # half of the decades
    assert {n for _, _, n, _ in values} == {2, 3}
    assert read_points(texts, Samples(3, seed=7)) == points[:6]
    assert read_points(texts, Samples(3, seed=8)) != points[:6]
    said = []
    assert read_points(["n=randint(0, 2)"], Samples(50), log=said.append) == [("n=1",), ("n=0",)]
    assert said == ["48 of 50 points repeat others: left out"]


def test_the_rows_of_a_file_are_points_and_an_empty_cell_leaves_a_setting_as_it_is(tmp_path):
    table, lines = tmp_path / "points.csv", tmp_path / "points.jsonl"
    table.write_text('lr, prefix\n1e-4,"a, b"\n3e-4,\n', encoding="utf-8-sig")  # as of Excel
    lines.write_text('{"lr": 1e-4, "betas": [0.9, 0.95]}\n\n{"name": "1e5"}\n{"name": "é😀"}\n')

    assert read_points(["seed=1,2"], file=table) == [
        ("lr=1e-4", "prefix=a, b", "seed=1"),
        ("lr=1e-4", "prefix=a, b", "seed=2"),
        ("lr=3e-4", "seed=1"),
        ("lr=3e-4", "seed=2"),
    ]
    assert read_points([], file=lines) == [
        ("lr=0.0001", "betas=[0.9, 0.95]"),
        ('name="1e5"',),
        ('name="é😀"',),
    ]


@pytest.mark.parametrize(
    ("texts", "number", "rows", "message"),
    [
        (["a=uniform(0,1)"], 0, None, "needs --num-samples"),
        (["a=1,2"], 3, None, "has no distribution"),
        (["a=uniform(1,0)"], 3, None, "the lower one first"),
        (["a=uniform(-inf,1)"], 3, None, "two finite numbers"),
        (["a=loguniform(0,1)"], 3, None, "above 0"),
        (["a=uniform(zero,1)"], 3, None, "could not convert"),
        (["a=normal(0,1)"], 3, None, "uniform, loguniform or randint"),
        (["a=1,2"], 0, "a\n3\n", "'a' is given 2 times"),
        ([], 0, "a,b\n3\n", "line 2 has not as many cells"),
        ([], 0, "a,b, a\n3,4,5\n", "'a' is given twice"),
        ([], 0, "a\n", "has no setting"),
    ],
)
def test_what_gives_no_points_is_refused(texts, number, rows, message, tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(rows or "")
    with pytest.raises(ConfigError, match=message):
        read_points(texts, Samples(number), path if rows else None)
