"""DP-SGD on scikit-learn's digits: what is learned of any single image is bounded by epsilon.

    redco-flow run pipelines/dp_sgd.yaml               # as a stage: tracked, tried again, resumed
    python examples/dp_sgd.py --num_steps 50           # by hand: everything below out/

Abadi et al. 2016, algorithm 1. Each step draws each image with the same probability (Poisson
sampling), clips the gradient of each drawn image by itself, and adds Gaussian noise once to their
sum. The engine's batch is all images: whether one is drawn is decided by its own random key, which
no number of devices or micro-batches changes. So a step costs a pass over all of them.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from sklearn.datasets import load_digits

from redco_flow import Deployer, Predictor, Trainer, script_context

NUM_TEST = 360
ROWS_MULTIPLE = 32  # the batch's rows, those that only fill it up included, divide over devices


class Classifier(nn.Module):
    """Logits (images, 10) of pixels (images, 64)."""

    width: int

    @nn.compact
    def __call__(self, pixels):
        return nn.Dense(10)(nn.relu(nn.Dense(self.width)(pixels)))


def load_images(seed):
    """Training and test images: rows of {pixels, label}."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = [{"pixels": digits.data[i] / 16, "label": digits.target[i]} for i in order]
    return images[NUM_TEST:], images[:NUM_TEST]


def collate_images(images):
    return {
        "pixels": np.stack([image["pixels"] for image in images]).astype(np.float32),
        "label": np.array([image["label"] for image in images], np.int32),
    }


def make_image_losses(model):
    def image_losses(params, batch):
        logits = model.apply({"params": params}, batch["pixels"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    return image_losses


def make_private_loss_fn(image_losses, sampling_rate, max_norm):
    """All images' losses, whose gradient is that of the drawn ones, each clipped to `max_norm`.

    Each image weighs `sampling_rate`, so that the engine divides the sum of the clipped gradients
    by the number of images that a step draws on average, whatever it drew.
    """

    def gradient_norm(params, image):
        only = jax.tree.map(lambda x: x[None], image)
        return optax.global_norm(jax.grad(lambda p: image_losses(p, only)[0])(params))

    def loss_fn(params, batch, rngs, is_training):
        losses = image_losses(params, batch)
        frozen = jax.lax.stop_gradient(params)
        norms = jax.vmap(gradient_norm, in_axes=(None, 0))(frozen, batch)
        is_drawn = jax.vmap(jax.random.bernoulli, in_axes=(0, None))(rngs, sampling_rate)
        clipped = is_drawn * jnp.minimum(1.0, max_norm / norms) * losses
        # The value is that of all losses; the gradient is that of `clipped`.
        totals = clipped + jax.lax.stop_gradient(sampling_rate * losses - clipped)
        return totals, jnp.full_like(losses, sampling_rate)

    return loss_fn


def private_sgd(learning_rate, noise_multiplier, max_norm, num_drawn, seed):
    """SGD on the sum of clipped gradients over `num_drawn`, with noise of `max_norm`'s scale."""
    stddev = noise_multiplier * max_norm / num_drawn
    # The engine's keys, by which images are drawn, are folded from the numbers of steps.
    key = jax.random.fold_in(jax.random.key(seed), 2**32 - 1)
    noise = optax.add_noise(stddev**2, 0.0, key)
    return optax.chain(noise, optax.sgd(learning_rate))


def spent_epsilon(num_steps, sampling_rate, noise_multiplier, delta):
    """Epsilon of all steps together, where datasets differ by one image more or less."""
    step = PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier))
    return PLDAccountant().compose(SelfComposedDpEvent(step, num_steps)).get_epsilon(delta)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampling_rate", type=float, default=0.1)
    parser.add_argument("--noise_multiplier", type=float, default=2.5)
    parser.add_argument("--max_norm", type=float, default=1.0, help="of an image's gradient")
    parser.add_argument("--delta", type=float, default=1e-4, help="below 1 / images")
    parser.add_argument("--num_steps", type=int, default=300)
    parser.add_argument("--num_public_epochs", type=int, default=20, help="without privacy")
    parser.add_argument("--learning_rate", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--per_device_batch_size", type=int, help="to bound memory")
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    script = script_context()
    train, test = load_images(arguments.seed)
    rate, max_norm = arguments.sampling_rate, arguments.max_norm
    num_drawn = rate * len(train)

    model = Classifier(arguments.width)
    image_losses = make_image_losses(model)
    params = model.init(jax.random.key(arguments.seed), np.zeros((1, 64)))["params"]
    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    rules = deployer.get_sharding_rules(params, image_losses, collate_images(train[:2]))
    noise = arguments.noise_multiplier
    private = Trainer(
        deployer,
        collate_fn=collate_images,
        loss_fn=make_private_loss_fn(image_losses, rate, max_norm),
        params=params,
        optimizer=private_sgd(arguments.learning_rate, noise, max_norm, num_drawn, arguments.seed),
        sharding_rules=rules,
        global_batch_size=-(-len(train) // ROWS_MULTIPLE) * ROWS_MULTIPLE,
        per_device_batch_size=arguments.per_device_batch_size,
    )
    predictor = Predictor(
        deployer,
        collate_fn=collate_images,
        pred_fn=lambda params, batch, rngs: model.apply({"params": params}, batch["pixels"]),
        sharding_rules=rules,
        batch_size=120,
    )

    def accuracy(params, step=None):
        found = np.argmax(predictor.predict(test, params), axis=-1)
        return {"accuracy": float(np.mean(found == [image["label"] for image in test]))}

    # A step is an epoch: all images are in its batch.
    every = {"log_every_steps": 50, "eval_every_steps": 50, "save_every_epochs": 50}
    options = script.fit_options()
    private.fit(train, num_epochs=arguments.num_steps, eval_fn=accuracy, **every, **options)

    public = Trainer(
        deployer,
        collate_fn=collate_images,
        loss_fn=lambda params, batch, *_: image_losses(params, batch).mean(),
        params=params,
        optimizer=optax.sgd(arguments.learning_rate),
        sharding_rules=rules,
        global_batch_size=ROWS_MULTIPLE,
    )
    public.fit(train, num_epochs=arguments.num_public_epochs, log_every_steps=1000)

    epsilon = spent_epsilon(private.step, rate, noise, arguments.delta)
    found = accuracy(private.state["params"])["accuracy"]
    without = accuracy(public.state["params"])["accuracy"]
    commonest = np.bincount([image["label"] for image in train]).argmax()
    majority = float(np.mean([image["label"] == commonest for image in test]))
    script.metrics(
        accuracy=found,
        epsilon=epsilon,
        delta=arguments.delta,
        accuracy_without_privacy=without,
        accuracy_of_majority=majority,
    )
    print(f"accuracy {found:.3f} with epsilon {epsilon:.2f} at delta {arguments.delta:f}, ", end="")
    print(f"{without:.3f} without privacy; {majority:.3f} of the commonest digit")

    arguments.params.mkdir(parents=True, exist_ok=True)
    flat = jax.tree_util.tree_leaves_with_path(private.state["params"])
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in flat}
    np.savez(arguments.params / "params.npz", **jax.tree.map(np.asarray, arrays))


if __name__ == "__main__":
    main()
