"""Every kind of optimizer trains on split parameters as on whole ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer

WIDTH, UNITS = 128, 256
LABELS = {"up": "fast", "down": "slow", "norm": "fast"}


def two_optimizers():
    each = {"fast": optax.lion(1e-3), "slow": optax.adamw(1e-2)}
    return optax.multi_transform(each, LABELS)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    # Kernels of 128 and more are factored.
    "adafactor": optax.adafactor(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "multi_transform": two_optimizers(),  # Lion beside AdamW
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
}


def params():
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, UNITS), "down": (UNITS, WIDTH)}
    kernels = {name: rng.normal(size=s).astype(np.float32) / 12 for name, s in shapes.items()}
    return kernels | {"norm": np.ones(WIDTH, np.float32)}


@functools.cache
def examples():
    rng = np.random.default_rng(1)
    return rng.normal(size=(16, 2, WIDTH)).astype(np.float32)


def collate(rows):
    return {"x": np.stack(rows)[:, 0], "y": np.stack(rows)[:, 1]}


def loss(params, batch, rngs, is_training):
    inner = jnp.tanh(batch["x"] * params["norm"] @ params["up"])
    errors = batch["x"] + inner @ params["down"] - batch["y"]
    return (errors**2).mean(axis=1), jnp.ones(len(errors))


@functools.cache
def trained(name, num_devices):
    """The state after four steps on one device, or over two data and four model shards."""
    deployer = Deployer(min(num_devices, 4), devices=jax.devices()[:num_devices])
    batch = collate(examples()[:2])
    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=params(),
        optimizer=OPTIMIZERS[name],
        sharding_rules=deployer.get_sharding_rules(params(), loss, batch, None, False),
        global_batch_size=8,
    )
    trainer.fit(list(examples()), num_epochs=2)
    return trainer.state


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_on_split_parameters_takes_the_steps_of_one_device(name):
    """Engine case 13: over two data and four model shards."""
    alone = trained(name, 1)

    spread = trained(name, 8)

    for key, start in params().items():
        moved = np.abs(np.asarray(alone["params"][key]) - start).max()
        # Sums run in another order; where a gradient is near zero, its sign or Adam's quotient
        # follows: of that a few among 33 thousand may be.
        errors = np.abs(np.asarray(spread["params"][key]) - np.asarray(alone["params"][key]))
        assert moved > 0
        assert np.quantile(errors, 0.999) <= 1e-4 * moved, key


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_devices_optimizer_state_is_its_share_of_all_of_it(name):
    """Engine case 13, of the arrays themselves after steps were taken."""
    state = trained(name, 8)["opt_state"]

    large = [leaf for leaf in jax.tree.leaves(state) if leaf.size >= WIDTH * UNITS]
    for leaf in large:
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    # Adafactor keeps row and column means only.
    assert bool(large) == (name != "adafactor")
