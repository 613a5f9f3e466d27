"""Rules: order, mistakes, and what they say about themselves."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer
from redco_flow.engine.errors import ShardingError
from redco_flow.engine.sharding.rules import ShardingRule, check_rules

SIZES = {"data": 2, "model": 4}


def params():
    return {
        "embed": {"table": jax.ShapeDtypeStruct((32, 16), jnp.float32)},
        "mlp": {
            "up": {
                "kernel": jax.ShapeDtypeStruct((16, 64), jnp.float32),
                "bias": jax.ShapeDtypeStruct((64,), jnp.float32),
            },
            "down": {
                "kernel": jax.ShapeDtypeStruct((64, 16), jnp.float32),
                "bias": jax.ShapeDtypeStruct((16,), jnp.float32),
            },
        },
    }


IDS = jax.ShapeDtypeStruct((2, 5), jnp.int32)


def forward(params, ids):
    up, down = params["mlp"]["up"], params["mlp"]["down"]
    x = params["embed"]["table"][ids]
    return x + jnp.tanh(x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]


def test_first_matching_rule_wins():
    rules = check_rules(
        [
            ShardingRule("up/kernel", P(None, "model"), "first"),
            ShardingRule("kernel", P("model"), "second"),
            ShardingRule("", P(), "the rest"),
        ],
        params(),
        SIZES,
    )

    specs = rules.specs(params())

    assert specs["mlp"]["up"]["kernel"] == P(None, "model")
    assert specs["mlp"]["down"]["kernel"] == P("model")
    assert specs["embed"]["table"] == P()


def test_an_exact_rule_speaks_about_one_parameter_only():
    rules = [
        ShardingRule("mlp/up/bias", P("model"), "that one", exact=True),
        ShardingRule("", P(), "the rest"),
    ]

    specs = check_rules(rules, params(), SIZES).specs(params())

    assert specs["mlp"]["up"]["bias"] == P("model")
    assert specs["mlp"]["down"]["bias"] == P()


def test_a_rule_that_matches_no_parameter_is_an_error():
    with pytest.raises(ShardingError, match="'atention' matches no parameter; parameters: embed"):
        Deployer(4).get_sharding_rules(
            params(), forward, IDS, overrides=[("atention", (None, "model"))]
        )


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(ShardingError, match=r"no sharding rule matches embed/table \(32, 16\)"):
        check_rules([ShardingRule("mlp", P(), "")], params(), SIZES)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("up/bias", (None, "model")), r"names 2 axes, but mlp/up/bias \(64,\) has 1 dims"),
        (("table", ("modle",)), "names axis 'modle'; allowed: None, 'data', 'fsdp', 'model'"),
        (("table", ("model", "model")), "names one axis twice"),
        (("(", ()), "is not a regex"),
    ],
)
def test_an_override_that_cannot_be_obeyed_is_an_error(override, message):
    with pytest.raises(ShardingError, match=message):
        Deployer(4).get_sharding_rules(params(), forward, IDS, overrides=[override])


def test_an_override_that_does_not_divide_is_an_error_and_not_a_replica():
    shapes = {"head": jax.ShapeDtypeStruct((16, 10), jnp.float32)}

    with pytest.raises(ShardingError, match="along its dim of 10, which the 4 shards"):
        Deployer(4).get_sharding_rules(
            shapes, lambda p: p["head"].sum(), overrides=[("head", (None, "model"))]
        )


def test_overrides_come_before_derived_rules():
    rules = Deployer(4).get_sharding_rules(
        params(), forward, IDS, overrides=[("table$", (None, "model")), ("mlp/up", ())]
    )

    specs = rules.specs(params())

    assert specs["embed"]["table"] == P(None, "model")
    assert specs["mlp"]["up"] == {"kernel": P(), "bias": P()}
    assert specs["mlp"]["down"]["kernel"] == P("model")


def test_every_parameter_is_explained_and_replicated_bytes_are_reported():
    """Engine case 11: each parameter has a reason, and what is replicated is counted."""
    rules = Deployer(4).get_sharding_rules(params(), forward, IDS)

    lines = rules.explain().splitlines()

    assert {p.path for p in rules.parameters} == {
        "embed/table",
        "mlp/up/kernel",
        "mlp/up/bias",
        "mlp/down/kernel",
        "mlp/down/bias",
    }
    assert all(p.reason for p in rules.parameters)
    assert [line.split()[0] for line in lines[1:-1]] == [p.path for p in rules.parameters]
    total = (32 * 16 + 16 * 64 + 64 + 64 * 16 + 16) * 4
    assert rules.total_bytes == total
    assert rules.replicated_bytes == 16 * 4
    assert rules.bytes_per_device == 16 * 4 + (total - 16 * 4) // 4
    assert rules.num_parameters == total // 4
    assert lines[-1] == (
        "2,640 parameters in 5 arrays (10.6 kB), 4 model shards: 2.69 kB per device; "
        "1 array replicated (64 B)"
    )


def test_several_model_shards_without_a_function_are_refused_with_what_to_pass():
    with pytest.raises(ShardingError, match=r"4 model shards need .*get_sharding_rules\(params"):
        Deployer(4).get_sharding_rules(params())


def test_one_model_shard_needs_no_function_and_keeps_everything_whole():
    rules = Deployer(1).get_sharding_rules(params())

    assert all(p.is_replicated for p in rules.parameters)
    assert rules.bytes_per_device == rules.total_bytes == rules.replicated_bytes


def test_parameters_lie_as_the_rules_say():
    deployer = Deployer(4)
    arrays = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), params())
    rules = deployer.get_sharding_rules(arrays, forward, IDS)

    placed = deployer.shard_params(arrays, rules)

    shard = placed["mlp"]["up"]["kernel"].addressable_shards[0]
    assert shard.data.shape == (16, 16)
    on_one_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert on_one_device == rules.bytes_per_device
