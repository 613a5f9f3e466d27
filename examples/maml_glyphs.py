"""MAML on glyphs: a network that tells five new characters apart after seeing each once.

    redco-flow run pipelines/maml_glyphs.yaml          # as a stage: tracked, tried again, resumed
    python examples/maml_glyphs.py --num_epochs 3      # by hand: everything below out/

Finn, Abbeel and Levine 2017, section 5.2, with installed fonts in place of Omniglot (pip install
'redco-flow[vision]'). A task is a few characters; its support images are of some fonts, its query
images of others, all a little shifted. The test is on Cyrillic, of which training sees nothing.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_flow import Deployer, Predictor, Trainer, script_context
from redco_flow.corpora import glyphs

SIZE = 16  # of an image, in pixels a side
MAX_SHIFT = 1  # in each direction, in pixels
NUM_QUERIES = 3  # of each character, in a task
TEST_STEPS = 5  # gradient steps on a test task's support images


def load_characters():
    """Images of each character, one of each font: those for training, and those for tests.

    Of characters that look alike, as a Latin and a Cyrillic a do, there is the first one.
    """
    images, captions = {}, {}
    for row in glyphs.draw_rows(glyphs.files(), glyphs.characters(), SIZE):
        images.setdefault(row["character"], []).append(row["image"])
        captions[row["character"]] = row["caption"]
    first_of = {}
    for character, drawn in images.items():
        first_of.setdefault(drawn[0].tobytes(), character)
    names = list(first_of.values())
    # Pillow's own font, for machines that have no other, knows no Cyrillic.
    held_out = [name for name in names if "cyrillic" in captions[name]] or names[::5]
    train = [images[name] for name in names if name not in held_out]
    return train, [images[name] for name in held_out]


def make_collate_fn(characters, num_ways, num_shots):
    """A task of each seed: pixels (tasks, images, SIZE²) around 0, labels (tasks, images)."""

    def draw_task(seed):
        rng = np.random.default_rng(seed)
        ways = []
        for index in rng.choice(len(characters), num_ways, replace=False):
            images = characters[index]
            order = rng.permutation(len(images))
            of_support = order[: max(min(num_shots, len(order) - 1), 1)]
            of_queries = order[len(of_support) :] if len(order) > 1 else order
            fonts = [*np.resize(of_support, num_shots), *np.resize(of_queries, NUM_QUERIES)]
            shifts = rng.integers(-MAX_SHIFT, MAX_SHIFT + 1, (len(fonts), 2))
            drawn = zip(fonts, shifts, strict=True)
            ways.append([np.roll(images[i], by, (0, 1)) for i, by in drawn])
        return np.array(ways, np.float32) / 255 - 0.15

    def collate_fn(seeds):
        images = np.stack([draw_task(seed) for seed in seeds])
        batch = {"support": images[:, :, :num_shots], "query": images[:, :, num_shots:]}
        for name, of in list(batch.items()):
            batch[name] = of.reshape(len(seeds), -1, SIZE * SIZE)
            labels = np.repeat(np.arange(num_ways, dtype=np.int32), of.shape[2])
            batch[f"{name}_labels"] = np.tile(labels, (len(seeds), 1))
        return batch

    return collate_fn


def init_params(seed, num_ways):
    """Hidden layers, as the paper's network without convolutions."""
    sizes = [SIZE * SIZE, 256, 128, 64, 64, num_ways]
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    params = {}
    for i, (key, m, n) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True)):
        kernel = jax.random.normal(key, (m, n)) * jnp.sqrt(2 / m)
        params[f"layer{i}"] = {"kernel": kernel, "bias": jnp.zeros(n)}
    return params


def apply(params, x):
    """Logits (images, ways) of pixels (images, SIZE²)."""
    for i in range(len(params)):
        layer = params[f"layer{i}"]
        x = (jax.nn.relu(jax.nn.standardize(x)) if i else x) @ layer["kernel"] + layer["bias"]
    return x


def cross_entropy(params, images, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels)
    return jnp.mean(losses)


def adapt(params, task, rate):
    """Parameters after a gradient step on one task's support images."""
    grads = jax.grad(cross_entropy)(params, task["support"], task["support_labels"])
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def make_loss_fn(rate):
    def loss_of_task(params, task):
        return cross_entropy(adapt(params, task, rate), task["query"], task["query_labels"])

    def loss_fn(params, batch, rngs, is_training):
        losses = jax.vmap(loss_of_task, in_axes=(None, 0))(params, batch)
        return losses, jnp.ones_like(losses)

    return loss_fn


def make_pred_fn(rate):
    """Accuracy on the query images after 0, 1, …, TEST_STEPS gradient steps."""

    def accuracy(params, task):
        return jnp.mean(apply(params, task["query"]).argmax(axis=-1) == task["query_labels"])

    def accuracies_of_task(params, task):
        def step(params, _):
            return adapt(params, task, rate), accuracy(params, task)

        return jax.lax.scan(step, params, length=TEST_STEPS + 1)[1]

    def pred_fn(params, batch, rngs):
        return jax.vmap(accuracies_of_task, in_axes=(None, 0))(params, batch)

    return pred_fn


def nearest_accuracy(batch):
    """Accuracy of the label of that support image whose pixels are nearest."""
    distances = np.square(batch["query"][:, :, None] - batch["support"][:, None]).sum(axis=-1)
    found = np.take_along_axis(batch["support_labels"], distances.argmin(axis=-1), axis=1)
    return float(np.mean(found == batch["query_labels"]))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_ways", type=int, default=5)
    parser.add_argument("--num_shots", type=int, default=1)
    parser.add_argument("--inner_rate", type=float, default=0.4)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--num_tasks", type=int, default=16_000)
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    script = script_context()
    collate_train, collate_test = (
        make_collate_fn(characters, arguments.num_ways, arguments.num_shots)
        for characters in load_characters()
    )
    train, test = range(arguments.num_tasks), range(600)  # seeds of tasks

    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    params = init_params(arguments.seed, arguments.num_ways)
    # Read off the forward pass alone: the loss holds backward passes of it too.
    rules = deployer.get_sharding_rules(params, apply, collate_train(train[:1])["query"][0])
    trainer = Trainer(
        deployer,
        collate_fn=collate_train,
        loss_fn=make_loss_fn(arguments.inner_rate),
        params=params,
        optimizer=optax.adam(arguments.learning_rate),
        sharding_rules=rules,
        global_batch_size=32,
    )
    trainer.fit(train, num_epochs=arguments.num_epochs, log_every_steps=100, **script.fit_options())

    predictor = Predictor(
        deployer,
        collate_fn=collate_test,
        pred_fn=make_pred_fn(arguments.inner_rate),
        output_fn=list,
        sharding_rules=rules,
        batch_size=120,
    )
    found = np.mean(predictor.predict(test, trainer.state["params"]), axis=0)
    nearest, chance = nearest_accuracy(collate_test(test)), 1 / arguments.num_ways
    script.metrics(accuracy=found[-1], accuracy_of_nearest_pixels=nearest, chance=chance)
    print(f"accuracy {found[-1]:.3f} on new characters after {TEST_STEPS} gradient steps, ", end="")
    print(f"{found[0]:.3f} before; {nearest:.3f} of the nearest pixels, {chance:.3f} by chance")

    arguments.params.mkdir(parents=True, exist_ok=True)
    layers = jax.tree.map(np.asarray, trainer.state["params"]).items()
    arrays = {f"{layer}.{name}": x for layer, both in layers for name, x in both.items()}
    np.savez(arguments.params / "params.npz", **arrays)


if __name__ == "__main__":
    main()
