"""A training ends when a score no longer improves, or after so many steps, resumed or not."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.errors import TrainingStopped
from redco_flow.engine.watching import EarlyStopping

EXAMPLES = [{"x": float(x), "y": 3.0 * x} for x in range(1, 9)]
# By evaluation: the best is the third one, and an equal one is no better.
SCORES = [5.0, 4.0, 2.0, 3.0, 2.0, 2.5, 1.0, 0.5]
EVERY = 3


def trainer():
    def loss(params, batch, rngs, is_training):
        return (params["w"] * batch["x"] - batch["y"]) ** 2, jnp.ones(len(batch["y"]))

    return Trainer(
        Deployer(),
        collate_fn=lambda rows: {key: np.array([row[key] for row in rows]) for key in rows[0]},
        loss_fn=loss,
        params={"w": np.float32(0.0)},
        optimizer=optax.sgd(1e-3),
        global_batch_size=8,
    )


def fit(one, checkpointer=None, scores=SCORES, patience=3, mode="min", **options):
    return one.fit(
        EXAMPLES,
        max_steps=EVERY * len(scores),
        eval_fn=lambda _, step: {"score": scores[step // EVERY - 1]},
        eval_every_steps=EVERY,
        checkpointer=checkpointer,
        early_stopping=EarlyStopping("score", mode, patience),
        **options,
    )


def test_a_training_ends_at_the_evaluation_that_ends_the_patience():
    one = trainer()

    result = fit(one, log_every_steps=100)

    assert (result.step, one.step) == (6 * EVERY, 6 * EVERY)
    assert result.metrics == {"score": 2.5}
    assert result.loss is not None  # of the steps that no record was due for


def test_a_larger_score_can_be_the_better_one():
    assert fit(trainer(), scores=[-score for score in SCORES], mode="max").step == 6 * EVERY
    assert fit(trainer(), mode="max").step == 4 * EVERY


def test_a_score_that_improves_often_enough_trains_to_the_end():
    assert fit(trainer(), patience=4).step == len(SCORES) * EVERY


class Records(Callback):
    """The steps of the log records."""

    def __init__(self):
        self.steps = []

    def on_log(self, record):
        self.steps.append(record["step"])


@pytest.mark.slow
def test_a_resumed_training_ends_at_the_same_step(tmp_path):
    """What was seen before the stop counts: five evaluations, and of those two were no better."""
    whole, resumed, polls, stop_after = trainer(), trainer(), iter(range(1, 100)), 5 * EVERY
    fit(whole)

    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TrainingStopped):
        fit(trainer(), checkpointer, should_stop=lambda: next(polls) >= stop_after)
    with Checkpointer(tmp_path) as checkpointer:
        result = fit(resumed, checkpointer)

    assert (result.start_step, result.step) == (stop_after, 6 * EVERY)
    assert float(resumed.state["params"]["w"]) == float(whole.state["params"]["w"])


@pytest.mark.slow
def test_a_training_that_ended_early_has_ended(tmp_path):
    """Killed between its last checkpoint and what comes after: the next attempt does no step."""
    with Checkpointer(tmp_path) as checkpointer:
        fit(trainer(), checkpointer)
    records = Records()
    with Checkpointer(tmp_path) as checkpointer:
        result = fit(trainer(), checkpointer, callbacks=[records])

    assert (result.start_step, result.step) == (6 * EVERY, 6 * EVERY)
    assert result.metrics == {"score": 2.5}
    assert records.steps == []


def test_a_metric_that_is_not_measured_is_told():
    with pytest.raises(ValueError, match=r"watches 'score', and the evaluation .* gave loss"):
        trainer().fit(
            EXAMPLES,
            num_epochs=1,
            eval_fn=lambda _, __: {"loss": 1.0},
            early_stopping=EarlyStopping("score", "min", 1),
        )


def test_the_number_of_steps_ends_a_training_within_an_epoch():
    records = Records()
    more = [*EXAMPLES, *EXAMPLES]  # two steps an epoch

    result = trainer().fit(
        more, max_steps=5, eval_fn=lambda _, step: {"at": step}, callbacks=[records]
    )

    assert result.step == 5
    assert result.metrics == {"at": 5}  # the end is evaluated, and logged
    assert records.steps[-1] == 5


@pytest.mark.parametrize("lengths", [{}, {"num_epochs": 1, "max_steps": 1}])
def test_a_training_has_one_length(lengths):
    with pytest.raises(ValueError, match="give either num_epochs or max_steps"):
        trainer().fit(EXAMPLES, **lengths)
