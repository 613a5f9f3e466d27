"""Micro-batches over data shards: the numbers of one device, whatever the function does."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.step.step import Sums, mean_gradients
from redco_flow.models.find import find_model
from tests.drawn_params import draw_params

# The vocabulary is not a multiple of any number of shards: its table is stored padded.
VOCAB, LENGTH, BATCH = 63, 12, 8
GPT2 = find_model("gpt2")
# Dropout, and a fused kernel of queries, keys and values.
CONFIG = GPT2.Config.from_hugging_face({
    "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4,
    "n_positions": LENGTH, "bos_token_id": 2, "eos_token_id": 1,
    "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2,
})  # fmt: skip


def deployer_of(data):
    return Deployer(devices=jax.devices()[:data])


def loss_fn(params, batch, rngs, is_training):
    """Of texts of 1 to LENGTH tokens, padded with 0; measures how many tokens are large."""
    ids = batch["ids"]
    mask = (ids != 0).astype(jnp.int32)
    logits = GPT2.apply(CONFIG, params, ids, mask, rngs=rngs if is_training else None)
    labels = jnp.where(ids == 0, -100, ids)[:, 1:]
    return *cross_entropy(logits[:, :-1], labels), {"large": jnp.sum(ids > 40, axis=1)}


def texts(count):
    rng = np.random.default_rng(0)
    kept = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (count, 1))
    return list(np.where(kept, rng.integers(3, VOCAB, (count, LENGTH)), 0).astype(np.int32))


def collate(rows):
    return {"ids": np.stack(rows)}


class Records(Callback):
    def __init__(self):
        self.logged = []

    def on_log(self, record):
        self.logged.append([record[name] for name in ("loss", "large", "grad_norm")])


def train_gpt2(deployer, **options):
    """Two steps of which the last is partial: (records, what the parameters became)."""
    params = draw_params(GPT2, CONFIG)
    rules = deployer.get_sharding_rules(params, loss_fn, collate(texts(2)), None, False)
    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(0.5),
        sharding_rules=rules,
        seed=7,
        **{"global_batch_size": BATCH, **options},
    )
    records = Records()
    trainer.fit(texts(BATCH + 5), num_epochs=1, callbacks=[records], log_every_steps=1)
    return records.logged, jax.device_get(trainer.state["params"])


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, two in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        # Of float32 numbers whose sums run in another order.
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * np.abs(two).max())


@pytest.mark.slow
@pytest.mark.covers("one device", family="gpt2", mesh="data")
def test_micro_batches_with_dropout_train_like_one_device_without_any():
    """Engine case 42: each example has its own mask."""
    found = train_gpt2(deployer_of(4), per_device_batch_size=1)

    assert_same(found, train_gpt2(deployer_of(1)))


def plain(w, x):
    return jnp.tanh(x @ w)


def constrained(w, x):
    return plain(w, jax.lax.with_sharding_constraint(x, P(("data", "fsdp"), None)))


def with_placed_call(w, x):
    mesh = jax.sharding.get_abstract_mesh()
    rows = NamedSharding(mesh, P("data"))
    return jax.jit(plain, in_shardings=(NamedSharding(mesh, P()), rows))(w, x)


def on_shards(w, x):
    return jax.shard_map(plain, in_specs=(P(), P("data")), out_specs=P("data"))(w, x)


def on_context_shards(w, x):
    """Names no other axis than its own."""
    mapped = jax.shard_map(
        plain, in_specs=(P(), P()), out_specs=P(), axis_names={"context"}, check_vma=False
    )
    return mapped(w, x)


def with_kernel(w, x):
    def double(source, target):
        target[...] = 2 * source[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    doubled = pallas.pallas_call(double, out_shape=shape, interpret=True)(x)
    return plain(w, jax.lax.stop_gradient(doubled) / 2)


def with_callback(w, x):
    shift = jax.pure_callback(np.zeros_like, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return plain(w, x + jax.lax.stop_gradient(shift))


def with_print(w, x):
    jax.debug.print("{}", x.shape[0])
    return plain(w, x)


OBSTACLES = {
    "sharding_constraint that names the mesh axis 'data'": constrained,
    "jit that names the mesh axis 'data'": with_placed_call,
    "a shard_map that names the mesh axis 'data'": on_shards,
    "a shard_map that leaves the mesh axis 'data' to the compiler": on_context_shards,
    "a pallas_call": with_kernel,
    "pure_callback without a vmap_method": with_callback,
    "effects, such as callbacks": with_print,
}


def gradient_of(function, num_micro):
    """Over four data shards: gradients and sums of 8 rows."""
    deployer = deployer_of(4)
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)

    def sums(w, x):
        return Sums(jnp.sum(function(w, x)), jnp.float32(x.shape[0]))

    def gradient(w, x):
        return mean_gradients(sums, w, x)

    micro_batches = deployer.put_rows(x.reshape(num_micro, -1, 3), dim=1)
    return jax.jit(deployer.on_mesh(gradient))(w, micro_batches)


@pytest.mark.parametrize(("told", "function"), OBSTACLES.items(), ids=OBSTACLES)
def test_a_function_that_cannot_be_taken_apart_by_shards_computes_the_same_and_the_log_says_so(
    told, function, caplog
):
    expected = gradient_of(plain, num_micro=1)

    with caplog.at_level(logging.INFO, "redco_flow.engine.step.step"):
        found = gradient_of(function, num_micro=2)

    (record,) = caplog.records
    assert "4 data shards" in record.getMessage()
    assert told in record.getMessage()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def on_free_shards(w, x):
    """Takes the axis and leaves it out of its specs."""
    mapped = jax.shard_map(
        plain, in_specs=(P(), P()), out_specs=P(), axis_names={"data", "context"}, check_vma=False
    )
    return mapped(w, x)


@pytest.mark.parametrize("function", [plain, on_free_shards])
def test_nothing_is_said_where_shards_keep_their_gradients_apart(function, caplog):
    expected = gradient_of(plain, num_micro=1)

    with caplog.at_level(logging.INFO, "redco_flow.engine.step.step"):
        found = gradient_of(function, num_micro=2)

    assert not caplog.records
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
