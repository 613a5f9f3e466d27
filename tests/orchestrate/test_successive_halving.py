"""Which trainings continue after a rung: a table worked out by hand from the published rule."""

import pytest

from redco_flow.orchestrate.sweep.successive_halving import Measurement, SuccessiveHalving, decide

# Values at the first rung in the order of time, with a reduction factor of 3: whether each is among
# the best max(1, n // 3) of the n values up to it, and the worst value that is.
FIRST_RUNG = [
    ("a", 5.0, True, 5.0),
    ("b", 7.0, False, 5.0),
    ("c", 4.0, True, 4.0),
    ("d", 6.0, False, 4.0),
    ("e", 3.0, True, 3.0),
    ("f", 3.5, True, 3.5),  # the second of 6
    ("g", None, False, 3.5),
    ("h", 3.8, False, 3.5),
    ("i", 3.8, True, 3.8),  # as good as the third of 9
]
SECOND_RUNG = [
    ("a", 2.0, True, 2.0), ("c", 1.0, True, 1.0), ("e", 1.5, False, 1.0), ("f", 0.5, True, 0.5),
]  # fmt: skip
HALVING = SuccessiveHalving("train", "val/loss", "min", min_steps=10, reduction_factor=3)


def measured(rows, step, hour, sign=1):
    return [
        Measurement(f"{hour}:{number:02}", run, step, 1, None if value is None else sign * value)
        for number, (run, value, *_) in enumerate(rows)
    ]


def verdicts(decisions):
    return [(one.run, one.value, not one.is_stopped, one.cutoff) for one in decisions]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_a_training_continues_while_it_is_among_the_best_that_have_reached_a_rung(mode, sign):
    halving = SuccessiveHalving("train", "val/loss", mode, min_steps=10, reduction_factor=3)
    early = [Measurement("00:00", run, 9, 1, 99.0) for run in "abcdefghi"]
    found = [*early, *measured(FIRST_RUNG, 10, 1, sign), *measured(SECOND_RUNG, 30, 2, sign)]

    decisions = list(decide(halving, reversed(found), []))

    expected = [
        (run, value and sign * value, continues, sign * cutoff)
        for run, value, continues, cutoff in FIRST_RUNG + SECOND_RUNG
    ]
    assert verdicts(decisions) == expected
    assert [one.rung for one in decisions] == [0] * 9 + [1] * 4
    assert "not among the best 2 of 8 at rung 0 (cutoff" in decisions[7].reason


def test_decisions_are_the_same_when_they_are_continued_from_those_recorded():
    found = [*measured(FIRST_RUNG, 10, 1), *measured(SECOND_RUNG, 30, 2)]
    at_once = list(decide(HALVING, found, []))

    continued = [*at_once[:5], *decide(HALVING, found, at_once[:5])]

    assert continued == at_once


def test_a_value_past_several_rungs_counts_at_each_and_a_stopped_training_is_not_judged_again():
    found = [
        Measurement("1", "a", 10, 1, 2.0),
        Measurement("2", "a", 30, 1, 1.0),
        Measurement("3", "b", 35, 1, 1.5),  # its first evaluation: better at rung 0, not at rung 1
        Measurement("4", "b", 90, 1, 0.1),
    ]

    decisions = [(one.run, one.rung, one.is_stopped) for one in decide(HALVING, found, [])]

    assert decisions == [("a", 0, False), ("a", 1, False), ("b", 0, False), ("b", 1, True)]
