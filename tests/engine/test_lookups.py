"""Rows looked up in a table whose columns are split over fsdp: they are sent, not the table."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, TrainingPlan
from redco_flow.engine.step.loss import cross_entropy
from tests.engine.traffic import read_collectives

VOCAB, WIDTH, ROWS, LENGTH = 1024, 512, 16, 8
FLOAT = 4


def init(key):
    keys = jax.random.split(key, 2)
    shapes = {"head": (WIDTH, VOCAB), "table": (VOCAB, WIDTH)}
    draw = jax.random.normal
    return {name: 0.1 * draw(k, shapes[name]) for name, k in zip(shapes, keys, strict=True)}


def loss(params, batch, rngs, is_training):
    hidden = jnp.tanh(params["table"].at[batch["ids"]].get(mode="clip"))
    return cross_entropy(hidden @ params["head"], jnp.roll(batch["ids"], -1, 1))


def tied_loss(params, batch, rngs, is_training):
    hidden = jnp.tanh(jnp.take(params["table"], batch["ids"], axis=0))
    logits = hidden @ params["table"].T + hidden @ params["head"]
    return cross_entropy(logits, jnp.roll(batch["ids"], -1, 1))


def plan_of(mesh, *, loss_fn=loss, length=LENGTH, rows_of_device=None):
    data, fsdp, model = mesh
    count = data * fsdp * model
    deployer = Deployer(model, num_fsdp_shards=fsdp, devices=jax.devices()[:count])
    params = jax.eval_shape(init, jax.random.key(0))
    batch = {"ids": jax.ShapeDtypeStruct((ROWS, length), jnp.int32)}
    return TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(10.0),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=ROWS,
        per_device_batch_size=rows_of_device,
        batch=batch,
    )


def stepped(plan):
    """Return the parameters after a step, and its loss."""
    key = jax.random.key(0)
    start = jax.jit(
        lambda key: plan.storage.to_storage(plan.start(init(key))),
        out_shardings=plan.storage.stored_sharding,
    )
    shapes = plan.micro_batches()
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))
    given = {"batch": {"ids": ids}, "mask": np.ones(ROWS), "rows": np.arange(ROWS)}
    batch = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape).astype(like.dtype), like.sharding),
        given,
        shapes,
    )
    state, metrics = plan.train_step(start(key), batch)
    return plan.storage.to_logical(state)["params"], metrics["total"]


@functools.cache
def on_one_device(loss_fn):
    return stepped(plan_of((1, 1, 1), loss_fn=loss_fn))


@pytest.mark.parametrize(
    ("mesh", "rows_of_device", "loss_fn"),
    [((2, 4, 1), 1, loss), ((2, 2, 2), 1, tied_loss)],
)
def test_the_step_is_that_of_one_device(mesh, rows_of_device, loss_fn):
    """Engine case 12, for a table that other rows are looked up in than a device's own."""
    expected = on_one_device(loss_fn)
    found = stepped(plan_of(mesh, loss_fn=loss_fn, rows_of_device=rows_of_device))
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def wire_bytes(plan):
    found = Counter()
    for one in read_collectives(plan.compile().as_text()):
        found[one.kind] += one.wire_bytes
    return found


def test_rows_go_over_the_wires_and_their_table_does_not():
    """Forward and backward pass exchange rows; of the head come values, twice, and a gradient."""
    plan = plan_of((1, 8, 1))
    assert {one.path: one.spec for one in plan.rules.parameters} == {
        "head": P("fsdp", None),
        "table": P(None, "fsdp"),
    }
    found, num_shards = wire_bytes(plan), 8
    others = (num_shards - 1) / num_shards
    table = VOCAB * WIDTH * FLOAT * others
    rows = ROWS // num_shards * LENGTH * WIDTH * FLOAT * others
    assert found["all-to-all"] == pytest.approx(2 * rows, rel=0.01)
    # Compilers for CPUs all-reduce what a device needs its part of.
    assert found["all-gather"] + found["all-reduce"] == pytest.approx(4 * table, rel=0.02)


def test_a_table_with_fewer_rows_than_are_looked_up_is_gathered():
    """As of positions or kinds of segments."""
    found = wire_bytes(plan_of((1, 8, 1), length=VOCAB // 2))
    assert found["all-to-all"] == 0
