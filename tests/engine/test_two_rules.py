"""The two rules, from shapes alone."""

import logging
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow.engine.errors import ShardingError
from redco_flow.engine.two_rules import derive_rules, weight_decay_mask

SIZES = {"data": 2, "model": 4}
L, D, H, K, F, V, BUCKETS = 3, 32, 8, 16, 96, 256, 20


def shapes(tree):
    return jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(dims, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def specs(tree, **options):
    """Plan of a tree of dims as {path: spec}."""
    rules = derive_rules(shapes(tree), SIZES, **options)
    return {p.path: p.spec for p in rules.parameters}


def scanned_encoder_decoder():
    """A T5 with stacked projections: scanned layers beside a table, biases per head and norms."""
    attention = {"norm": (L, D), "qkv": (L, D, 3, H, K), "out": (L, H, K, D)}
    cross = {"norm": (L, D), "q": (L, D, H, K), "kv": (L, D, 2, H, K), "out": (L, H, K, D)}
    feed_forward = {"norm": (L, D), "wi": (L, D, 2, F), "wo": (L, F, D)}
    encoder = {"attention": attention, "feed_forward": feed_forward}
    decoder = {"attention": attention, "cross": cross, "feed_forward": feed_forward}
    around = {"relative_bias": (BUCKETS, H), "final_norm": (D,)}
    return {
        "embedding": (V, D),
        "head": (D, V),
        "encoder": {"layers": encoder, **around},
        "decoder": {"layers": decoder, **around},
    }


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=H)(normed, normed)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(F)(nn.LayerNorm()(x))))


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(V, D)(ids)
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(V)(nn.LayerNorm()(x))


def flax_shapes():
    ids = jnp.zeros((1, 4), jnp.int32)
    return jax.eval_shape(lambda: Model().init(jax.random.key(0), ids)["params"])


def renamed(tree, words, seen):
    """Rename every key, the same name to the same word at the same place."""
    if not isinstance(tree, dict):
        return tree
    return {
        seen.setdefault(key, words[len(seen)]): renamed(value, words, seen)
        for key, value in tree.items()
    }


def test_scanned_layers_with_stacked_projections_follow_the_two_rules():
    found = specs(scanned_encoder_decoder())

    assert found == {
        "embedding": P("model"),
        "head": P(None, "model"),
        **{
            f"{stack}/layers/{name}": spec
            for stack in ("encoder", "decoder")
            for name, spec in {
                "attention/norm": P(),
                "attention/qkv": P(None, None, None, "model"),
                "attention/out": P(None, "model"),
                "feed_forward/norm": P(),
                "feed_forward/wi": P(None, None, None, "model"),
                "feed_forward/wo": P(None, "model"),
            }.items()
        },
        "decoder/layers/cross/norm": P(),
        "decoder/layers/cross/q": P(None, None, "model"),
        "decoder/layers/cross/kv": P(None, None, None, "model"),
        "decoder/layers/cross/out": P(None, "model"),
        "encoder/relative_bias": P(None, "model"),
        "decoder/relative_bias": P(None, "model"),
        "encoder/final_norm": P(),
        "decoder/final_norm": P(),
    }


def test_flax_modules_follow_the_two_rules_and_biases_follow_their_kernels():
    rules = derive_rules(flax_shapes(), SIZES)

    found = {p.path: p.spec for p in rules.parameters if not p.path.startswith("Block_1")}

    attention = "Block_0/MultiHeadDotProductAttention_0"
    assert found == {
        "Embed_0/embedding": P("model"),
        **{f"{attention}/{n}/kernel": P(None, "model") for n in ("query", "key", "value")},
        **{f"{attention}/{n}/bias": P("model") for n in ("query", "key", "value")},
        f"{attention}/out/kernel": P("model"),
        f"{attention}/out/bias": P(),
        "Block_0/Dense_1/kernel": P(None, "model"),
        "Block_0/Dense_1/bias": P("model"),
        "Block_0/Dense_0/kernel": P("model"),
        "Block_0/Dense_0/bias": P(),
        **{f"Block_0/LayerNorm_{i}/{n}": P() for i in (0, 1) for n in ("scale", "bias")},
        "LayerNorm_0/scale": P(),
        "LayerNorm_0/bias": P(),
        "Dense_0/kernel": P(None, "model"),
        "Dense_0/bias": P("model"),
    }


@pytest.mark.parametrize("tree", [flax_shapes(), shapes(scanned_encoder_decoder())])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_renamed_parameters_get_the_same_plan(tree, seed):
    """Engine case 14."""
    words = [f"{random.Random(seed + i).getrandbits(40):x}" for i in range(64)]
    seen: dict[str, str] = {}
    other = renamed(tree, words, seen)

    plan = {p.path: p.spec for p in derive_rules(tree, SIZES).parameters}
    other_plan = {p.path: p.spec for p in derive_rules(other, SIZES).parameters}

    assert other_plan == {
        "/".join(seen[part] for part in path.split("/")): spec for path, spec in plan.items()
    }


