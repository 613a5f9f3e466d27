"""Vocabularies that the shards do not divide: padded on the devices, exact everywhere else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Predictor, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.sharding.storage import exact_spec
from redco_flow.engine.step.loss import cross_entropy

VOCAB, WIDTH, UNITS, LENGTH = 97, 16, 32, 6


def params(*, tied):
    rng = np.random.default_rng(0)
    dims = {"table": (VOCAB, WIDTH), "up": (WIDTH, UNITS), "down": (UNITS, WIDTH), "bias": (VOCAB,)}
    if not tied:
        dims["head"] = (WIDTH, VOCAB)
    return {name: rng.normal(size=d).astype(np.float32) * 0.3 for name, d in dims.items()}


def logits(params, ids):
    x = params["table"][ids]
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    head = params["head"] if "head" in params else params["table"].T
    return x @ head + params["bias"]


def loss(params, batch, rngs, is_training):
    return cross_entropy(logits(params, batch["ids"]), jnp.roll(batch["ids"], -1, 1))


def examples(count=16):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(0, VOCAB, LENGTH).astype(np.int32)} for _ in range(count)]


def collate(rows):
    return {"ids": np.stack([row["ids"] for row in rows])}


class Norms(Callback):
    def __init__(self):
        self.values = []

    def on_log(self, record):
        self.values += [record["loss"], record["grad_norm"]]


def trainer_of(num_model_shards, *, tied=True, optimizer=None):
    deployer = Deployer(num_model_shards, devices=jax.devices()[:4])
    start = params(tied=tied)
    rules = deployer.get_sharding_rules(start, loss, collate(examples(2)), None, False)
    return Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=start,
        optimizer=optimizer or optax.adamw(1e-2),
        sharding_rules=rules,
        global_batch_size=8,
        max_grad_norm=1.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "optimizer"),
    [
        (True, optax.adamw(1e-2, weight_decay=0.1)),
        (False, optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    ],
)
def test_training_is_that_of_one_shard(tied, optimizer):
    """Engine case 10: also the norm, and Adafactor's means over the vocabulary."""
    expected, found = Norms(), Norms()
    alone = trainer_of(1, tied=tied, optimizer=optimizer)
    alone.fit(examples(), num_epochs=2, callbacks=[expected], log_every_steps=1)

    split = trainer_of(4, tied=tied, optimizer=optimizer)
    split.fit(examples(), num_epochs=2, callbacks=[found], log_every_steps=1)

    np.testing.assert_allclose(found.values, expected.values, rtol=1e-5)
    for name, value in split.state["params"].items():
        assert value.shape == params(tied=tied)[name].shape
        np.testing.assert_allclose(value, alone.state["params"][name], rtol=1e-4, atol=2e-5)
    assert split.eval_loss(examples(5)) == pytest.approx(alone.eval_loss(examples(5)), rel=1e-5)


def step_collectives(trainer):
    """(operation, largest number of elements) of each collective of the compiled train step."""
    batches = trainer.read_batches(examples(8), 0, 1)
    with batches:
        batch = next(iter(trainer.device_batches(batches)))
    text = trainer.plan.train_step.lower(trainer._state, batch).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    found = []
    for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        sizes = [
            np.prod([int(n) for n in dims.split(",") if n])
            for dims in re.findall(r"\[([\d,]*)\]", shapes)
        ]
        found.append((kind, max(sizes)))
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_neither_logits_nor_tables_are_gathered_or_reduced(tied):
    """Engine case 10: nothing larger than the activations goes over the wire."""
    found = step_collectives(trainer_of(4, tied=tied))

    assert {kind for kind, _ in found} == {"all-reduce"}
    assert max(size for _, size in found) == 8 * LENGTH * WIDTH


def test_devices_hold_their_share_of_the_padded_table_and_of_its_optimizer_state():
    trainer = trainer_of(4)

    stored = trainer._state

    # 97 rows are 4 times 25, with 3 rows of padding.
    for tree in (stored["params"], stored["opt_state"][0].mu, stored["opt_state"][0].nu):
        assert tree["table"].addressable_shards[0].data.shape == (25, WIDTH)
        assert tree["bias"].addressable_shards[0].data.shape == (25,)
    on_one_device = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(stored["params"])
    )
    assert on_one_device == trainer.sharding_rules.bytes_per_device


def test_checkpoints_hold_exact_shapes_and_restore_bitwise_over_any_shards(tmp_path):
    """Engine cases 10, 15 and 47: the table is stored padded, and exact outside compiled steps;
    logits are never all-gathered; they stay tied after sharding, saving and loading; it is restored
    exactly.
    """
    split = trainer_of(4)
    with Checkpointer(tmp_path) as checkpointer:
        split.fit(examples(), num_epochs=1, checkpointer=checkpointer)

        for num_model_shards in (1, 2, 4):
            other = trainer_of(num_model_shards)
            other.restore(checkpointer)
            for one, two in zip(
                jax.tree.leaves(other.state), jax.tree.leaves(split.state), strict=True
            ):
                np.testing.assert_array_equal(one, two)
            assert other.state["params"]["table"].shape == (VOCAB, WIDTH)


def test_predictions_are_those_of_whole_parameters():
    def best(params, batch, rngs):
        return logits(params, batch["ids"]).argmax(-1)

    deployer, values = Deployer(4), params(tied=True)
    rules = deployer.get_sharding_rules(values, loss, collate(examples(2)), None, False)
    predictor = Predictor(
        deployer, collate_fn=collate, pred_fn=best, sharding_rules=rules, batch_size=4
    )

    found = predictor.predict(examples(6), values)

    np.testing.assert_array_equal(found, logits(values, collate(examples(6))["ids"]).argmax(-1))


def test_exact_arrays_lie_split_along_another_dim_where_one_divides():
    sizes = {"data": 2, "model": 4}

    assert exact_spec((97, 16), P("model"), sizes) == P(None, "model")
    assert exact_spec((96, 16), P("model"), sizes) == P("model", None)
    assert exact_spec((97, 3), P("model"), sizes) == P()
    assert exact_spec((97,), P("model"), sizes) == P()
