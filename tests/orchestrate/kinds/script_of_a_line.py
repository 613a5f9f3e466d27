"""A script that fits a line with the engine, and the stage that runs it."""

# y = 3 x + 1 by the engine; slow enough to be killed between two steps.
SCRIPT = """
import argparse, json, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
from line import apply
from redco_flow import Deployer, Trainer, script_context

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float, default=0.1)
parser.add_argument("--num_epochs", type=int, default=1)
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--rows", type=Path)
parser.add_argument("--params", type=Path)
a = parser.parse_args()

def collate_fn(rows):
    time.sleep(a.seconds)
    return {"x": np.array(rows, np.float32), "y": 3 * np.array(rows, np.float32) + 1}

def loss_fn(params, batch, rngs, is_training):
    noise = jax.vmap(jax.random.normal)(rngs) * 0.1 if is_training else 0.0
    losses = (apply(params, batch["x"]) - batch["y"] + noise) ** 2
    return losses, jnp.ones_like(losses)

rows = json.loads(a.rows.read_text())
params = {"w": np.zeros((), np.float32), "b": np.zeros((), np.float32)}
trainer = Trainer(Deployer(seed=0), collate_fn=collate_fn, loss_fn=loss_fn, params=params,
                  optimizer=optax.adam(a.learning_rate), global_batch_size=4)
script = script_context()
trainer.fit(rows, num_epochs=a.num_epochs, eval_examples=rows, log_every_steps=1,
            **script.fit_options())
np.save(a.params / "params.npy", np.array([trainer.state["params"]["w"],
                                           trainer.state["params"]["b"]]))
"""
PIPELINE = """
name: line
stages:
  fit:
    kind: script
    path: {folder}/fit.py
    arguments: {{num_epochs: 1}}
    inputs: {{rows: {folder}/rows.json}}
    outputs: [params]
"""


def write_line(folder):
    """Write the script, a module beside it and its rows; return the pipeline."""
    (folder / "fit.py").write_text(SCRIPT)
    (folder / "line.py").write_text("def apply(params, x): return params['w'] * x + params['b']\n")
    (folder / "rows.json").write_text(str([i / 32 for i in range(32)]))
    return PIPELINE.format(folder=folder)


def steps(attempt):
    """The steps that an attempt has logged."""
    return [one["step"] for one in attempt.read_metrics() if one["kind"] == "training"]


def is_in_second_epoch(attempt, workspace):
    """Whether its first eight steps are saved, which takes a while, and more are made."""
    is_saved = any((workspace.root / "work").glob("*/checkpoints/*/commit.json"))
    return is_saved and len(steps(attempt)) >= 13
