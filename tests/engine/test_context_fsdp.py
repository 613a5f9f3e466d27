"""Parameters split over `context` as over `fsdp`: the same steps, a share of the bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.sharding.fsdp import STATE_SHARE
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model
from tests.drawn_params import draw_params, numbered
from tests.engine.traffic import Collective, read_collectives

llama = find_model("llama")

LENGTH, VOCAB = 16, 64
CONFIG = llama.Config.from_hugging_face(
    {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "bos_token_id": 2, "eos_token_id": 1,
    }
)  # fmt: skip
# (data, fsdp, context, model)
MESHES = [(1, 1, 8, 1), (1, 2, 2, 2)]
SMALL = 2  # norms, which stay whole


def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
    ids = batch["ids"]
    logits = llama.apply(CONFIG, params, ids, (ids != 0).astype(jnp.int32))
    labels = jnp.where(ids == 0, -100, ids)
    return cross_entropy(logits[:, :-1], labels[:, 1:])


def collate(rows: Any) -> dict[str, np.ndarray]:
    return {"ids": np.stack(rows)}


def examples(count: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.integers(3, VOCAB, (count, LENGTH)).astype(np.int32)
    for row, length in zip(rows, rng.integers(2, LENGTH + 1, count), strict=True):
        row[length:] = 0
    return list(rows)


def deployer_of(data: int, fsdp: int, context: int, model: int, *, over: bool = True) -> Deployer:
    return Deployer(
        model,
        num_context_shards=context,
        num_fsdp_shards=fsdp,
        fsdp_over_context=over,
        devices=jax.devices()[: data * fsdp * context * model],
    )


def rules_of(deployer: Deployer, **options: Any) -> ShardingRules:
    shapes, batch = llama.abstract_params(CONFIG), collate(examples(2))
    return deployer.get_sharding_rules(shapes, loss_fn, batch, None, False, **options)


def trainer_of(deployer: Deployer) -> Trainer:
    return Trainer(
        deployer,
        collate_fn=collate,
        loss_fn=loss_fn,
        params=draw_params(llama, CONFIG),
        optimizer=optax.adamw(1e-2),
        sharding_rules=rules_of(deployer),
        global_batch_size=8,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_holds_its_share_of_parameters_and_optimizer_state(mesh):
    _, fsdp, context, model = mesh

    trainer = trainer_of(deployer_of(*mesh))

    for tree in (trainer.state["params"], trainer.state["opt_state"][0].mu):
        large = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > SMALL]
        assert large
        for array in [*large, tree["embedding"]]:
            held = array.addressable_shards[0].data.nbytes
            assert held * fsdp * context * model == array.nbytes
    held = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trainer.state["params"])
    )
    assert held == trainer.sharding_rules.bytes_per_device


@pytest.mark.slow
def test_training_goes_on_where_parameters_are_split_otherwise(tmp_path):
    """Engine case 47, a saved state on other meshes: it is restored exactly."""
    first = trainer_of(deployer_of(1, 2, 2, 2)).state
    # Moments and parameters of which no two are equal, without a step.
    first = jax.jit(numbered)(first)
    others = [(1, 1, 8, 1, True), (2, 1, 2, 2, False)]

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, first, cursor={})
        for *mesh, over in others:
            other = trainer_of(deployer_of(*mesh, over=over))
            other.restore(checkpointer)
            for one, two in zip(jax.tree.leaves(other.state), jax.tree.leaves(first), strict=True):
                np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("over", [False, True])
def test_parameters_lie_the_same_way_where_context_shards_have_rows(over):
    deployer = deployer_of(1, 2, 2, 2, over=over)
    shapes = llama.abstract_params(CONFIG)
    rules = rules_of(deployer)
    others = deployer.without_context_shards()

    before, after = (one.params_sharding(shapes, rules) for one in (deployer, others))

    assert others.num_data_shards == 4
    for leaf, one, other in zip(*map(jax.tree.leaves, (shapes, before, after)), strict=True):
        assert one.devices_indices_map(leaf.shape) == other.devices_indices_map(leaf.shape)


def test_a_users_rule_over_fsdp_is_over_context_too():
    deployer = deployer_of(1, 2, 2, 1)

    rules = rules_of(deployer, overrides=[("embedding", ("fsdp",))])

    shardings = deployer.params_sharding(llama.abstract_params(CONFIG), rules)
    assert shardings["embedding"].spec == P(("fsdp", "context"), None)


# Parameters, gradients and two moments, of which 80 % of a device is filled.
NEEDED_GIB = 16 * sum(
    leaf.size for leaf in jax.tree.leaves(llama.abstract_params(CONFIG))
) / STATE_SHARE / 2**30  # fmt: skip


@pytest.mark.parametrize(
    ("share", "over", "expected"),
    [
        (1.1, None, (1, False)),
        (0.6, None, (2, False)),
        (0.4, None, (4, False)),
        (0.2, None, (4, True)),
        (0.6, False, (2, False)),
        (0.4, False, (4, False)),
        (1.1, True, (1, True)),
    ],
)
def test_auto_splits_over_context_where_that_takes_fewer_devices(share, over, expected):
    """Of 8 devices, 2 are context shards: over as many devices, rather over fsdp alone."""
    deployer = Deployer(
        num_context_shards=2,
        num_fsdp_shards="auto",
        fsdp_over_context=over,
        device_memory_gib=share * NEEDED_GIB,
    )

    rules_of(deployer, optimizer=optax.adamw(1e-3))

    assert (deployer.num_fsdp_shards, deployer.fsdp_over_context) == expected


def collectives_of(deployer: Deployer) -> list[Collective]:
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=llama.abstract_params(CONFIG),
        optimizer=optax.adamw(1e-3),
        sharding_rules=rules_of(deployer),
        global_batch_size=8,
    )
    return read_collectives(plan.compile(collate(examples(2))).as_text())


@pytest.mark.slow
def test_what_travels_besides_the_ring_is_each_parameter_twice_and_its_gradient_once():
    """No activation but keys, values and their gradients does."""
    deployer = deployer_of(1, 1, 4, 1)
    num_bytes = rules_of(deployer).total_bytes

    found = collectives_of(deployer)

    gathered = sum(one.num_bytes * one.count for one in found if one.kind == "all-gather")
    reduced = sum(one.num_bytes * one.count for one in found if one.kind == "all-reduce")
    assert {one.kind for one in found} <= {"all-gather", "all-reduce", "collective-permute"}
    assert 0.98 * num_bytes <= gathered <= 2 * num_bytes
    assert num_bytes <= reduced <= 1.01 * num_bytes
