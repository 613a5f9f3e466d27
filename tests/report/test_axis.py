import math

import pytest

from redco_flow.report.chart import make_axis


@pytest.mark.parametrize(
    "values", [[0.0, 1.0], [3.2, 71.4], [-5.0, 5.0], [1e-9, 9e-9], [1e5, 9e8], [0.61, 0.64]]
)
def test_ticks_are_round_numbers_inside_the_axis(values):
    axis = make_axis(values, num_ticks=5)

    assert 2 <= len(axis.ticks) <= 8
    assert axis.low <= min(values)
    assert axis.high >= max(values)
    step = axis.ticks[1] - axis.ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-6
    assert len(set(axis.labels)) == len(axis.labels)


def test_the_ends_of_an_axis_are_where_its_extremes_lie():
    axis = make_axis([10, 300], is_tight=True, are_counts=True)

    assert [axis.fraction(10), axis.fraction(155), axis.fraction(300)] == [0.0, 0.5, 1.0]


def test_an_axis_is_logarithmic_only_where_values_span_a_factor_of_ten():
    assert not make_axis([1.0, 9.9], may_be_log=True).is_log
    assert make_axis([1.0, 10.0], may_be_log=True).is_log
    assert not make_axis([0.0, 10.0], may_be_log=True).is_log
    assert not make_axis([1.0, 10.0]).is_log


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis():
    axis = make_axis([0.1, 10.0], may_be_log=True)

    below, above = axis.fraction(1.0) - axis.fraction(0.1), axis.fraction(10) - axis.fraction(1)
    assert below == pytest.approx(above, abs=1e-12)
    assert axis.labels == ("0.1", "0.2", "0.5", "1", "2", "5", "10")


def test_many_decades_get_few_ticks():
    axis = make_axis([1e-12, 1e6], may_be_log=True)

    assert 3 <= len(axis.ticks) <= 10
    assert "1e-10" in axis.labels


@pytest.mark.parametrize("values", [[], [0.0], [7.0, 7.0], [-2.0]])
def test_equal_values_and_none_at_all_make_an_axis_too(values):
    for from_zero in (False, True):
        axis = make_axis(values, from_zero=from_zero)

        assert axis.low < axis.high
        assert all(0 <= axis.fraction(value) <= 1 for value in values)


def test_an_axis_of_counts_has_whole_ticks():
    axis = make_axis([1, 2], are_counts=True, is_tight=True)

    assert axis.labels == ("1", "2")


def test_thousands_are_told_in_short():
    axis = make_axis([0, 40_000], is_tight=True)

    assert axis.labels == ("0", "10k", "20k", "30k", "40k")


def test_small_ticks_are_told_as_powers_of_ten():
    axis = make_axis([0.0, 4e-4], from_zero=True)

    assert axis.labels[1:3] == ("1e-4", "2e-4")


def test_huge_ticks_are_told_as_powers_of_ten():
    axis = make_axis([0.0, 2e29], from_zero=True)

    assert axis.labels == ("0", "5e28", "1e29", "1.5e29", "2e29")
