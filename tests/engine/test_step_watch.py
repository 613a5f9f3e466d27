"""Slow steps are told of, once each."""

import logging

from redco_flow.engine.watching import StepWatch


def test_a_step_that_takes_longer_than_so_many_medians_is_one_warning_with_its_step(caplog):
    watch = StepWatch(5.0)

    with caplog.at_level(logging.WARNING):
        found = [step for step in range(1, 31) if watch.hear(step, 6.0 if step == 20 else 1.0)]

    assert found == [20]
    assert len(caplog.records) == 1
    assert "step 20 took 6 s, 6.0 times the median of 1 s" in caplog.text


def test_the_first_steps_are_compared_with_nothing():
    watch = StepWatch(5.0)

    assert not any(watch.hear(step, 100.0 if step == 1 else 1.0) for step in range(1, 9))


def test_a_lasting_slowdown_becomes_the_measure():
    watch = StepWatch(5.0)

    slow = [step for step in range(1, 200) if watch.hear(step, 1.0 if step < 100 else 10.0)]

    # Half of the 64 steps that are remembered.
    assert slow == list(range(100, 132))


def test_watching_can_be_turned_off():
    watch = StepWatch(None)

    assert not any(watch.hear(step, 1000.0**step) for step in range(1, 30))
