"""What a training keeps on each device, counted beforehand: frozen parameters cost themselves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.sharding.fsdp import ModelStates
from redco_flow.engine.step.lora import plan_lora

WIDTH, UNITS, RANK = 64, 256, 4
KERNEL = WIDTH * UNITS
FACTORS = RANK * (WIDTH + UNITS)
GIB = 2**30
# As `fully_sharded.STATE_SHARE`: activations and temporaries need the rest.
USABLE = 0.8


def params():
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, UNITS), "down": (UNITS, WIDTH)}
    return {name: rng.normal(size=s).astype(np.float32) / 16 for name, s in shapes.items()}


def loss(params, batch, rngs, is_training):
    made = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return jnp.sum(jnp.square(made - batch["x"]), axis=-1), jnp.ones(len(made))


def collate(rows):
    return {"x": np.stack(rows)}


TRACED = (params(), loss, {"x": jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)}, None, False)


def plan():
    return plan_lora(*TRACED, rank=RANK, alpha=8.0, targets="up|down")


# Adam in float32: a frozen number takes 4 bytes, one that is trained 16, as each has a gradient
# and two moments.
TRAININGS = {
    "all": ({}, 16 * 2 * KERNEL),
    "one of two": ({"trainable": "up"}, 16 * KERNEL + 4 * KERNEL),
    "by function": ({"trainable": lambda path, _: path == "up"}, 16 * KERNEL + 4 * KERNEL),
    "factors": ({"lora": plan(), "trainable": "^lora/"}, 4 * 2 * KERNEL + 16 * 2 * FACTORS),
}


@pytest.mark.parametrize(("options", "num_bytes"), TRAININGS.values(), ids=TRAININGS)
def test_auto_splits_parameters_only_where_what_is_kept_does_not_fit(options, num_bytes):
    """With twice the memory that is missing they are copied: counted is no more than is there."""
    # The step, the seed and Adam's counter besides.
    just_enough, too_little = ((num_bytes + more) / USABLE / GIB for more in (16, -16))

    chosen = []
    for gib in (just_enough, too_little):
        deployer = Deployer(
            num_fsdp_shards="auto", device_memory_gib=gib, devices=jax.devices()[:4]
        )
        deployer.get_sharding_rules(*TRACED, optimizer=optax.adamw(1e-3), **options)
        chosen.append(deployer.num_fsdp_shards)

    assert chosen == [1, 2]


def test_auto_of_a_trainer_without_rules_knows_what_is_frozen():
    num_bytes = 16 * KERNEL + 4 * KERNEL + 16
    deployer = Deployer(
        num_fsdp_shards="auto",
        device_memory_gib=num_bytes / USABLE / GIB,
        devices=jax.devices()[:4],
    )

    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=params(),
        optimizer=optax.adamw(1e-3),
        global_batch_size=4,
        trainable="up",
    )

    assert trainer.deployer.num_fsdp_shards == 1


def held_by_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("has_factors", [False, True], ids=["frozen", "factors"])
def test_what_is_counted_is_what_a_trainer_holds(has_factors):
    """On two model and two fsdp shards, with a frozen parameter in half the bytes."""
    deployer = Deployer(2, num_fsdp_shards=2, devices=jax.devices()[:4])
    start = {**params(), "down": params()["down"].astype(jnp.bfloat16)}
    rules = deployer.get_sharding_rules(start, *TRACED[1:])
    optimizer, lora, trainable = optax.adamw(1e-3), plan() if has_factors else None, "up"
    loss_fn, all_rules, all_params = loss, rules, start
    if lora is not None:
        trainable, loss_fn, all_params = lora.trainable, lora.adapt(loss), lora.start(
            start, jax.random.key(0)
        )  # fmt: skip
        all_rules = lora.rules(rules, all_params)

    found = ModelStates(start, optimizer, lora, trainable).bytes_per_device(rules)

    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss_fn,
        params=all_params,
        optimizer=optimizer,
        sharding_rules=all_rules,
        global_batch_size=4,
        trainable=trainable,
    )
    trained = trainer.state["params"]["lora" if has_factors else "up"]
    gradients = held_by_one_device(trained)
    assert found == held_by_one_device(trainer.state) + gradients
    frozen = trainer.state["params"]["base" if has_factors else "down"]
    assert held_by_one_device(frozen) < math.prod((2, KERNEL))
