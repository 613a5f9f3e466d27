"""A mixture of experts in training: the same steps on any mesh, factors for each expert."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer
from redco_flow.engine.lora import plan_lora
from redco_flow.engine.loss import cross_entropy
from redco_flow.models import mixtral
from redco_flow.models.find import find_model

VOCAB, LENGTH, EXPERTS = 64, 40, 4
CONFIG = find_model("mixtral").Config.from_hugging_face(
    {
        "model_type": "mixtral", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_local_experts": EXPERTS, "max_position_embeddings": LENGTH,
    }
)  # fmt: skip


def loss(params, batch, rngs, is_training):
    logits = mixtral.apply(CONFIG, params, batch["ids"])
    return cross_entropy(logits[:, :-1], batch["ids"][:, 1:])


def examples(count):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(2, VOCAB, LENGTH).astype(np.int32)} for _ in range(count)]


def collate(rows):
    return {"ids": np.stack([row["ids"] for row in rows])}


def train(deployer):
    """Two steps with plain gradient descent, which enlarges no rounding error."""
    params = mixtral.init_params(CONFIG, jax.random.key(0))
    rules = deployer.get_sharding_rules(params, loss, collate(examples(2)), None, False)
    trainer = Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss,
        params=params,
        optimizer=optax.sgd(1.0),
        sharding_rules=rules,
        global_batch_size=8,
    )
    trainer.fit(examples(16), num_epochs=1)
    return jax.device_get(trainer.state["params"])


@pytest.fixture(scope="module")
def alone():
    return train(Deployer(1, devices=jax.devices()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards",
    [
        {"num_model_shards": 2},
        {"num_model_shards": 2, "num_fsdp_shards": 4},
        {"num_model_shards": 2, "num_fsdp_shards": 2, "num_context_shards": 2},
    ],
    ids=["data and model", "fsdp and model", "fsdp, context and model"],
)
def test_training_a_mixture_gives_the_same_parameters_on_any_mesh(alone, shards):
    """Engine case 12."""
    found = train(Deployer(**shards))

    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * np.abs(two).max())


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
