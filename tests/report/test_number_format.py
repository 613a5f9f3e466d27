import pytest

from redco_flow.report.numbers import (
    duration,
    moment,
    number,
    plural,
    score,
    seconds_between,
    size,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1234, "1,234"),
        (1234.5678, "1,235"),
        (12.3456, "12.35"),
        (0.012345, "0.01235"),
        (0.00005, "5e-5"),
        (0.000123456, "1.235e-4"),
        (2.5e9, "2.5e9"),
        (-3.5, "-3.500"),
        (float("nan"), "nan"),
        ("text", "text"),
        (True, "True"),
    ],
)
def test_a_number_has_four_significant_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(41.0, "41.00"), (0.0, "0.00"), (0.1234, "0.1234"), (12345.6, "12,346")]
)
def test_scores_of_a_column_have_equal_decimals(value, text):
    assert score(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.42, "0.4 s"), (42.4, "42 s"), (83, "1 min 23 s"), (7260, "2 h 01 min")],
)
def test_a_duration_is_told_in_its_own_units(seconds, text):
    assert duration(seconds).replace("\u2009", " ") == text


def test_a_size_is_told_in_its_own_unit():
    assert [size(one).replace("\u2009", " ") for one in (12, 1536, 5 << 40)] == [
        "12 B",
        "1.5 KiB",
        "5.0 TiB",
    ]


def test_a_moment_is_told_in_utc():
    assert moment("2026-01-31T13:00:00.123+01:00") == "2026-01-31 12:00:00 UTC"
    assert moment("yesterday") == "yesterday"
    assert moment(None) == "–"


def test_a_time_that_is_missing_gives_no_duration():
    start = "2026-01-31T12:00:00.000+00:00"

    assert seconds_between(start, "2026-01-31T12:01:00.000+00:00") == 60
    assert seconds_between(start, None) is None
    assert seconds_between(start, "2026-01-31T12:01:00") is None  # without a zone: not comparable


def test_one_thing_has_no_plural():
    assert [plural(1, "run"), plural(1200, "run")] == ["1 run", "1,200 runs"]
