"""The lines that a training and a prediction log, and when."""

import itertools
import logging
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Predictor, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.progress import LineInterval, RowLines, TrainingLines, duration

STEPS_PER_EPOCH = 4


def collate(examples):
    return {"x": np.array(examples, np.float32)}


def squares(params, batch, rngs, is_training):
    errors = (params["a"] * batch["x"] - 1) ** 2
    return errors, jnp.ones_like(errors)


def fit(folder, num_epochs):
    trainer = Trainer(
        Deployer(),
        collate_fn=collate,
        loss_fn=squares,
        params={"a": jnp.zeros(())},
        optimizer=optax.sgd(0.1),
        global_batch_size=8,
        lr_schedule=lambda step: 0.1,
    )
    examples = list(np.linspace(0, 1, 8 * STEPS_PER_EPOCH))
    with Checkpointer(folder, keep_last=2) as checkpointer:
        trainer.fit(
            examples,
            num_epochs=num_epochs,
            eval_examples=examples[:8],
            checkpointer=checkpointer,
            log_every_steps=1,
        )


@pytest.fixture
def lines(caplog):
    """What the engine's progress logger said so far."""
    caplog.set_level(logging.INFO, logger="redco_flow.engine.progress")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "redco_flow.engine.progress"
    ]


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("minutes", "fewest", "most"), [(0.5, 3, 6), (1.5, 12, 20), (10, 40, 60), (600, 550, 720)]
)
def test_short_and_long_trainings_give_a_sensible_number_of_lines(minutes, fewest, most):
    clock = Clock()
    interval, num_lines = LineInterval(clock), 0

    for clock.now in np.arange(0, 60 * minutes, 0.1):
        num_lines += interval.is_due()

    assert fewest <= num_lines <= most


def test_a_fit_logs_its_first_and_last_step_evaluations_and_checkpoints(tmp_path, lines):
    fit(tmp_path, num_epochs=2)

    found = lines()
    assert re.fullmatch(r"step 1/8 · loss 1 · learning_rate 0\.1", found[0])
    last_step = r"step 8/8 · loss [\d.]+ · learning_rate 0\.1 · [\d,]+ tokens/s"
    assert any(re.fullmatch(last_step, line) for line in found)
    for step in (4, 8):
        assert any(re.match(rf"step {step}/8 · val/eval_loss [\d.]+ · took", x) for x in found)
        assert f"step {step}/8 · checkpoint saved, to be committed" in found
        assert f"step {step}/8 · checkpoint committed" in found


def test_a_fit_that_goes_on_logs_what_it_restored(tmp_path, lines):
    fit(tmp_path, num_epochs=1)
    num_lines = len(lines())

    fit(tmp_path, num_epochs=2)

    assert lines()[num_lines] == "step 4/8 · checkpoint restored; training resumes from it"
    assert lines()[num_lines + 1].startswith("step 5/8 · loss ")


def test_a_step_s_line_tells_the_mean_since_the_last_line_the_rate_and_the_time_left(lines):
    clock = Clock()
    told = TrainingLines(100, clock)
    losses = itertools.cycle([2.0, 4.0])

    for step in range(1, 12):
        clock.now = float(step)
        found = {"total": 50 * next(losses), "weight": 50}
        told.hear_step(step, found, counts=True, seconds=None if step == 1 else 1.0)

    # 5 s between lines, one step a second, 50 tokens a step; the first is compiled, not timed.
    assert lines() == [
        "step 1/100 · loss 2",
        "step 5/100 · loss 3 · 50 tokens/s · 1 min 35 s left",
        "step 10/100 · loss 3.2 · 50 tokens/s · 1 min 30 s left",
    ]


def test_skipped_steps_give_no_loss(lines):
    told = TrainingLines(1)

    told.hear_step(1, {"total": np.nan, "weight": 50}, counts=False, seconds=None)

    assert lines() == ["step 1/1 · no loss: all skipped"]


def test_a_prediction_logs_how_many_rows_are_done(lines):
    predictor = Predictor(
        Deployer(),
        collate_fn=collate,
        pred_fn=lambda params, batch, rngs: params["a"] * batch["x"],
        batch_size=8,
    )

    predictor.predict([1.0, 2.0, 3.0], {"a": jnp.ones(())})

    (line,) = lines()
    assert re.fullmatch(r"predicted 3/3 rows · [\d.,e+]+ rows/s", line)


def test_rows_that_take_long_are_told_with_the_time_left(lines):
    clock = Clock()
    told = RowLines("scored", 1000, clock=clock)

    for done, clock.now in [(100, 2.0), (300, 6.0), (400, 8.0)]:
        told.hear_rows(done)

    assert lines() == ["scored 300/1,000 rows · 50 rows/s · 14 s left"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1.24, "1.2 s"), (59.4, "59 s"), (100.4, "1 min 40 s"), (7260, "2 h 01 min")],
)
def test_a_duration_is_shown_as_a_person_reads_it(seconds, shown):
    assert duration(seconds) == shown
