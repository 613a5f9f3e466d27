"""The two rules on state-space and other blocks: layouts, exactness, what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.sharding.two_rules import derive_rules
from redco_flow.engine.step.loss import cross_entropy
from tests.engine.modern_blocks import MODELS, SCANNED, B, D, Mamba1, T
from tests.engine.traffic import wire_bytes


def derived(model, num_model_shards):
    inputs = jax.ShapeDtypeStruct((B, *model.shape), model.dtype)
    sizes = {"data": 1, "model": num_model_shards}
    return derive_rules(model.params, sizes, model.forward, (inputs,)).parameters


@pytest.mark.parametrize("name", MODELS)
def test_each_block_gets_the_layout_that_megatron_would_give_it(name):
    """Engine case 11: inner width, heads, hidden units, channels and rows of tables."""
    model = MODELS[name]

    found = {p.path: p.spec for p in derived(model, 4)}

    assert found == dict.fromkeys(found, P()) | model.plan


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_log(self, record):
        self.values.append(record["loss"])


def collate(examples):
    return {key: np.stack([one[key] for one in examples]) for key in examples[0]}


def loss_of(model):
    def loss_fn(params, batch, rngs, is_training):
        outputs = model.forward(params, batch["inputs"])
        if outputs.ndim == 3:
            return cross_entropy(outputs, batch["labels"])
        rows = outputs.reshape(B, -1)
        return jnp.sin(rows).sum(1), jnp.ones(B)

    return loss_fn


def by_hand(model):
    """Return the mean loss and its gradients on one device, without the engine."""

    def mean(params, batch):
        totals, weights = loss_of(model)(params, batch, None, True)
        return totals.sum() / weights.sum()

    loss, gradients = jax.jit(jax.value_and_grad(mean))(model.params, collate(model.examples()))
    return loss, jax.tree.leaves(gradients)


def train_once(model, num_model_shards):
    """Return loss and gradients of one step, and the step's program."""
    loss_fn = loss_of(model)
    deployer = Deployer(num_model_shards, devices=jax.devices()[:num_model_shards])
    batch = collate(model.examples())
    trainer = Trainer(
        deployer, collate_fn=collate, loss_fn=loss_fn, params=model.params,
        # Its momentum after one step is the gradient.
        optimizer=optax.sgd(1.0, momentum=0.9), global_batch_size=B,
        sharding_rules=deployer.get_sharding_rules(model.params, loss_fn, batch, None, False),
    )  # fmt: skip
    losses = Losses()
    trainer.fit(model.examples(), num_epochs=1, callbacks=[losses], log_every_steps=1)
    gradients = jax.tree.leaves(jax.device_get(trainer.state["opt_state"]))
    return losses.values, gradients, lambda: trainer.plan.compile(batch).as_text()


TRAINED = (
    "selective scan, associative", "state-space duality", "gated linear attention", "recommender",
    "U-Net",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_each_block_trains_as_on_one_device_and_sends_the_optimum(name):
    """Engine cases 12 and 17: gradients are exact, and the number of all-reduces is minimal.

    Five kernels of gated linear attention read one array, whose gradient is reduced once.
    """
    model = MODELS[name]
    expected_loss, expected = by_hand(model)
    scale = max(np.abs(x).max() for x in expected)

    num_shards = 4
    loss, gradients, program = train_once(model, num_shards)

    np.testing.assert_allclose(loss, [expected_loss], rtol=1e-5)
    for one, two in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5 * scale)
    ring = 2 * (num_shards - 1) / num_shards * np.float32().nbytes * B
    sent = wire_bytes(program()) / ring
    # The loss over a split vocabulary and the gradients' norm are a few numbers.
    assert model.reduced <= sent <= 1.06 * model.reduced


@pytest.mark.parametrize("is_rematerialised", [False, True])
def test_scanned_layers_of_a_block_get_its_layout(is_rematerialised):
    mixer = Mamba1()
    hidden = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
    one = jax.eval_shape(mixer.init, jax.random.key(0), hidden)["params"]
    layers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), one)

    def layer(hidden, params):
        return hidden + mixer.apply({"params": params}, hidden), None

    def forward(layers, hidden):
        body = jax.checkpoint(layer) if is_rematerialised else layer
        return jax.lax.scan(body, hidden, layers)[0]

    found = derive_rules(layers, {"data": 1, "model": 4}, forward, (hidden,)).parameters

    expected = SCANNED | {"in/kernel": P(None, "model")}
    assert {p.path: p.spec for p in found} == {n: P(None, *s) for n, s in expected.items()}
