"""FedAvg on scikit-learn's digits: clients that know two digits each train one model of all ten.

    redco-flow run pipelines/fedavg.yaml               # as a stage: tracked, tried again, resumed
    python examples/fedavg.py --num_epochs 4           # by hand: everything below out/

McMahan et al. 2017, algorithm 1. The engine's example is a client, its step a round of the server:
the gradient of a client's loss is how far its own training moved the model, so that the server's
SGD with rate 1 takes the average of the clients' models, each weighted by its number of images.
Clients of one round train side by side, over all devices.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from redco_flow import Deployer, Predictor, Trainer, script_context

NUM_TEST = 360
LOCAL_BATCH_SIZE = 16


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


def split_over_clients(images, num_clients, seed):
    """Two shards of the images sorted by digit for each client, as in the paper."""
    ordered = sorted(images, key=lambda image: image["label"])
    shards = np.array_split(np.arange(len(ordered)), 2 * num_clients)
    mixed = np.random.default_rng(seed).permutation(2 * num_clients).reshape(-1, 2)
    return [[ordered[i] for shard in pair for i in shards[shard]] for pair in mixed]


def collate_images(images):
    return {
        "pixels": np.stack([image["pixels"] for image in images]).astype(np.float32),
        "label": np.array([image["label"] for image in images], np.int32),
    }


def make_collate_clients(num_places):
    """Each client's images in `num_places` places; `is_image` is 0 in those that are left."""

    def collate_clients(clients):
        batches = []
        for client in clients:
            num_left = num_places - len(client)
            batch = collate_images([*client, *client[:1] * num_left])
            batch["is_image"] = np.array([1.0] * len(client) + [0.0] * num_left, np.float32)
            batches.append(batch)
        return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}

    return collate_clients


def make_image_losses(model):
    def image_losses(params, batch):
        logits = model.apply({"params": params}, batch["pixels"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    return image_losses


def make_round_loss_fn(image_losses, num_local_epochs, rate):
    """The clients' mean loss before a round, whose gradient is the mean of `start - trained`."""

    def mean_loss(params, batch):
        is_image = batch["is_image"]
        return image_losses(params, batch) @ is_image / jnp.maximum(is_image.sum(), 1)

    def train_client(params, client, key):
        num_batches = client["label"].size // LOCAL_BATCH_SIZE

        def step(params, places):
            gradients = jax.grad(mean_loss)(params, jax.tree.map(lambda x: x[places], client))
            return jax.tree.map(lambda p, g: p - rate * g, params, gradients), None

        def order(key):
            return jax.random.permutation(key, client["label"].size).reshape(num_batches, -1)

        places = jnp.concatenate([order(k) for k in jax.random.split(key, num_local_epochs)])
        return jax.lax.scan(step, params, places)[0]

    def client_loss(params, client, key):
        start = jax.lax.stop_gradient(params)
        moved = jax.tree.map(jnp.subtract, start, train_client(start, client, key))
        along = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, params, moved)))
        # The value is that of the loss; the gradient is `moved`.
        return mean_loss(start, client) + along - jax.lax.stop_gradient(along)

    def loss_fn(params, batch, rngs, is_training):
        losses = jax.vmap(client_loss, in_axes=(None, 0, 0))(params, batch, rngs)
        num_images = batch["is_image"].sum(axis=1)
        return losses * num_images, num_images

    return loss_fn


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_clients", type=int, default=48)
    parser.add_argument("--clients_per_round", type=int, default=16)
    parser.add_argument("--num_local_epochs", type=int, default=5)
    parser.add_argument("--num_epochs", type=int, default=20, help="rounds of each client")
    parser.add_argument("--learning_rate", type=float, default=0.2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    script = script_context()
    train, test = load_images(arguments.seed)
    clients = split_over_clients(train, arguments.num_clients, arguments.seed)
    largest = max(len(client) for client in clients)
    num_places = -(-largest // LOCAL_BATCH_SIZE) * LOCAL_BATCH_SIZE

    model = Classifier(arguments.width)
    image_losses = make_image_losses(model)
    params = model.init(jax.random.key(arguments.seed), np.zeros((1, 64)))["params"]
    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    rules = deployer.get_sharding_rules(params, image_losses, collate_images(train[:2]))
    federated = Trainer(
        deployer,
        collate_fn=make_collate_clients(num_places),
        loss_fn=make_round_loss_fn(
            image_losses, arguments.num_local_epochs, arguments.learning_rate
        ),
        params=params,
        optimizer=optax.sgd(1.0),
        sharding_rules=rules,
        global_batch_size=arguments.clients_per_round,
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

    options = script.fit_options()
    federated.fit(clients, num_epochs=arguments.num_epochs, eval_fn=accuracy, **options)

    central = Trainer(
        deployer,
        collate_fn=collate_images,
        loss_fn=lambda params, batch, *_: image_losses(params, batch).mean(),
        params=params,
        optimizer=optax.sgd(arguments.learning_rate),
        sharding_rules=rules,
        global_batch_size=LOCAL_BATCH_SIZE,
    )
    central.fit(train, num_epochs=arguments.num_epochs, log_every_steps=1000)

    centralised = accuracy(central.state["params"])["accuracy"]
    averaged = accuracy(federated.state["params"])["accuracy"]
    commonest = np.bincount([image["label"] for image in train]).argmax()
    majority = float(np.mean([image["label"] == commonest for image in test]))
    script.metrics(
        accuracy=averaged, accuracy_of_centralised=centralised, accuracy_of_majority=majority
    )
    print(f"accuracy {averaged:.3f} of federated averaging after {federated.step} rounds, ", end="")
    print(f"{centralised:.3f} of centralised training; {majority:.3f} of the commonest digit")

    arguments.params.mkdir(parents=True, exist_ok=True)
    flat = jax.tree_util.tree_leaves_with_path(federated.state["params"])
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in flat}
    np.savez(arguments.params / "params.npz", **jax.tree.map(np.asarray, arrays))


if __name__ == "__main__":
    main()
