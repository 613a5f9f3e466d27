"""The training loop while its steps are being computed."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.data.order import epoch_order

BATCH, NUM_STEPS, WIDTH = 4, 24, 256


def loss(params, batch, rngs, is_training):
    """As many products as the batch says, and then something to learn."""
    square = jnp.full((WIDTH, WIDTH), 1e-3) * batch["x"][0]
    last = jax.lax.fori_loop(0, batch["turns"].max(), lambda _, x: jnp.tanh(x @ square), square)
    return (params + jax.lax.stop_gradient(last).sum()) * batch["x"], jnp.ones(BATCH)


def collate(rows):
    return {
        "x": np.array([row["x"] for row in rows], np.float32),
        "turns": np.array([row["turns"] for row in rows], np.int32),
    }


def trainer_on(num_devices):
    return Trainer(
        Deployer(devices=jax.devices()[:num_devices]),
        collate_fn=collate,
        loss_fn=loss,
        params=jnp.zeros(()),
        optimizer=optax.sgd(0.1),
        global_batch_size=BATCH,
        seed=0,
    )


@pytest.mark.slow
def test_the_loop_goes_on_while_a_step_is_being_computed():
    examples = [{"x": 1.0, "turns": 50}] * (BATCH * NUM_STEPS)
    trainer = trainer_on(2)
    is_computing = []

    def after_a_steps_dispatch():
        is_computing.append(not trainer.state["params"].is_ready())
        return False

    trainer.fit(examples, num_epochs=1, should_stop=after_a_steps_dispatch, log_every_steps=1)

    assert len(is_computing) == NUM_STEPS
    # A busy machine may finish a few before this process has its turn again.
    assert sum(is_computing) >= 3 * NUM_STEPS // 4


@pytest.mark.slow
def test_a_slow_step_of_a_training_is_told_of_with_its_number(caplog):
    examples = [{"x": 1.0, "turns": 1} for _ in range(BATCH * NUM_STEPS)]
    examples[epoch_order(len(examples), 0, 0)[19 * BATCH]]["turns"] = 1000

    with caplog.at_level(logging.WARNING):
        trainer_on(1).fit(examples, num_epochs=1)

    assert "step 20 took" in caplog.text
