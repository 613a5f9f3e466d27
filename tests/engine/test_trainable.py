"""Frozen parameters: they stay, and cost neither gradients nor optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.errors import EngineError
from redco_flow.engine.training_plan import TrainingPlan

WIDTH, UNITS = 8, 32


def params():
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, UNITS), "down": (UNITS, WIDTH), "out": (WIDTH,)}
    return {name: rng.normal(size=s).astype(np.float32) / 4 for name, s in shapes.items()}


def loss(params, batch, rngs, is_training):
    hidden = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return (hidden @ params["out"] - batch["y"]) ** 2, jnp.ones(len(batch["y"]))


def collate(rows):
    return {"x": np.stack([r["x"] for r in rows]), "y": np.float32([r["y"] for r in rows])}


def examples(count=16):
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=WIDTH).astype(np.float32), "y": 1.0} for _ in range(count)]


DECAYED = {"up": True, "down": True, "out": False}
OPTIMIZER = optax.adamw(1e-2, weight_decay=0.5, mask=DECAYED)


def trainer_of(num_model_shards=1, start=None, **options):
    deployer = Deployer(num_model_shards, devices=jax.devices()[:4])
    start = params() if start is None else start
    return Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=start,
        optimizer=OPTIMIZER,
        sharding_rules=deployer.get_sharding_rules(start, loss, collate(examples(2)), None, False),
        global_batch_size=8,
        **options,
    )


@pytest.mark.parametrize(
    ("num_model_shards", "trainable"), [(1, "^(up|out)$"), (4, lambda path, leaf: path != "down")]
)
def test_frozen_parameters_stay_bitwise_and_the_others_train_as_by_hand(
    trainable, num_model_shards
):
    trainer = trainer_of(num_model_shards, trainable=trainable)

    trainer.fit(examples(8), num_epochs=2)

    np.testing.assert_array_equal(trainer.state["params"]["down"], params()["down"])
    trained = {name: jnp.asarray(params()[name]) for name in ("up", "out")}
    optimizer = optax.adamw(1e-2, weight_decay=0.5, mask={"up": True, "out": False})
    state, batch = optimizer.init(trained), collate(examples(8))
    for _ in range(2):
        gradients = jax.grad(lambda p: loss({**params(), **p}, batch, None, True)[0].mean())(
            trained
        )
        updates, state = optimizer.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
    for name, expected in trained.items():
        np.testing.assert_allclose(trainer.state["params"][name], expected, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_have_no_optimizer_state():
    trainer = trainer_of(trainable="out")

    # Adam's two moments of 8 numbers, and its counter.
    assert sum(x.size for x in jax.tree.leaves(trainer.state["opt_state"])) == 2 * WIDTH + 1


def test_frozen_parameters_have_no_gradients():
    deployer = Deployer(devices=jax.devices()[:4])
    batch = jax.eval_shape(lambda: collate(examples(8)))
    rules = deployer.get_sharding_rules(params())

    def flops(trainable):
        lowered = TrainingPlan(
            deployer,
            loss_fn=loss,
            params=params(),
            optimizer=OPTIMIZER,
            sharding_rules=rules,
            global_batch_size=8,
            trainable=trainable,
        ).lower(batch)
        return lowered.compile().cost_analysis()["flops"]

    # A product with a kernel costs as much forward, for its input and for its own gradient; the
    # data has none.
    product = 2 * 2 * WIDTH * UNITS
    assert flops(None) - flops("out") > 3 * product - product / 2


def test_frozen_parameters_keep_their_dtype():
    start = {**params(), "down": params()["down"].astype(jnp.bfloat16)}

    trainer = trainer_of(start=start, trainable="up|out")

    assert trainer.state["params"]["down"].dtype == jnp.bfloat16
    assert trainer_of(start=start).state["params"]["down"].dtype == jnp.float32


def test_a_training_with_frozen_parameters_resumes_bitwise(tmp_path):
    whole = trainer_of(4, trainable="up")
    whole.fit(examples(), num_epochs=2)

    with Checkpointer(tmp_path) as checkpointer:
        trainer_of(4, trainable="up").fit(examples(), num_epochs=1, checkpointer=checkpointer)
    resumed = trainer_of(4, trainable="up")
    with Checkpointer(tmp_path) as checkpointer:
        resumed.fit(examples(), num_epochs=2, checkpointer=checkpointer)

    for found, expected in zip(
        jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [("nothing", "leaves no parameter to train; parameters: down, out, up"), ("(", "not a regex")],
)
def test_training_nothing_is_refused(trainable, message):
    with pytest.raises(EngineError, match=message):
        trainer_of(trainable=trainable)
