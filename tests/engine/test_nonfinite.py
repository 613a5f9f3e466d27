"""Losses and gradients that are not finite, skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.data.order import epoch_order
from redco_flow.engine.errors import NonFiniteLoss
from redco_flow.engine.step.optimizers import make_schedule

BATCH = 4
SEED = 3


def loss(params, batch, rngs, is_training):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2, jnp.ones(len(batch["y"]))


def collate(rows):
    return {
        "x": np.stack([row["x"] for row in rows]),
        "y": np.array([row["y"] for row in rows], np.float32),
    }


def examples(bad_steps=(), count=24):
    """Six steps an epoch; one example of each bad step has an infinite target."""
    rng = np.random.default_rng(0)
    found = [{"x": rng.normal(size=2).astype(np.float32), "y": 0.5} for _ in range(count)]
    order = epoch_order(count, SEED, 0)
    for step in bad_steps:
        found[order[(step - 1) * BATCH + 1]]["y"] = np.inf
    return found


SCHEDULE = make_schedule("linear", 0.1, total_steps=6)


def trainer_of(loss_fn=loss, **options):
    options = {"optimizer": optax.adam(SCHEDULE), "on_nonfinite": "skip"} | options
    return Trainer(
        Deployer(devices=jax.devices()[:2]),
        collate_fn=collate,
        loss_fn=loss_fn,
        params={"w": np.array([1.0, -1.0], np.float32)},
        lr_schedule=SCHEDULE,
        global_batch_size=BATCH,
        seed=SEED,
        **options,
    )


class Logs(Callback):
    def __init__(self):
        self.records = []

    def on_log(self, record):
        self.records.append(record)


def by_hand(rows, skipped):
    """The same steps without those that are skipped, by bare JAX."""
    optimizer, params = optax.adam(SCHEDULE), {"w": jnp.array([1.0, -1.0])}
    state = optimizer.init(params)
    order = epoch_order(len(rows), SEED, 0)
    for step in range(1, 7):
        if step in skipped:
            continue
        batch = collate([rows[i] for i in order[(step - 1) * BATCH : step * BATCH]])
        gradients = jax.grad(lambda p, b: loss(p, b, None, True)[0].mean())(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.slow
def test_a_skipped_step_leaves_parameters_and_optimizer_state_and_is_counted():
    """Also the schedule's count, and the learning rate that is logged."""
    logs, trainer = Logs(), trainer_of()

    trainer.fit(examples([2, 5]), num_epochs=1, callbacks=[logs], log_every_steps=1)

    params, opt_state = by_hand(examples([2, 5]), {2, 5})
    for found, expected in zip(
        jax.tree.leaves((trainer.state["params"], trainer.state["opt_state"])),
        jax.tree.leaves((params, opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert (int(trainer.state["step"]), int(trainer.state["skipped"])) == (6, 2)
    assert [r["step"] for r in logs.records] == [1, 3, 4, 6]
    assert [r["num_skipped"] for r in logs.records] == [0, 1, 1, 2]
    rates = [float(SCHEDULE(count)) for count in range(4)]
    np.testing.assert_allclose([r["learning_rate"] for r in logs.records], rates, rtol=1e-6)


def test_a_record_over_skipped_steps_is_the_mean_of_the_others():
    each, together = Logs(), Logs()
    trainer_of().fit(examples([5]), num_epochs=1, callbacks=[each], log_every_steps=1)

    trainer_of().fit(examples([5]), num_epochs=1, callbacks=[together], log_every_steps=3)

    losses = {r["step"]: r["loss"] for r in each.records}
    expected = [np.mean([losses[s] for s in steps]) for steps in ([1, 2, 3], [4, 6])]
    np.testing.assert_allclose([r["loss"] for r in together.records], expected, rtol=1e-6)
    assert np.isfinite([r["grad_norm"] for r in together.records]).all()


def test_too_many_skipped_steps_in_a_row_stop_the_training():
    with pytest.raises(NonFiniteLoss, match="2 steps in a row, up to step 5") as caught:
        trainer_of(max_skipped=2).fit(examples([2, 4, 5]), num_epochs=1)

    assert caught.value.step == 5


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is():
    def rooted(params, batch, rngs, is_training):
        # The root's slope at 0 is infinite.
        total, weights = loss(params, batch | {"y": jnp.zeros(BATCH)}, rngs, is_training)
        return total + jnp.where(batch["y"] > 9, jnp.sqrt(0 * params["w"][0]), 0), weights

    trainer = trainer_of(rooted)

    trainer.fit(examples([2]), num_epochs=1)

    assert int(trainer.state["skipped"]) == 6
    np.testing.assert_array_equal(trainer.state["params"]["w"], [1, -1])


def test_an_update_that_is_not_finite_is_skipped_though_its_gradient_is():
    # At step 1 the rate is 0.1 times 3e38 times a gradient above 100.
    huge = optax.sgd(lambda count: jnp.where(count == 0, 3e38, 1e-3))
    trainer = trainer_of(lambda p, b, r, t: (1e3 * loss(p, b, r, t)[0], jnp.ones(BATCH)),
                         optimizer=huge)  # fmt: skip

    trainer.fit(examples(), num_epochs=1)

    assert int(trainer.state["skipped"]) == 6
    np.testing.assert_array_equal(trainer.state["params"]["w"], [1, -1])


def test_no_checkpoint_holds_what_was_not_finite(tmp_path):
    """Fault 25. The newest and the best are of finite parameters, and resuming goes on counting."""
    with Checkpointer(tmp_path, keep_last=10, keep_best={"eval_loss": "min"}) as checkpointer:
        trainer_of().fit(
            examples([2]),
            num_epochs=1,
            eval_examples=examples(count=5),
            eval_every_steps=2,
            checkpointer=checkpointer,
        )
        other = trainer_of()
        for step in checkpointer.steps():
            other.restore(checkpointer, step)
            assert np.isfinite(other.state["params"]["w"]).all()
            assert int(other.state["skipped"]) == 1
        with pytest.raises(NonFiniteLoss):
            trainer_of(max_skipped=1).fit(examples([2]), num_epochs=2, checkpointer=checkpointer)
        assert checkpointer.latest() == 6
        assert checkpointer.best("eval_loss") in (2, 4, 6)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"on_nonfinite='ignore' is unknown; allowed: stop, skip"):
        trainer_of(on_nonfinite="ignore")
    with pytest.raises(ValueError, match="max_skipped=0 must be a positive"):
        trainer_of(max_skipped=0)