def test_an_axis_that_does_not_divide_is_replicated_with_its_reason_said_once(caplog):
    """Engine case 10."""
    tree = scanned_encoder_decoder() | {"embedding": (50257, D), "head": (D, 50257)}

    with caplog.at_level(logging.WARNING):
        rules = derive_rules(shapes(tree), SIZES)

    found = {p.path: p for p in rules.parameters}
    assert found["embedding"].spec == found["head"].spec == P()
    assert "4 model shards do not divide 50257" in found["embedding"].reason
    assert sum(record.message.startswith("embedding ") for record in caplog.records) == 1
    assert found["encoder/layers/attention/qkv"].spec == P(None, None, None, "model")


def test_fewer_key_value_heads_are_split_by_head_or_replicated_but_never_inside_a_head():
    """Engine case 16, the plan."""
    attention = {"q": (D, H, K), "k": (D, 4, K), "v": (D, 4, K), "o": (H, K, D)}

    split = specs({"attention": attention, "norm": (D,)})
    too_few = specs({"attention": attention | {"k": (D, 2, K), "v": (D, 2, K)}, "norm": (D,)})
    one = specs({"attention": attention | {"k": (D, K), "v": (D, K)}, "norm": (D,)})

    assert split["attention/k"] == P(None, "model")
    assert too_few["attention/k"] == one["attention/k"] == P()
    for plan in (split, too_few, one):
        assert plan["attention/q"] == P(None, "model")
        assert plan["attention/o"] == P("model")


def test_a_table_with_as_many_rows_as_a_head_has_dims_does_not_split_heads():
    attention = {"q": (D, H, K), "k": (D, 4, K), "v": (D, 4, K), "o": (H, K, D)}

    found = specs({"attention": attention, "positions": (K, D), "norm": (D,)})

    assert found["attention/k"] == P(None, "model")
    assert found["positions"] == P("model")


def test_parameters_of_one_flat_module_are_told_apart():
    tree = {
        "ln": (D,),
        "wq": (D, H, K),
        "bq": (H, K),
        "wo": (H, K, D),
        "bo": (D,),
        "wi": (D, F),
        "bi": (F,),
        "wf": (F, D),
    }

    assert specs({"layer": tree}) == {
        "layer/ln": P(),
        "layer/wq": P(None, "model"),
        "layer/bq": P("model"),
        "layer/wo": P("model"),
        "layer/bo": P(),
        "layer/wi": P(None, "model"),
        "layer/bi": P("model"),
        "layer/wf": P("model"),
    }


def test_stacked_experts_are_split_inside_each_expert():
    tree = {
        "attention": {"qkv": (D, 3, H, K), "o": (H, K, D)},
        "experts": {"router": (D, 4), "up": (4, D, F), "down": (4, F, D)},
        "embedding": (V, D),
    }

    found = specs(tree)

    assert found["experts/up"] == P(None, None, "model")
    assert found["experts/down"] == P(None, "model")


def test_layers_without_norms_are_scanned_where_the_caller_says_so():
    tree = {"embedding": (V, D), "stack": {"up": (L, D, F), "down": (L, F, D)}}

    assert specs(tree, scanned_layers=["^stack/"]) == {
        "embedding": P("model"),
        "stack/up": P(None, None, "model"),
        "stack/down": P(None, "model"),
    }
    with pytest.raises(ShardingError, match="'^stak/' matches no parameter".replace("^", r"\^")):
        specs(tree, scanned_layers=["^stak/"])


def test_a_module_whose_kernels_begin_alike_is_not_taken_for_scanned_layers():
    found = specs({"norm": (D,), "attention": {"q": (D, H, K), "o": (D, D)}})

    assert found["attention/q"] == P(None, "model")


def test_the_residual_width_can_be_given():
    tree = {"up": (64, 64, 16), "down": (16, 64)}

    found = derive_rules(shapes(tree), SIZES, residual_width=64)

    assert {p.path: p.spec for p in found.parameters}["down"] == P("model")
    with pytest.raises(ShardingError, match="residual_width=7"):
        derive_rules(shapes(tree), SIZES, residual_width=7)


def test_square_matrices_are_split_and_say_that_their_role_is_open():
    rules = derive_rules(
        shapes({"a": {"kernel": (D, D), "bias": (D,)}, "up": (D, F), "down": (F, D)}), SIZES
    )

    found = {p.path: p for p in rules.parameters}

    assert found["a/kernel"].spec == P(None, "model")
    assert found["a/bias"].spec == P("model")
    assert "does not tell" in found["a/kernel"].reason


def test_a_tree_without_matrices_is_replicated():
    assert specs({"temperature": (), "scale": (8,)}) == {"temperature": P(), "scale": P()}


def test_norms_and_biases_are_not_decayed_even_when_scanned():
    tree = scanned_encoder_decoder()

    mask = weight_decay_mask(shapes(tree))

    layer = mask["encoder"]["layers"]
    assert layer["attention"] == {"norm": False, "qkv": True, "out": True}
    assert mask["embedding"] is True
    assert mask["encoder"]["relative_bias"] is False
    assert mask["encoder"]["final_norm"] is False
    flax_mask = weight_decay_mask(flax_shapes())
    attention = flax_mask["Block_0"]["MultiHeadDotProductAttention_0"]
    assert attention["query"] == {"kernel": True, "bias": False}
