"""What two processes compute together is what one does: one pair of them for all of this."""

import jax
import numpy as np
import pytest

START = """
import json, sys
rank, num_processes, port = map(int, sys.argv[1:4])
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
"""
COMPUTE = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np, optax
from redco_flow import Deployer, Predictor, Rounds, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model

# A step over context shards.

def first_step(deployer):
    llama = find_model("llama")
    config = llama.Config.from_hugging_face({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "bos_token_id": 2, "eos_token_id": 1,
    })

    def loss(params, batch, rngs, is_training):
        logits = llama.apply(config, params, batch["ids"])
        return cross_entropy(logits[:, :-1], batch["ids"][:, 1:])

    rng = np.random.default_rng(0)
    trainer = Trainer(
        deployer,
        collate_fn=lambda rows: {"ids": np.stack(rows)},
        loss_fn=loss,
        params=jax.tree.map(
            lambda leaf: 0.1 * rng.normal(size=leaf.shape).astype(np.float32),
            llama.abstract_params(config),
        ),
        optimizer=optax.sgd(1.0),
        global_batch_size=4,
    )
    examples = list(rng.integers(0, 64, (4, 13)).astype(np.int32))
    with trainer.read_batches(examples, 0, 1) as batches:
        (batch,) = trainer.device_batches(batches)
        metrics = jax.device_get(trainer.advance(batch))
    return {name: float(metrics[name]) for name in ("total", "weight", "grad_norm")}

# A training over model shards, and its checkpoints.

rng = np.random.default_rng(0)
params = {
    "up": rng.normal(size=(8, 16)).astype(np.float32) / 4,
    "down": rng.normal(size=(16, 8)).astype(np.float32) / 4,
}
pairs = list(rng.normal(size=(21, 2, 8)).astype(np.float32))

def collate_pairs(rows):
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
    rules = deployer.get_sharding_rules(params, loss, collate_pairs(pairs[:2]), None, False)
    trainer = Trainer(
        deployer,
        collate_fn=collate_pairs,
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
            pairs, num_epochs=num_epochs, checkpointer=checkpointer, callbacks=[losses],
            log_every_steps=1,
        )
    return result.start_step, losses.found

# Rounds, whose examples are drawn with the parameters so far, and their carry.

collate_points = lambda rows: {"x": np.stack(rows).astype(np.float32)}

def draw(params, batch, rngs):
    return batch["x"] + params["mean"] + jax.vmap(lambda key: jax.random.normal(key, (3,)))(rngs)

def train_in_rounds(deployer, directory, num_epochs):
    predictor = Predictor(deployer, collate_fn=collate_points, pred_fn=draw, batch_size=4)

    def collect(params, number, carry):
        points = np.random.default_rng(number).normal(size=(9, 3)).astype(np.float32)
        drawn = predictor.bind(params)({"x": points}, seed=number)
        return list(drawn + carry["sum"]), {"sum": carry["sum"] + drawn.mean(axis=0)}

    trainer = Trainer(
        deployer,
        collate_fn=collate_points,
        loss_fn=lambda params, batch, *_: jnp.mean((batch["x"] - params["mean"]) ** 2),
        params={"mean": np.zeros(3)},
        optimizer=optax.adam(0.1),
        global_batch_size=4,
    )
    rounds = Rounds(collect, num_examples=9, carry={"sum": np.zeros(3, np.float32)})
    with Checkpointer(directory) as checkpointer:
        result = trainer.fit(rounds, num_epochs=num_epochs, checkpointer=checkpointer)
        like = {**trainer.state, "carry": rounds.carry}
        carry = checkpointer.restore(like=like)[0]["carry"]
    return result.start_step, np.asarray(trainer.state["params"]["mean"]), carry["sum"]

def resumed_rounds(deployer, directory):
    train_in_rounds(deployer, directory, 1)
    return train_in_rounds(deployer, directory, 3)

# Predictions in buckets of like length.

