"""A whole T5 over data and model shards: the losses of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.data.order import epoch_order
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model

t5 = find_model("t5")

SIZES = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 4,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 8,
    "dropout_rate": 0.0,
}
CONFIG = t5.Config(**SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def examples():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(16):
        length = rng.integers(2, 9)
        row = {"source": np.zeros(8, np.int32), "target": np.full(6, -100, np.int32)}
        row["source"][:length] = rng.integers(2, 96, length)
        row["target"][: (length + 1) // 2] = rng.integers(2, 96, (length + 1) // 2)
        rows.append(row)
    return rows


def collate(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def loss_of(config):
    def loss(params, batch, rngs, is_training):
        labels = batch["target"]
        shifted = jnp.pad(jnp.maximum(labels, 0)[:, :-1], ((0, 0), (1, 0)))
        mask = (batch["source"] != 0).astype(jnp.int32)
        keys = rngs if is_training else None
        logits = t5.apply(config, params, batch["source"], mask, shifted, rngs=keys)
        return cross_entropy(logits, labels)

    return loss


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_log(self, record):
        self.values.append(record["loss"])


def train(config, deployer):
    heard = Losses()
    params = t5.init_params(config, jax.random.key(0))
    batch = collate(examples()[:2])
    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss_of(config),
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=deployer.get_sharding_rules(params, loss_of(config), batch, None, False),
        global_batch_size=8,
        per_device_batch_size=1 if deployer.num_data_shards > 1 else 2,
        max_grad_norm=1.0,
        seed=1,
    )
    trainer.fit(examples(), num_epochs=1, callbacks=[heard], log_every_steps=1)
    return trainer, heard.values


def by_hand(config):
    """The same two steps with bare JAX on one device: no micro-batches, masks or shards."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = t5.init_params(config, jax.random.key(0))
    state, losses = optimizer.init(params), []
    order = epoch_order(16, 1, 0)

    @jax.jit
    def update(params, state, batch):
        def mean(params):
            totals, weights = loss_of(config)(params, batch, None, False)
            return totals.sum() / weights.sum()

        value, gradients = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for start in range(0, 16, 8):
        batch = collate([examples()[i] for i in order[start : start + 8]])
        params, state, value = update(params, state, batch)
        losses.append(float(value))
    return losses


@pytest.mark.slow
@pytest.mark.covers("one device", family="t5", mesh="data × model")
def test_losses_are_those_of_one_device_over_model_shards():
    """Engine case 12, for the model that the pipelines train."""
    trainer, losses = train(CONFIG, Deployer(4))

    np.testing.assert_allclose(losses, by_hand(CONFIG), rtol=1e-5)
    rules = trainer.sharding_rules
    # Norms only: everything else divides by 4.
    assert rules.replicated_bytes / rules.total_bytes < 0.01
    on_one_device = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trainer.state["params"])
    )
    assert on_one_device == rules.bytes_per_device
