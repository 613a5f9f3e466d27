"""A head split over fsdp: hidden states are sent instead of it, and each device scores its part."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, TrainingPlan
from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.program import Program
from redco_flow.models.transformer.language_model import Head, score
from tests.engine.traffic import read_collectives

VOCAB, WIDTH, ROWS, LENGTH, NUM_CHUNKS = 1024, 512, 16, 8, 3
FLOAT = 4


def init(is_tied, key):
    keys = jax.random.split(key, 2)
    shapes = {"table": (VOCAB, WIDTH)} | ({} if is_tied else {"head": (WIDTH, VOCAB)})
    draw = jax.random.normal
    return {name: 0.1 * draw(k, shapes[name]) for name, k in zip(shapes, keys, strict=False)}


def loss(params, batch, rngs, is_training, **options):
    ids = batch["ids"]
    hidden = jnp.tanh(params["table"].at[ids].get(mode="clip"))
    kernel = params["head"] if "head" in params else params["table"].T
    labels = jnp.where(ids % 7 == 0, -100, jnp.roll(ids, -1, 1))
    head = Head(kernel, None)
    return chunked_cross_entropy(partial(score, 20.0), head, hidden, labels, **options)


SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.1}
LOSSES = {
    "at once": partial(loss, num_chunks=1),
    "in chunks": partial(loss, num_chunks=NUM_CHUNKS, **SMOOTHED),
    "tied": partial(loss, num_chunks=NUM_CHUNKS),
}
MESHES = {
    "fsdp 8": {"num_fsdp_shards": 8},
    "fsdp 4, model 2": {"num_fsdp_shards": 4, "num_model_shards": 2},
    "data 2, fsdp 4, in micro-batches": {"num_fsdp_shards": 4, "per_device_batch_size": 1},
    "fsdp 4, context 2": {
        "num_fsdp_shards": 4, "num_context_shards": 2, "fsdp_over_context": True
    },
}  # fmt: skip


def plan_of(mesh, name, *, length=LENGTH, lora=None, trainable=None):
    settings, loss_fn = dict(mesh), LOSSES[name]
    rows_of_device = settings.pop("per_device_batch_size", None)
    deployer = Deployer(devices=jax.devices()[: 8 if mesh else 1], **settings)
    params = jax.eval_shape(partial(init, name == "tied"), jax.random.key(0))
    batch = {"ids": jax.ShapeDtypeStruct((ROWS, length), jnp.int32)}
    if lora is not None:
        lora = plan_lora(params, loss_fn, batch, None, False, rank=2, alpha=2.0, targets=lora)
    return TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(10.0),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        lora=lora,
        trainable=trainable,
        global_batch_size=ROWS,
        per_device_batch_size=rows_of_device,
        batch=batch,
    )


def stepped(plan):
    """Return the parameters after a step, its loss and its gradient's norm."""
    is_tied = "head" not in [one.path for one in plan.model_rules.parameters]

    def start(key):
        params = init(is_tied, key)
        params = params if plan.lora is None else plan.lora.start(params, key)
        return plan.storage.to_storage(plan.start(params))

    state = jax.jit(start, out_shardings=plan.storage.stored_sharding)(jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))
    given = {"batch": {"ids": ids}, "mask": np.ones(ROWS), "rows": np.arange(ROWS)}
    batch = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape).astype(like.dtype), like.sharding),
        given,
        plan.micro_batches(),
    )
    state, metrics = plan.train_step(state, batch)
    return plan.storage.to_logical(state)["params"], metrics["total"], metrics["grad_norm"]


@pytest.fixture(scope="module")
def on_one_device():
    """The losses' steps."""
    return {name: stepped(plan_of({}, name)) for name in ("in chunks", "tied")}


def assert_equal(found, expected):
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ("data 2, fsdp 4, in micro-batches", "in chunks"),
        ("fsdp 4, context 2", "in chunks"),
        ("fsdp 4, model 2", "tied"),
    ],
)
def test_the_step_is_that_of_one_device(on_one_device, mesh, name):
    """Engine case 12: smoothing, z-loss, a tied head, accumulation and labels that are ignored."""
    assert_equal(stepped(plan_of(MESHES[mesh], name)), on_one_device[name])


def test_the_step_is_that_of_one_device_where_the_head_has_factors_alone():
    steps = [stepped(plan_of(mesh, "in chunks", lora="head")) for mesh in (MESHES["fsdp 8"], {})]
    assert_equal(*steps)


@pytest.mark.parametrize(("trainable", "num_products"), [("table", 2), (None, 3)])
def test_a_frozen_head_is_multiplied_by_twice_and_another_three_times(trainable, num_products):
    """With the chunks' losses and, at once, the gradients of hidden states and of the head."""
    program = Program(plan_of({}, "in chunks", trainable=trainable).compile().as_text())

    num_tokens = ROWS * 9  # of 8 a row, which 3 chunks fill up
    assert program.flops() == num_products * 2 * num_tokens * WIDTH * VOCAB


def wire_bytes(plan):
    found = Counter()
    for one in read_collectives(plan.compile().as_text()):
        found[one.kind] += one.wire_bytes
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_hidden_states_go_over_the_wires_and_the_head_does_not(name):
    """The head's parts are laid out by vocabulary: twice, and its gradient back again."""
    plan = plan_of(MESHES["fsdp 8"], name)
    specs = {one.path: one.spec for one in plan.rules.parameters}
    assert specs["table"] == P(None, "fsdp")
    assert specs.get("head", P("fsdp", None)) == P("fsdp", None)
    found = wire_bytes(plan)
    others = 7 / 8
    head = VOCAB * WIDTH * FLOAT // 8 * others
    # Each device has 2 rows of 8 tokens, which 3 chunks fill up to 9.
    length = LENGTH if name == "at once" else 9
    tokens = ROWS * length * WIDTH * FLOAT * others
    rows = ROWS // 8 * LENGTH * WIDTH * FLOAT * others
    assert found["all-to-all"] == pytest.approx(3 * head + 2 * rows, rel=0.01)
    # Gathered twice; compilers for CPUs all-reduce the gradient of which a device needs its part.
    assert found["all-gather"] + found["all-reduce"] <= 1.05 * 4 * tokens


def test_a_head_with_a_smaller_vocabulary_than_there_are_tokens_is_gathered():
    found = wire_bytes(plan_of(MESHES["fsdp 8"], "in chunks", length=VOCAB // 16))
    head = VOCAB * WIDTH * FLOAT * 7 / 8
    assert found["all-gather"] + found["all-reduce"] > 3.9 * head
