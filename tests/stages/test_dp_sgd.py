"""examples/dp_sgd.py: what is clipped, drawn and added, on one device and several; epsilon."""

from math import comb
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_scripts import assert_close, load_example
from scipy.stats import norm

from redco_flow import Deployer, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.slow

NUM_IMAGES = 32
MAX_NORM = 2.5  # between the images' gradients, so that some are clipped
# Devices, model shards, rows that a data shard works on at once.
MESHES = {"1 device": (1, 1, None), "2 data shards, micro-batches": (2, 1, 4),
          "2 model shards": (2, 2, 8)}  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    """The script, 32 images, a classifier and its parameters."""
    script = load_example("dp_sgd")
    model = script.Classifier(width=16)
    params = model.init(jax.random.key(0), np.zeros((1, 64)))["params"]
    images = script.load_images(seed=0)[0][:NUM_IMAGES]
    image_losses = script.make_image_losses(model)
    return SimpleNamespace(
        script=script,
        images=images,
        image_losses=image_losses,
        gradient=jax.jit(jax.grad(lambda params, batch: image_losses(params, batch)[0])),
        params=jax.tree.map(np.asarray, params),
    )


def train(digits, mesh, *, sampling_rate, noise_multiplier, num_steps=1, checkpointer=None):
    """Parameters after some steps with rate 1."""
    num_devices, num_model_shards, per_device_batch_size = MESHES[mesh]
    deployer = Deployer(num_model_shards, seed=3, devices=jax.devices()[:num_devices])
    batch = digits.script.collate_images(digits.images)
    num_drawn = sampling_rate * NUM_IMAGES
    trainer = Trainer(
        deployer,
        collate_fn=digits.script.collate_images,
        loss_fn=digits.script.make_private_loss_fn(digits.image_losses, sampling_rate, MAX_NORM),
        params=digits.params,
        optimizer=digits.script.private_sgd(1.0, noise_multiplier, MAX_NORM, num_drawn, seed=5),
        sharding_rules=deployer.get_sharding_rules(digits.params, digits.image_losses, batch),
        global_batch_size=NUM_IMAGES,
        per_device_batch_size=per_device_batch_size,
    )
    trainer.fit(digits.images, num_epochs=num_steps, checkpointer=checkpointer)
    return flat(trainer.state["params"])


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def clipped_alone(digits, image):
    """One image's gradient in NumPy, no longer than MAX_NORM; and its length before."""
    batch = digits.script.collate_images([image])
    gradient = flat(digits.gradient(digits.params, batch))
    length = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in gradient.values()))
    return {name: g * min(1, MAX_NORM / length) for name, g in gradient.items()}, length


@pytest.fixture(scope="module")
def without_noise(digits):
    """Parameters after a step on all images, by a loop that clips each one's gradient alone."""
    clipped, lengths = zip(*(clipped_alone(digits, image) for image in digits.images), strict=True)
    assert min(lengths) < 0.9 * MAX_NORM < 1.1 * MAX_NORM < max(lengths)
    start = flat(digits.params)
    return {name: start[name] - sum(g[name] for g in clipped) / NUM_IMAGES for name in start}


def test_each_images_gradient_is_clipped_by_itself(digits, without_noise):
    """On other meshes as here: the test after the next."""
    mesh = "2 data shards, micro-batches"

    stepped = train(digits, mesh, sampling_rate=1.0, noise_multiplier=0.0)

    assert_close(stepped, without_noise, atol=1e-6)


def test_noise_of_the_clipping_norms_scale_is_added_once(digits, without_noise):
    mesh = "2 data shards, micro-batches"

    stepped = train(digits, mesh, sampling_rate=1.0, noise_multiplier=8.0)

    noise = np.concatenate([(stepped[name] - without_noise[name]).ravel() for name in stepped])
    # Of 1,210 numbers, the deviation is within 4 of its standard errors, 8 %.
    assert noise.std() == pytest.approx(8.0 * MAX_NORM / NUM_IMAGES, rel=0.08)
    assert abs(noise.mean()) < 4 * noise.std() / np.sqrt(noise.size)


