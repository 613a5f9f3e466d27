"""Optimizer state lies where its parameters lie."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer
from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.engine.sharding.state import optimizer_specs

L, D, F, V = 2, 256, 512, 1024


def params():
    tree = {
        "embedding": (V, D),
        "layers": {"norm": (L, D), "up": (L, D, F), "bias": (L, F), "down": (L, F, D)},
        "final": {"norm": (D,)},
    }
    return jax.tree.map(lambda s: jnp.ones(s), tree, is_leaf=lambda x: isinstance(x, tuple))


def forward(params, ids):
    x = params["embedding"][ids]

    def layer(x, p):
        inner = jnp.tanh(x * p["norm"] @ p["up"] + p["bias"])
        return x + inner @ p["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return x * params["final"]["norm"]


def feed_forward(params, x):
    return x + jnp.tanh(x * params["norm"] @ params["up"]) @ params["down"]


IDS = jax.ShapeDtypeStruct((2, 5), jnp.int32)


def halves():
    labels = {"embedding": "slow", "layers": "fast", "final": "fast"}
    return optax.multi_transform({"slow": optax.adamw(1e-3), "fast": optax.lion(1e-4)}, labels)


# name: (optimizer, arrays as large as the parameters that it keeps)
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), 2),
    "lion": (optax.lion(1e-3), 1),
    "momentum": (optax.sgd(1e-3, momentum=0.9), 1),
    "muon": (optax.contrib.muon(1e-3), 1),
    "schedule_free": (optax.contrib.schedule_free_adamw(1e-3, warmup_steps=2), 2),
    "chain": (optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(1, 0, 9))), 2),
    "MultiSteps": (optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation(), 3),
    "multi_transform": (halves(), 1),
    "masked": (optax.adamw(1e-3, mask={"embedding": True, "layers": True, "final": False}), 2),
}


def planned(optimizer):
    """The rules, and (path, shape, sharding) of each array of the state, over 8 model shards."""
    deployer = Deployer(8)
    arrays = jax.eval_shape(params)
    rules = deployer.get_sharding_rules(arrays, forward, IDS)
    state = jax.eval_shape(optimizer.init, arrays)
    shardings = jax.tree.leaves(sharding_of(deployer, state, arrays, rules))
    return rules, [
        (join(path), leaf, sharding)
        for (path, leaf), sharding in zip(named_leaves(state), shardings, strict=True)
    ]


def sharding_of(deployer, state, arrays, rules):
    """How a Trainer stores an optimizer's state."""
    specs = optimizer_specs(state, arrays, rules.specs(arrays))
    return deployer.storage(state, specs).stored_sharding


def num_bytes(shape, dtype):
    return math.prod(shape) * dtype.itemsize


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_a_parameters_shape_has_its_spec_and_its_share_of_bytes(name):
    """Engine case 13, the optimizer's state: its arrays are sharded like the parameters, whatever
    the optimizer.
    """
    optimizer, num_copies = OPTIMIZERS[name]
    rules, state = planned(optimizer)

    checked = 0
    for path, leaf, sharding in state:
        owners = [p for p in rules.parameters if path.endswith("/" + p.path)]
        if owners and leaf.shape == owners[0].shape:
            assert sharding.spec == owners[0].spec, path
            checked += 1
    total = sum(num_bytes(leaf.shape, leaf.dtype) for _, leaf, _ in state)
    on_one_device = sum(
        num_bytes(sharding.shard_shape(leaf.shape), leaf.dtype) for _, leaf, sharding in state
    )

    assert checked >= len(rules.parameters)
    assert total >= num_copies * rules.total_bytes * 0.7
    # Norms and counters are whole everywhere: 1% of the total here.
    assert on_one_device <= total / 8 * 1.1


def test_adafactor_keeps_row_and_column_means_along_their_parameters_axes():
    """Engine case 13, the optimizer's state: its arrays are sharded like the parameters, whatever
    the optimizer.
    """
    arrays = {"up": jnp.ones((D, F)), "down": jnp.ones((F, D)), "norm": jnp.ones(D)}
    rules = Deployer(8).get_sharding_rules(arrays, feed_forward, jnp.ones((2, D)))
    optimizer = optax.adafactor(1e-3)

    found = optimizer_specs(jax.eval_shape(optimizer.init, arrays), arrays, rules.specs(arrays))

    factored = found[0]
    shapes = jax.eval_shape(optimizer.init, arrays)[0]
    for mean, spec in [
        (shapes.v_row["up"], factored.v_row["up"]),
        (shapes.v_col["up"], factored.v_col["up"]),
        (shapes.v_row["down"], factored.v_row["down"]),
        (shapes.v_col["down"], factored.v_col["down"]),
    ]:
        # F is the split dim of both, D of none.
        assert spec == (P("model") if mean.shape == (F,) else P(None))
    assert factored.v["norm"] == P()


@pytest.mark.slow
def test_adafactor_trains_sharded_as_alone():
    arrays = {"up": jnp.ones((128, 256)), "down": jnp.ones((256, 128)), "norm": jnp.ones(128)}
    optimizer = optax.adafactor(1e-2)
    update = jax.jit(optimizer.update)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), arrays)
    alone, _ = update(gradients, optimizer.init(arrays), arrays)

    deployer = Deployer(4)
    rules = deployer.get_sharding_rules(arrays, feed_forward, jnp.ones((2, 128)))
    state = optimizer.init(arrays)
    sharded, _ = update(
        deployer.shard_params(gradients, rules),
        jax.device_put(state, sharding_of(deployer, state, arrays, rules)),
        deployer.shard_params(arrays, rules),
    )

    for expected, found in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded), strict=True):
        # Sums run in another order over shards.
        assert jnp.allclose(expected, found, rtol=2e-5, atol=1e-7)


def test_a_parameter_whose_name_ends_anothers_is_not_mistaken_for_it():
    arrays = {"a": {"w": jnp.ones((16, 32))}, "w": jnp.ones((32, 16))}
    specs = {"a": {"w": P(None, "model")}, "w": P("model")}

    found = optimizer_specs(optax.adam(1e-3).init(arrays), arrays, specs)

    assert found[0].mu == specs
    assert found[0].count == P()


def test_a_tree_that_is_one_array_has_its_state_sharded():
    array, spec = jnp.ones((16, 32)), P("model")

    found = optimizer_specs(optax.adam(1e-3).init(array), array, spec)

    assert found[0].mu == found[0].nu == spec
