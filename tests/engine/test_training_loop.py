"""What is due after which step."""

import pytest

from redco_flow.engine.data.order import BatchSampler
from redco_flow.engine.training_loop import FitSchedule


def schedule(**options):
    """Two epochs of four steps."""
    defaults = {"num_epochs": 2, "log_every_steps": 3}
    rest = {"eval_every_steps": None, "save_every_steps": None}
    return FitSchedule(BatchSampler(30, 8, seed=0), **(defaults | rest | options))


def due(method):
    return [step for step in range(1, 9) if method(step)]


@pytest.mark.parametrize(("every", "steps"), [(None, [4, 8]), (3, [3, 6, 8]), (8, [8]), (100, [8])])
def test_an_evaluation_is_due_every_so_many_steps_or_per_epoch_and_at_the_end(every, steps):
    assert due(schedule(eval_every_steps=every).evaluates_after) == steps


@pytest.mark.parametrize(("every", "steps"), [(None, [4, 8]), (3, [3, 4, 6, 8])])
def test_a_checkpoint_is_due_at_each_epochs_end_and_every_so_many_steps(every, steps):
    assert due(schedule(save_every_steps=every).saves_after) == steps


def test_epochs_whose_end_is_not_saved_can_stand_between_checkpoints():
    assert due(schedule(save_every_epochs=2, num_epochs=2).saves_after) == [8]
    assert due(schedule(save_every_epochs=3, num_epochs=2, save_every_steps=3).saves_after) == [
        3, 6, 8,
    ]  # fmt: skip


def test_intervals_are_counted_from_the_first_step_on_these_data():
    """After 3 steps of another training, epochs end after steps 7 and 11."""
    begun = schedule(first_step=3, eval_every_steps=4, save_every_steps=2)

    assert [step for step in range(4, 12) if begun.evaluates_after(step)] == [7, 11]
    assert [step for step in range(4, 12) if begun.saves_after(step)] == [5, 7, 9, 11]


def test_steps_in_place_of_epochs_end_a_training_with_an_evaluation_and_a_checkpoint():
    within = schedule(num_epochs=None, max_steps=6)

    assert within.total_steps == 6
    assert due(within.evaluates_after)[:2] == [4, 6]
    assert due(within.saves_after)[:2] == [4, 6]


def test_the_last_step_is_logged():
    assert due(schedule().logs_after) == [3, 6, 8]
    assert schedule().total_steps == 8
    assert schedule().epoch(6) == 1.5


@pytest.mark.parametrize(
    "option",
    ["num_epochs", "log_every_steps", "eval_every_steps", "save_every_steps", "save_every_epochs"],
)
def test_a_schedule_that_is_not_positive_is_refused(option):
    with pytest.raises(ValueError, match=f"{option}=0 must be a positive whole number"):
        schedule(**{option: 0})