def test_the_same_images_are_drawn_and_the_same_noise_is_added_on_any_mesh(digits):
    drawn = {
        mesh: train(digits, mesh, sampling_rate=0.25, noise_multiplier=1.0, num_steps=3)
        for mesh in MESHES
    }

    for mesh in MESHES:
        assert_close(drawn[mesh], drawn["1 device"], atol=1e-5)


def test_images_are_drawn_one_by_one_and_those_that_are_not_count_nothing(digits):
    """Of 4,000 draws with probability 0.25, 1,000 are expected, with a deviation of 27."""
    batch = digits.script.collate_images(digits.images[:1] * 4000)
    loss_fn = digits.script.make_private_loss_fn(digits.image_losses, 0.25, MAX_NORM)
    keys = jax.random.split(jax.random.key(0), 4000)

    def sum_of_losses(params):
        return jnp.sum(loss_fn(params, batch, keys, True)[0])

    found = flat(jax.jit(jax.grad(sum_of_losses))(digits.params))
    one, _ = clipped_alone(digits, digits.images[0])
    num_drawn = np.vdot(found["['Dense_1']['bias']"], one["['Dense_1']['bias']"])
    num_drawn /= np.sum(one["['Dense_1']['bias']"] ** 2)

    assert num_drawn == pytest.approx(round(num_drawn), abs=0.01)
    assert num_drawn == pytest.approx(1000, abs=110)
    assert_close(found, {name: round(num_drawn) * g for name, g in one.items()}, atol=1e-2)


def test_a_resumed_training_draws_and_adds_what_an_uninterrupted_one_does(digits, tmp_path):
    options = {"mesh": "1 device", "sampling_rate": 0.25, "noise_multiplier": 1.0}
    whole = train(digits, num_steps=6, **options)
    for num_steps in (3, 6):
        with Checkpointer(tmp_path / "checkpoints") as checkpointer:
            resumed = train(digits, num_steps=num_steps, checkpointer=checkpointer, **options)

    for name in whole:
        np.testing.assert_array_equal(resumed[name], whole[name])


def test_epsilon_of_steps_on_all_images_is_the_gaussian_mechanisms(digits):
    """Exact: Balle and Wang 2018, theorem 8, for a sensitivity of sqrt(steps)."""
    num_steps, noise = 4, 3.0

    epsilon = digits.script.spent_epsilon(num_steps, 1.0, noise, delta=1e-5)

    mu = np.sqrt(num_steps) / noise
    delta = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=0.02)


def test_epsilon_of_drawn_images_is_below_the_bound_of_renyi_divergences(digits):
    """Mironov, Talwar and Zhang 2019, equation 6 for whole orders; conversion: Mironov 2017."""
    num_steps, rate, noise, delta = 300, 0.1, 2.5, 1e-4

    def divergence(order):
        k = np.arange(order + 1)
        binomials = np.array([float(comb(order, i)) for i in k])
        terms = (
            binomials * (1 - rate) ** (order - k) * rate**k * np.exp((k**2 - k) / (2 * noise**2))
        )
        return np.log(terms.sum()) / (order - 1)

    bound = min(num_steps * divergence(a) + np.log(1 / delta) / (a - 1) for a in range(2, 64))
    epsilon = digits.script.spent_epsilon(num_steps, rate, noise, delta)

    assert 0.7 * bound < epsilon < bound


def test_digits_are_learned_privately_over_two_model_shards(run_over):
    """The comparison of its steps with one device's is made above."""
    numbers, _ = run_over("dp_sgd.py", 2, num_steps=40, num_public_epochs=5)

    accuracy, epsilon, delta, without, majority = numbers
    assert majority < 0.15 < 0.6 < accuracy < without
    assert 0 < epsilon < 2
    assert delta == 1e-4
