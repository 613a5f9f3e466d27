"""A training that goes on with another number of processes than it began with."""

import jax
import pytest

START = """
import json, sys
rank, num_processes, port, num_epochs = map(int, sys.argv[1:5])
import jax
if num_processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
"""
TRAIN = """
import jax, jax.numpy as jnp, numpy as np, optax
from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer

rng = np.random.default_rng(0)
params = {
    "up": rng.normal(size=(8, 16)).astype(np.float32) / 4,
    "down": rng.normal(size=(16, 8)).astype(np.float32) / 4,
}
examples = list(rng.normal(size=(21, 2, 8)).astype(np.float32))

def collate(rows):
    return {"x": np.stack(rows)[:, 0], "y": np.stack(rows)[:, 1]}

def loss(params, batch, rngs, is_training):
    x = batch["x"]
    if is_training:  # dropout: every process count must draw the same
        x = x * jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (8,)))(rngs)
    errors = (jnp.tanh(x @ params["up"]) @ params["down"] + batch["x"] - batch["y"]) ** 2
    return errors.mean(axis=1), jnp.ones(len(errors))

class Losses(Callback):
    def __init__(self):
        self.found = {}

    def on_log(self, record):
        self.found[record["step"]] = record["loss"]

def train(deployer, directory, num_epochs):
    rules = deployer.get_sharding_rules(params, loss, collate(examples[:2]), None, False)
    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=params,
        optimizer=optax.adamw(1e-2),
        sharding_rules=rules,
        global_batch_size=4,
        seed=3,
    )
    losses = Losses()
    with Checkpointer(directory) as checkpointer:
        result = trainer.fit(
            examples, num_epochs=num_epochs, checkpointer=checkpointer, callbacks=[losses],
            log_every_steps=1,
        )
    return result.start_step, losses.found
"""
END = """
print(json.dumps(train(Deployer(2), sys.argv[5], num_epochs)), flush=True)
"""


@pytest.mark.slow
def test_a_training_goes_on_with_fewer_processes(tmp_path, run_ranks):
    """Engine cases 31 and 47: two, then one; one all the way."""

    names: dict = {}
    exec(TRAIN, names)
    deployer = names["Deployer"](2, devices=jax.devices()[:4])
    _, whole = names["train"](deployer, tmp_path / "whole", 2)

    both = run_ranks(START + TRAIN + END, 2, 2, 1, tmp_path / "changed")
    start_step, rest = names["train"](deployer, tmp_path / "changed", 2)

    assert both[0] == both[1]
    assert (both[0][0], start_step) == (0, 6)
    found = {int(step): loss for step, loss in both[0][1].items()} | rest
    assert list(found) == list(whole) == list(range(1, 13))
    # Sums over devices may be added in another order.
    assert found == pytest.approx(whole, rel=1e-5)
