"""A mixture of experts in training: the same steps on any mesh, with its routers' loss too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.feed_forward.experts import load_balancing_losses
from redco_flow.models.find import find_model
from tests.drawn_params import draw_params
from tests.engine.traffic import read_collectives

mixtral = find_model("mixtral")

VOCAB, LENGTH, EXPERTS = 64, 40, 4
CONFIG = find_model("mixtral").Config.from_hugging_face(
    {
        "model_type": "mixtral", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_local_experts": EXPERTS, "max_position_embeddings": LENGTH,
    }
)  # fmt: skip


def padded_loss(params, batch, rngs, is_training):
    """Texts are of 1 to LENGTH tokens, padded with 0."""
    return read_padded(params, batch["ids"])[0]


def balanced_loss(params, batch, rngs, is_training):
    """The same and the routers' loss, which weighs a lot."""
    (totals, weights), router_logits = read_padded(params, batch["ids"])
    losses = load_balancing_losses(router_logits, CONFIG.num_experts_per_tok, batch["ids"][:, :-1])
    balance = jnp.sum(losses * (batch["ids"][:, 1:] > 0), axis=1)
    return totals + balance, weights, {"balance": balance}


def read_padded(params, ids):
    logits, router_logits = mixtral.apply_with_router(CONFIG, params, ids[:, :-1], ids[:, :-1])
    labels = ids[:, 1:]
    return cross_entropy(logits, jnp.where(labels == 0, -100, labels)), router_logits


def examples(count):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(2, VOCAB, LENGTH).astype(np.int32)} for _ in range(count)]


def unequal_examples(count):
    kept = [np.arange(LENGTH) < 1 + (7 * n) % LENGTH for n in range(count)]
    return [
        {"ids": row["ids"] * is_kept} for row, is_kept in zip(examples(count), kept, strict=True)
    ]


def collate(rows):
    return {"ids": np.stack([row["ids"] for row in rows])}


class Records(Callback):
    def __init__(self):
        self.logged = []

    def on_log(self, record):
        self.logged.append(record)


def train(deployer, rows, **options):
    """Train with plain gradient descent, which enlarges no rounding error."""
    params = draw_params(mixtral, CONFIG, stddev=0.1)
    rules = deployer.get_sharding_rules(params, balanced_loss, collate(rows[:2]), None, False)
    options = {"global_batch_size": 8} | options
    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=balanced_loss,
        params=params,
        optimizer=optax.sgd(1.0),
        sharding_rules=rules,
        **options,
    )
    records = Records()
    trainer.fit(rows, num_epochs=1, callbacks=[records], log_every_steps=1)
    return jax.device_get(trainer.state["params"]), records.logged


def assert_near(found, expected):
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * np.abs(two).max())


@pytest.mark.slow
@pytest.mark.covers("one device", family="mixtral", mesh="data × fsdp × context")
def test_training_a_mixture_with_load_balancing_does_not_depend_on_mesh_and_micro_batches():
    """Engine cases 12, 35 and 36: those of one device; the loss is the mean over tokens.

    The last batch is partial.
    """
    deployer = Deployer(num_fsdp_shards=2, num_context_shards=2)

    found = train(deployer, unequal_examples(13), per_device_batch_size=1)

    expected = train(Deployer(devices=jax.devices()[:1]), unequal_examples(13))
    assert_near(found[0], expected[0])
    for name in ("loss", "balance"):
        of_found, of_expected = ([record[name] for record in one[1]] for one in (found, expected))
        np.testing.assert_allclose(of_found, of_expected, rtol=1e-5)


@pytest.mark.slow
def test_load_balancing_sends_one_number_more_between_devices():
    deployer = Deployer(2)
    batch = {"ids": jax.ShapeDtypeStruct((8, LENGTH), jnp.int32)}
    params = mixtral.abstract_params(CONFIG)

    def exchanged(loss_fn):
        rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
        step = TrainingPlan(
            deployer,
            loss_fn=loss_fn,
            params=params,
            optimizer=optax.sgd(1.0),
            sharding_rules=rules,
            global_batch_size=8,
        ).lower(batch)
        return sum(one.num_bytes for one in read_collectives(step.compile().as_text()))

    # The sum over the batch that is logged: one float32.
    assert exchanged(balanced_loss) - exchanged(padded_loss) == 4


@pytest.mark.parametrize("length", [4, LENGTH], ids=["few tokens", "many tokens"])
def test_experts_layout_and_factors_are_the_same_however_many_tokens_are_traced(length):
    """Engine case 14: parameters have random names."""
    leaves, structure = jax.tree.flatten_with_path(mixtral.abstract_params(CONFIG))
    names = [f"p{place}" for place in np.random.default_rng(0).permutation(len(leaves))]
    params = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}
    origin = {name: path[-1].key for name, (path, _) in zip(names, leaves, strict=True)}

    def renamed(params, ids):
        original = jax.tree.unflatten(structure, [params[name] for name in names])
        return mixtral.apply(CONFIG, original, ids)

    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    rules = Deployer(4, devices=jax.devices()[:4]).get_sharding_rules(params, renamed, ids)
    lora = plan_lora(params, renamed, ids, rank=2, alpha=2.0, targets=".")

    specs = {origin[parameter.path]: parameter.spec for parameter in rules.parameters}
    assert specs["wi"] == P(None, None, None, None, "model")
    assert specs["wo"] == P(None, None, "model")
    assert specs["router"] == P()
    stacks = {origin[target.path]: target.stack for target in lora.targets}
    assert stacks["wi"] == stacks["wo"] == (0, 1)
