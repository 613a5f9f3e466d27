"""MAML on sinusoids: a network that fits a new curve after a few gradient steps on ten points.

    redco-flow run pipelines/maml.yaml                 # as a stage: tracked, tried again, resumed
    python examples/maml.py --num_epochs 1             # by hand: everything below out/

Finn, Abbeel and Levine 2017, section 5.1. `loss_fn` is the loss of a task's query points after the
inner gradient steps on its support points: the engine sees a loss like any other.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_flow import Deployer, Predictor, Trainer, script_context

NUM_POINTS = 10  # of the support set, and as many of the query set
TEST_STEPS = 10  # gradient steps on a test task's support points


def init_params(seed, width):
    """Two hidden layers, as in the paper."""
    sizes = [1, width, width, 1]
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return {
        f"layer{i}": {
            "kernel": jax.random.normal(key, (m, n)) * jnp.sqrt(1 / m),
            "bias": jnp.zeros(n),
        }
        for i, (key, m, n) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True))
    }


def apply(params, x):
    """Curve values (points, 1) at x (points, 1)."""
    for i in range(len(params)):
        layer = params[f"layer{i}"]
        x = (jax.nn.relu(x) if i else x) @ layer["kernel"] + layer["bias"]
    return x


def mse(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def adapt(params, x, y, num_steps, rate):
    """Parameters after gradient steps on one task's support points."""
    for _ in range(num_steps):
        grads = jax.grad(mse)(params, x, y)
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return params


def sample_tasks(num_tasks, seed):
    """Sinusoids of random amplitude and phase, each at 2 * NUM_POINTS random places."""
    rng = np.random.default_rng(seed)
    amplitude = rng.uniform(0.1, 5.0, (num_tasks, 1))
    phase = rng.uniform(0, np.pi, (num_tasks, 1))
    x = rng.uniform(-5, 5, (num_tasks, 2 * NUM_POINTS))
    y = amplitude * np.sin(x - phase)
    return [{"x": row_x, "y": row_y} for row_x, row_y in zip(x, y, strict=True)]


def collate_fn(tasks):
    """Support and query points of each task: (tasks, NUM_POINTS, 1)."""
    batch = {}
    for name in ("x", "y"):
        values = np.stack([task[name] for task in tasks]).astype(np.float32)[..., None]
        batch[f"support_{name}"], batch[f"query_{name}"] = np.split(values, 2, axis=1)
    return batch


def make_loss_fn(num_steps, rate):
    def loss_of_task(params, task):
        adapted = adapt(params, task["support_x"], task["support_y"], num_steps, rate)
        return mse(adapted, task["query_x"], task["query_y"])

    def loss_fn(params, batch, rngs, is_training):
        losses = jax.vmap(loss_of_task, in_axes=(None, 0))(params, batch)
        return losses, jnp.ones_like(losses)

    return loss_fn


def make_pred_fn(rate):
    """Squared error on the query points after 0, 1, …, TEST_STEPS gradient steps."""

    def errors_of_task(params, task):
        def step(params, _):
            adapted = adapt(params, task["support_x"], task["support_y"], 1, rate)
            return adapted, mse(params, task["query_x"], task["query_y"])

        return jax.lax.scan(step, params, length=TEST_STEPS + 1)[1]

    def pred_fn(params, batch, rngs):
        return jax.vmap(errors_of_task, in_axes=(None, 0))(params, batch)

    return pred_fn


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inner_steps", type=int, default=1)
    parser.add_argument("--inner_rate", type=float, default=0.01)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=40)
    parser.add_argument("--num_tasks", type=int, default=24_000)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    parser.add_argument("--curve", type=Path, default="out/curve")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    script = script_context()
    train = sample_tasks(arguments.num_tasks, arguments.seed)
    test = sample_tasks(1000, arguments.seed + 1)

    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    loss_fn = make_loss_fn(arguments.inner_steps, arguments.inner_rate)
    params = init_params(arguments.seed, arguments.width)
    # Read off the forward pass alone: the loss holds backward passes of it too.
    rules = deployer.get_sharding_rules(params, apply, collate_fn(train[:1])["query_x"][0])
    trainer = Trainer(
        deployer,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adam(arguments.learning_rate),
        sharding_rules=rules,
        global_batch_size=24,
    )
    trainer.fit(train, num_epochs=arguments.num_epochs, log_every_steps=100, **script.fit_options())

    predictor = Predictor(
        deployer,
        collate_fn=collate_fn,
        pred_fn=make_pred_fn(arguments.inner_rate),
        output_fn=list,
        sharding_rules=rules,
        batch_size=240,
    )
    errors = np.mean(predictor.predict(test, trainer.state["params"]), axis=0)
    baseline = float(np.mean([np.square(task["y"]) for task in test]))  # of predicting 0 everywhere
    script.metrics(mse=errors[-1], mse_before_adapting=errors[0], mse_of_predicting_zero=baseline)
    print(f"squared error {errors[-1]:.3f} after {TEST_STEPS} gradient steps, ", end="")
    print(f"{errors[0]:.3f} before them; {baseline:.3f} of predicting 0")

    for folder in (arguments.params, arguments.curve):
        folder.mkdir(parents=True, exist_ok=True)
    flat = jax.tree_util.tree_leaves_with_path(trainer.state["params"])
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in flat}
    np.savez(arguments.params / "params.npz", **jax.tree.map(np.asarray, arrays))
    (arguments.curve / "mse_by_step.json").write_text(json.dumps([float(e) for e in errors]))


if __name__ == "__main__":
    main()
