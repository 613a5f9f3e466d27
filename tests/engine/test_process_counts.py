"""A training that goes on with another number of processes than it began with."""

import pytest

TRAIN = """
import json, sys
rank, num_processes, port, num_epochs = map(int, sys.argv[1:5])
directory = sys.argv[5]
import jax, jax.numpy as jnp, numpy as np, optax
if num_processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
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
    found = {}

    def on_log(self, record):
        self.found[record["step"]] = record["loss"]

deployer = Deployer(2)
trainer = Trainer(
    deployer,
    collate_fn=collate,
    loss_fn=loss,
    params=params,
    optimizer=optax.adamw(1e-2),
    sharding_rules=deployer.get_sharding_rules(params, loss, collate(examples[:2]), None, False),
    global_batch_size=4,
    seed=3,
)
with Checkpointer(directory) as checkpointer:
    result = trainer.fit(
        examples, num_epochs=num_epochs, checkpointer=checkpointer, callbacks=[Losses()],
        log_every_steps=1,
    )
print(json.dumps([result.start_step, Losses.found]), flush=True)
"""


@pytest.mark.slow
def test_a_training_goes_on_with_fewer_processes(tmp_path, run_ranks):
    """Engine cases 31 and 47: two, then one; one all the way."""

    def train(directory, num_processes, num_epochs):
        """Over four devices: where each process began, and its losses by step."""
        return run_ranks(TRAIN, num_processes, 4 // num_processes, num_epochs, directory)

    ((_, whole),) = train(tmp_path / "whole", 1, 2)

    found = {}
    for num_epochs, num_processes in ((1, 2), (2, 1)):
        attempt = train(tmp_path / "changed", num_processes, num_epochs)
        for start_step, losses in attempt:
            assert start_step == 6 * (num_epochs - 1)
            assert losses == attempt[0][1]
        found |= attempt[0][1]

    assert list(found) == list(whole) == [str(step) for step in range(1, 13)]
    # Sums over devices may be added in another order.
    assert found == pytest.approx(whole, rel=1e-5)
