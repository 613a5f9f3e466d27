"""Parameters split over the axis that splits the batch: the same numbers, a share of the bytes."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Predictor, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.sharding.fsdp import device_memory_bytes
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from tests.engine.traffic import read_collectives

LAYERS, WIDTH, UNITS, VOCAB, LENGTH = 3, 16, 32, 64, 6
# (data, fsdp, model)
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2)]


def params():
    rng = np.random.default_rng(0)
    shapes = {
        "table": (VOCAB, WIDTH),
        "layers": {
            "norm": (LAYERS, WIDTH),
            "up": (LAYERS, WIDTH, UNITS),
            "down": (LAYERS, UNITS, WIDTH),
        },
        "head": (WIDTH, VOCAB),
    }
    return jax.tree.map(
        lambda shape: 0.3 * rng.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def logits(params, ids):
    """Layers are scanned and rematerialised, as the models' are."""

    @jax.checkpoint
    def layer(x, p):
        return x + jax.nn.relu(x * (1 + p["norm"]) @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["table"][ids], params["layers"])
    return x @ params["head"]


def loss(params, batch, rngs, is_training):
    return cross_entropy(logits(params, batch["ids"]), jnp.roll(batch["ids"], -1, 1))


def examples(count=20):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(0, VOCAB, LENGTH).astype(np.int32)} for _ in range(count)]


def collate(rows):
    return {"ids": np.stack([row["ids"] for row in rows])}


def deployer_of(data, fsdp, model):
    return Deployer(model, num_fsdp_shards=fsdp, devices=jax.devices()[: data * fsdp * model])


def trainer_of(deployer, loss_fn=loss, **options):
    traced = (params(), loss_fn, collate(examples(2)), jax.random.split(jax.random.key(0), 2))
    return Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss_fn,
        params=params(),
        optimizer=optax.adamw(1e-2),
        sharding_rules=deployer.get_sharding_rules(*traced, False),
        global_batch_size=8,
        max_grad_norm=1.0,
        **options,
    )


class Numbers(Callback):
    def __init__(self):
        self.found = []

    def on_log(self, record):
        self.found += [record["loss"], record["grad_norm"]]


def train(deployer, loss_fn=loss):
    numbers = Numbers()
    trainer = trainer_of(deployer, loss_fn)
    trainer.fit(examples(), num_epochs=1, callbacks=[numbers], log_every_steps=1)
    return numbers.found, trainer


def assert_close(found, expected):
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Sums run in another order; Adam's first steps enlarge what is near zero.
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=2e-5)


@functools.cache
def on_one_device():
    return train(deployer_of(1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:3])
def test_losses_gradients_and_parameters_are_those_of_one_device(mesh):
    """Engine case 12: three steps, the last one partial."""
    expected, alone = on_one_device()

    found, trainer = train(deployer_of(*mesh))

    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_close(trainer.state["params"], alone.state["params"])
    assert trainer.eval_loss(examples(5)) == pytest.approx(alone.eval_loss(examples(5)), rel=1e-5)


@pytest.mark.slow
def test_a_loss_per_example_alone_is_the_same():
    def mean(params, batch, rngs, is_training):
        totals, weights = loss(params, batch, rngs, is_training)
        return totals.sum() / weights.sum()

    expected, _ = train(deployer_of(1, 1, 1), mean)

    found, _ = train(deployer_of(1, 8, 1), mean)

    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_holds_its_share_of_parameters_and_optimizer_state(mesh):
    trainer = trainer_of(deployer_of(*mesh))

    large = ("table", "head")
    for tree in (trainer.state["params"], trainer.state["opt_state"][0].mu):
        for array in [*(tree[name] for name in large), tree["layers"]["up"]]:
            assert array.addressable_shards[0].data.nbytes * mesh[1] * mesh[2] == array.nbytes
    on_one_device = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trainer.state["params"])
    )
    assert on_one_device == trainer.sharding_rules.bytes_per_device


def test_training_goes_on_over_other_fsdp_shards(tmp_path):
    """Engine case 47, a saved state on other meshes: it is restored exactly."""
    first = trainer_of(deployer_of(1, 8, 1))
    with Checkpointer(tmp_path) as checkpointer:
        first.fit(examples(), num_epochs=1, checkpointer=checkpointer)

        for mesh in ((2, 2, 2), (1, 1, 1)):
            other = trainer_of(deployer_of(*mesh))
            other.restore(checkpointer)
            for one, two in zip(
                jax.tree.leaves(other.state), jax.tree.leaves(first.state), strict=True
            ):
                np.testing.assert_array_equal(one, two)


def test_predictions_are_those_of_whole_parameters():
    def best(params, batch, rngs):
        return logits(params, batch["ids"]).argmax(-1)

    deployer = deployer_of(1, 4, 2)
    rules = deployer.get_sharding_rules(params(), loss, collate(examples(2)), None, False)
    predictor = Predictor(
        deployer, collate_fn=collate, pred_fn=best, sharding_rules=rules, batch_size=4
    )

    found = predictor.predict(examples(6), params())

    np.testing.assert_array_equal(found, logits(params(), collate(examples(6))["ids"]).argmax(-1))