lengths = np.random.default_rng(0).integers(1, 40, 45)
rows = [np.arange(1, length + 1, dtype=np.float32) for length in lengths]
num_read = 0

def collate_rows(rows, width):
    global num_read
    num_read += len(rows)
    return {"x": np.stack([np.pad(row, (0, width - len(row))) for row in rows])}

def predict(params, batch, rngs):
    return {"sum": params["w"] * batch["x"].sum(axis=1), "drawn": jax.vmap(jax.random.bits)(rngs)}

def predicted(deployer):
    buckets = choose_buckets(lengths[:, None], 3)
    collates = tuple(partial(collate_rows, width=width) for (width,) in buckets.widths)
    predictor = Predictor(
        deployer, collate_fn=partial(collate_rows, width=40), pred_fn=predict, batch_size=4, seed=3
    )
    found = predictor.predict(
        rows, {"w": np.float32(2)}, bucketing=Bucketing(buckets, collates)
    )
    return [num_read, [[float(p["sum"]), int(p["drawn"])] for p in found]]
"""
END = """
folder = sys.argv[4]
over_context = Deployer(num_context_shards=4)
share = over_context.data_process
start_step, mean, carry = resumed_rounds(Deployer(), folder + "/rounds")
print(json.dumps({
    "context": [[share.index, share.count], first_step(over_context)],
    "training": train(Deployer(2), folder + "/training", 1),
    "rounds": [start_step, mean.tolist(), carry.tolist()],
    "predicted": predicted(Deployer()),
}), flush=True)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone():
    """The same functions in this process."""
    names = {}
    exec(COMPUTE, names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def both(folder, run_ranks):
    """What each of two processes found, which have two devices each."""
    return run_ranks(START + COMPUTE + END, 2, 2, folder)


def four_devices(alone, num_model_shards=1):
    return alone["Deployer"](num_model_shards, devices=jax.devices()[:4])


def test_context_shards_of_two_processes_take_the_step_of_one_device(alone, both):
    """Four span both processes, which read the same rows."""
    expected = alone["first_step"](alone["Deployer"](devices=jax.devices()[:1]))

    for one in both:
        share, numbers = one["context"]
        assert share == [0, 1]
        assert numbers == pytest.approx(expected, rel=1e-5)


def test_a_training_goes_on_with_fewer_processes(alone, both, folder, tmp_path):
    """Engine cases 31 and 47: two, then one; one all the way."""
    _, whole = alone["train"](four_devices(alone, 2), tmp_path, 2)

    start_step, rest = alone["train"](four_devices(alone, 2), folder / "training", 2)

    first, second = (one["training"] for one in both)
    assert first == second
    assert (first[0], start_step) == (0, 6)
    found = {int(step): loss for step, loss in first[1].items()} | rest
    assert list(found) == list(whole) == list(range(1, 13))
    # Sums over devices may be added in another order.
    assert found == pytest.approx(whole, rel=1e-5)


def test_rounds_over_two_processes_are_those_of_one(alone, both, tmp_path):
    """Each collects all examples, and resumes with the carry."""
    _, mean, carry = alone["resumed_rounds"](four_devices(alone), tmp_path)

    for one in both:
        start_step, other_mean, other_carry = one["rounds"]
        assert start_step == 3
        np.testing.assert_allclose(other_mean, mean, rtol=1e-5)
        np.testing.assert_allclose(other_carry, carry, rtol=1e-5)


def test_two_processes_predict_what_one_does_each_reading_half_of_the_rows(alone, both):
    """Engine cases 23 and 28: all ranks run equal numbers of steps; predictions come in input
    order, without padding.
    """
    num_rows, expected = alone["predicted"](four_devices(alone))

    halves = [one["predicted"] for one in both]
    assert [found for _, found in halves] == [expected, expected]
    assert [count for count, _ in halves] == [num_rows // 2] * 2
    assert [total for total, _ in expected] == [2 * float(row.sum()) for row in alone["rows"]]
