"""Parameters that are stored and trained in bfloat16, with a float32 optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer

WIDTH, NUM_EXAMPLES = 8, 16
OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


def params():
    draw = np.random.default_rng(0)
    return {
        "up": draw.normal(size=(WIDTH, 4)).astype("f4"),
        "down": draw.normal(size=4).astype("f4"),
    }


def loss(params, batch, rngs, is_training):
    found = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return jnp.square(found - batch["y"]), jnp.ones(len(batch["y"]))


def collate(examples):
    return {"x": np.stack([x for x, _ in examples]), "y": np.stack([y for _, y in examples])}


def examples():
    draw = np.random.default_rng(1)
    return [(draw.normal(size=WIDTH).astype("f4"), np.float32(1)) for _ in range(NUM_EXAMPLES)]


def trainer_of(optimizer=OPTIMIZER, param_dtype="bfloat16", devices=1, **options):
    deployer = Deployer(devices=jax.devices()[:devices], num_fsdp_shards=devices)
    return Trainer(
        deployer, collate_fn=collate, loss_fn=loss, params=params(), optimizer=optimizer,
        global_batch_size=NUM_EXAMPLES, param_dtype=param_dtype, **options,
    )  # fmt: skip


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("per_device_batch_size", [NUM_EXAMPLES, 4])
def test_a_training_is_optaxs_in_float32_with_every_new_parameter_rounded(per_device_batch_size):
    """Against a loop of optax's own; of four micro-batches gradients are added up in float32."""
    trainer = trainer_of(per_device_batch_size=per_device_batch_size)

    trainer.fit(examples(), num_epochs=3)

    expected = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params())
    wide = lambda tree: jax.tree.map(lambda x: x.astype("f4"), tree)  # noqa: E731
    state = OPTIMIZER.init(wide(expected))
    batch = collate(examples())
    for _ in range(3):
        grads = jax.grad(lambda p: loss(p, batch, None, True)[0].mean())(wide(expected))
        updates, state = OPTIMIZER.update(grads, state, wide(expected))
        moved = optax.apply_updates(wide(expected), updates)
        expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), moved)
    for one, two in zip(*map(jax.tree.leaves, (trainer.state["params"], expected)), strict=True):
        assert one.dtype == jnp.bfloat16
        # Gradients were rounded to bfloat16, and Adam's steps are 0.01: two roundings at most.
        np.testing.assert_allclose(one.astype("f4"), two.astype("f4"), rtol=2**-6, atol=2e-3)
    arrays = [x for x in jax.tree.leaves(trainer.state["opt_state"]) if x.ndim]
    assert {x.dtype for x in arrays} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("learning_rate", "moves"), [(1 / 600, False), (1 / 200, True)])
def test_an_update_of_less_than_half_a_unit_in_the_last_place_is_lost(learning_rate, moves):
    """What the documentation warns of: bfloat16's neighbours of 1 are 1/256 below, 1/128 above."""
    start = {"w": np.ones(4, np.float32)}

    def away(params, batch, rngs, is_training):
        return jnp.sum(params["w"]) * jnp.ones(NUM_EXAMPLES), jnp.ones(NUM_EXAMPLES)

    trainer = Trainer(
        Deployer(devices=jax.devices()[:1]), collate_fn=collate, loss_fn=away, params=start,
        optimizer=optax.sgd(learning_rate), global_batch_size=NUM_EXAMPLES,
        max_grad_norm=None, param_dtype="bfloat16",
    )  # fmt: skip

    trainer.fit(examples(), num_epochs=2)

    assert (np.asarray(trainer.state["params"]["w"], "f4") != 1).all() == moves


def test_a_resumed_training_ends_with_the_same_bits(tmp_path):
    """Over two fsdp shards, from a checkpoint in the middle."""
    straight = trainer_of(devices=2)
    straight.fit(examples(), num_epochs=4)

    with Checkpointer(tmp_path) as checkpointer:
        trainer_of(devices=2).fit(examples(), num_epochs=2, checkpointer=checkpointer)
    resumed = trainer_of(devices=2)
    with Checkpointer(tmp_path) as checkpointer:
        result = resumed.fit(examples(), num_epochs=4, checkpointer=checkpointer)

    assert result.start_step == 2
    assert bits(resumed.state) == bits(straight.state)
    assert {x.dtype for x in jax.tree.leaves(resumed.state["params"])} == {jnp.dtype("bfloat16")}


def test_a_skipped_step_leaves_narrow_parameters_as_they_are():
    trainer = trainer_of(on_nonfinite="skip", max_skipped=9)
    before = bits(trainer.state["params"])

    trainer.fit([(x * np.float32("nan"), y) for x, y in examples()], num_epochs=1)

    assert bits(trainer.state["params"]) == before


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(ValueError, match="param_dtype='int8' is no float"):
        trainer_of(param_dtype="int8")