@pytest.mark.parametrize("is_unrolled", [False, True])
def test_what_travels_is_each_parameter_twice_and_its_gradient_once(is_unrolled):
    """No activation does: it would be 8 x 6 x 16 floats in one piece."""

    def unrolled(params, batch, rngs, is_training):
        x = params["table"][batch["ids"]]
        for number in range(LAYERS):
            p = jax.tree.map(lambda stack, n=number: stack[n], params["layers"])
            x = x + jax.nn.relu(x * (1 + p["norm"]) @ p["up"]) @ p["down"]
        return cross_entropy(x @ params["head"], jnp.roll(batch["ids"], -1, 1))

    deployer = deployer_of(1, 8, 1)
    batch = {"ids": jax.ShapeDtypeStruct((8, LENGTH), jnp.int32)}
    loss_fn = unrolled if is_unrolled else loss
    rules = deployer.get_sharding_rules(params(), loss_fn, batch, None, False)

    lowered = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params(),
        optimizer=optax.adamw(1e-2),
        sharding_rules=rules,
        global_batch_size=8,
    ).lower(batch)

    found = read_collectives(lowered.compile().as_text())
    gathered = sum(one.num_bytes * one.count for one in found if one.kind == "all-gather")
    reduced = sum(one.num_bytes * one.count for one in found if one.kind == "all-reduce")
    assert {one.kind for one in found} <= {"all-gather", "all-reduce"}
    assert gathered <= 2 * rules.total_bytes
    # A few scalars are reduced besides.
    assert rules.total_bytes <= reduced <= 1.01 * rules.total_bytes


def test_the_largest_whole_dim_is_split_and_small_parameters_are_not():
    deployer = deployer_of(1, 4, 2)

    rules = deployer.get_sharding_rules(params(), loss, collate(examples(2)), None, False)

    assert {p.path: p.spec for p in rules.parameters} == {
        "table": P("model", "fsdp"),
        "head": P("fsdp", "model"),
        "layers/norm": P(),
        "layers/up": P(None, "fsdp", "model"),
        "layers/down": P(None, "model", "fsdp"),
    }
    reasons = {p.path: p.reason for p in rules.parameters}
    assert reasons["layers/up"].endswith("; its 16 over fsdp")
    assert reasons["layers/norm"].endswith("; not over fsdp: too small")
    assert "2 model x 4 fsdp shards" in rules.summary()


def test_a_users_rule_is_taken_literally():
    deployer = deployer_of(1, 8, 1)
    given = [("table", (None, "fsdp")), ("head", ())]

    rules = deployer.get_sharding_rules(params(), overrides=given)

    specs = rules.specs(params())
    assert (specs["table"], specs["head"]) == (P(None, "fsdp"), P())


def auto(gib):
    return Deployer(num_fsdp_shards="auto", device_memory_gib=gib)


# Adam: parameters, gradients and two moments, of which 80 % of a device is filled.
NEEDED_GIB = 4 * 4 * (2 * VOCAB * WIDTH + LAYERS * (2 * WIDTH * UNITS + WIDTH)) / 2**30 / 0.8


@pytest.mark.parametrize(
    ("share", "num_shards"), [(1.01, 1), (0.99, 2), (0.51, 2), (0.3, 4), (0.15, 8)]
)
def test_auto_is_the_smallest_number_with_which_a_device_holds_the_state(share, num_shards):
    deployer = auto(share * NEEDED_GIB)

    deployer.get_sharding_rules(params(), optimizer=optax.adamw(1e-3))

    assert deployer.num_fsdp_shards == num_shards
    assert deployer.num_data_shards == 8


def test_auto_takes_all_shards_and_warns_where_nothing_fits(caplog):
    with caplog.at_level(logging.WARNING):
        deployer = auto(0.01 * NEEDED_GIB)
        deployer.get_sharding_rules(params(), optimizer=optax.adamw(1e-3))

    assert deployer.num_fsdp_shards == 8
    assert "use more model shards or more devices" in caplog.text


def test_auto_is_decided_by_a_trainer_without_rules():
    deployer = auto(0.3 * NEEDED_GIB)

    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=params(),
        optimizer=optax.adamw(1e-3),
        global_batch_size=8,
    )

    assert trainer.deployer.num_fsdp_shards == 4
    assert trainer.state["params"]["head"].addressable_shards[0].data.shape == (WIDTH, VOCAB // 4)


def test_auto_without_an_optimizer_or_before_it_is_decided_is_refused():
    with pytest.raises(ValueError, match=r"pass optimizer="):
        auto(1).get_sharding_rules(params())
    with pytest.raises(ValueError, match="call that first"):
        _ = auto(1).mesh


def test_cpu_devices_share_the_hosts_memory():
    found = device_memory_bytes(jax.devices()[0])

    assert 0 < found * 8 < 2**50
    assert device_memory_bytes(jax.devices()[0], 1.5) == 3 * 2**29
