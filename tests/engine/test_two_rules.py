"""The two rules, from what a function computes."""

import logging
import random

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer
from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.engine.sharding.two_rules import derive_rules, weight_decay_mask
from redco_flow.engine.step.lora import plan_lora
from redco_flow.models.find import find_model
from tests.engine.small_transformers import MODELS, D, F, G, H, K, V, attend, draw

t5 = find_model("t5")

SIZES = {"data": 2, "model": 4}
IDS = jax.ShapeDtypeStruct((2, 6), jnp.int32)
X = jax.ShapeDtypeStruct((2, 6, D), jnp.float32)


def plan(params, function, *inputs, **options):
    """The layout over four model shards as {path: spec}."""
    return {p.path: p.spec for p in rules(params, function, *inputs, **options).parameters}


def rules(params, function, *inputs, **options):
    return derive_rules(params, SIZES, function, inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_model_gets_the_layout_an_expert_would_give_it(name):
    """Engine cases 11, 16 and 17, the plans."""
    model = MODELS[name]()

    found = rules(model.params, model.forward, model.ids)

    assert {p.path: p.spec for p in found.parameters} == model.plan
    assert all(p.reason for p in found.parameters)


def test_a_reason_names_the_kind_of_parallelism_and_what_it_is_over():
    """Engine case 11: each parameter has a reason, and what is replicated is counted."""
    model = MODELS["grouped queries"]()

    found = rules(model.params, model.forward, model.ids)

    reasons = {p.path: p.reason for p in found.parameters}
    stream = "the residual stream (32 wide)"
    assert reasons["attention/q"] == "column-parallel over 4 KV-head groups"
    assert reasons["attention/k"] == "column-parallel over 4 heads"
    assert reasons["attention/ln"] == f"replicated: lies along {stream}"
    assert reasons["mlp/down"] == (
        "row-parallel (input sharded over 64 units); one all-reduce follows"
    )
    assert reasons["embedding"] == "embedding lookup: vocab-parallel (96 rows)"


def renamed(tree, words, seen):
    """The same tree with every key replaced by a word, so that the order changes as well."""
    if not isinstance(tree, dict):
        return tree
    return {
        seen.setdefault(key, words[len(seen)]): renamed(value, words, seen)
        for key, value in tree.items()
    }


def named_as_before(tree, seen):
    if not isinstance(tree, dict):
        return tree
    back = {word: key for key, word in seen.items()}
    return {back[word]: named_as_before(value, seen) for word, value in tree.items()}


@pytest.mark.parametrize("name", MODELS)
def test_renamed_parameters_get_the_same_plan(name):
    """Engine case 14: the sharding plan is the same."""
    model = MODELS[name]()
    words = [f"{random.Random(i).getrandbits(40):x}" for i in range(64)]
    seen: dict[str, str] = {}
    other = renamed(model.params, words, seen)

    found = plan(other, lambda p, ids: model.forward(named_as_before(p, seen), ids), model.ids)

    assert found == {
        "/".join(seen[part] for part in path.split("/")): spec for path, spec in model.plan.items()
    }


TRAINED = (
    "fewer key-value heads than shards", "fused projections",
    "encoder with token types and a tied head", "cross-attention and relative bias",
    "mixture of experts", "a user's Flax module",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_losses_and_gradients_are_the_same_as_in_float64_on_one_device(name):
    """Engine case 12, losses and gradients on any mesh: they equal those of one device."""
    model = MODELS[name]()

    def loss(params, ids):
        outputs = jax.tree.leaves(model.forward(params, ids))
        return sum(jnp.mean(jnp.sin(x)) for x in outputs)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
        value, gradients = jax.jit(jax.value_and_grad(loss))(wide, model.ids)
    # A bias of keys has no gradient at all: small is what is small beside the others.
    scale = 1e-5 * max(np.abs(g).max() for g in jax.tree.leaves(gradients))
    deployer = Deployer(4, devices=jax.devices()[:8])
    found_rules = deployer.get_sharding_rules(model.params, model.forward, model.ids)
    params = deployer.shard_params(model.params, found_rules)
    ids = jax.device_put(model.ids, deployer.named_sharding("data"))

    found, found_gradients = jax.jit(jax.value_and_grad(loss))(params, ids)

    np.testing.assert_allclose(found, value, rtol=1e-5)
    for (path, one), two in zip(
        named_leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=scale, err_msg=join(path))


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_t5_is_split_by_heads_units_and_vocabulary(version):
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    config = t5.Config(
        vocab_size=96, d_model=32, d_kv=4, d_ff=64, num_layers=2, num_heads=8,
        **(gated if version == "v1.1" else {}),
    )  # fmt: skip

    def loss(params, ids, keys):
        return t5.apply(config, params, ids, (ids != 0).astype(jnp.int32), ids, rngs=keys)

    keys = jax.random.split(jax.random.key(0), 2)
    found = plan(t5.abstract_params(config), loss, IDS, keys)

    head = {"lm_head": P(None, "model")} if version == "v1.1" else {}
    expected = {"embedding": P("model"), **head}
    for stack in ("encoder", "decoder"):
        parts = {
            "attention": {"qkv": P(None, None, None, "model"), "out": P(None, "model")},
            "mlp": {"wi": P(None, None, None, "model"), "wo": P(None, "model")},
        }
        if stack == "decoder":
            both = {"q": P(None, None, "model"), "kv": P(None, None, None, "model")}
            parts["cross_attention"] = {**both, "out": P(None, "model")}
        for part, specs in parts.items():
            expected |= {f"{stack}/layers/{part}/{name}": s for name, s in specs.items()}
            expected[f"{stack}/layers/{part}_norm/scale"] = P()
        expected |= {f"{stack}/relative_bias": P(None, "model"), f"{stack}/final_norm/scale": P()}
    assert found == expected


def test_an_nnx_module_split_into_a_plain_dict_follows_the_two_rules():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(V, D, rngs=rngs)
            self.up = nnx.Linear(D, F, rngs=rngs)
            self.down = nnx.Linear(F, D, rngs=rngs)

        def __call__(self, ids):
            x = self.table(ids)
            return x + self.down(nnx.relu(self.up(x)))

    graph, state = nnx.split(Block(nnx.Rngs(0)))

    def forward(params, ids):
        return nnx.merge(graph, nnx.State(params))(ids)

    found = plan(nnx.to_pure_dict(state), forward, IDS)

    assert found == {
        "table/embedding": P("model"),
        "up/kernel": P(None, "model"),
        "up/bias": P("model"),
        "down/kernel": P("model"),
        "down/bias": P(),
    }


def attention(params, x, heads):
    batch, length, _ = x.shape
    q, k, v = ((x @ params[n]).reshape(batch, length, heads, -1) for n in "qkv")
    return x + attend(q, k, v).reshape(batch, length, -1) @ params["o"]


def test_heads_that_the_shards_do_not_divide_are_whole_and_never_split_inside(caplog):
    """Engine case 16: 6 heads of 4."""
    params = draw({"q": (D, 24), "k": (D, 24), "v": (D, 24), "o": (24, D)})

    with caplog.at_level(logging.WARNING):
        found = rules(params, lambda p, x: attention(p, x, 6), X)

    assert {p.spec for p in found.parameters} == {P()}
    told = [one.getMessage() for one in caplog.records if "do not divide" in one.getMessage()]
    assert told == [
        "k (32, 24), q (32, 24), v (32, 24): replicated: 6 heads, which 4 model shards do not "
        "divide; 2, 3, 6 would"
    ]


def test_parts_of_no_size_change_nothing():
    """As in partly rotated heads of which all is rotated."""

    def forward(p, x):
        inner = x @ p["up"]
        inner = jnp.concatenate([inner[..., :F], inner[..., F:].reshape(2, 6, 0)], -1)
        return x + inner @ p["down"]

    found = plan(draw({"up": (D, F), "down": (F, D)}), forward, X)

    assert found == {"up": P(None, "model"), "down": P("model")}


def test_one_key_value_head_is_whole_and_its_queries_are_split():
    """Engine case 16: the attention is exact, and no scores are exchanged."""

    def forward(p, x):
        q = jnp.einsum("btd,dhk->bthk", x, p["q"])
        scores = jnp.einsum("bthk,bsk->bhts", q, x @ p["k"])
        mixed = jnp.einsum("bhts,bsk->bthk", jax.nn.softmax(scores), x @ p["v"])
        return x + jnp.einsum("bthk,hkd->btd", mixed, p["o"])

    params = draw({"q": (D, H, K), "k": (D, K), "v": (D, K), "o": (H, K, D)})

    assert plan(params, forward, X) == {
        "q": P(None, "model"),
        "k": P(),
        "v": P(),
        "o": P("model"),
    }


def test_a_kernel_that_packs_parts_side_by_side_is_split_and_says_what_would_help(caplog):
    """Something with a derivative of its own stands between the product and its parts."""

    def forward(p, x):
        fused = jax.nn.relu(x @ p["qkv"])
        q, k, v = (part.reshape(2, 6, H, K) for part in jnp.split(fused, 3, axis=-1))
        return x + attend(q, k, v).reshape(2, 6, D) @ p["o"]

    params = draw({"qkv": (D, 3 * D), "o": (D, D)})

    with caplog.at_level(logging.WARNING):
        found = plan(params, forward, X)

    assert found == {"qkv": P(None, "model"), "o": P("model")}
    assert "give the parts a dim of their own" in caplog.text


@pytest.mark.parametrize(
    "copied",
    [lambda x: jnp.tile(x, (1, 1, H // G, 1)), lambda x: jnp.concatenate([x] * (H // G), axis=2)],
    ids=["tile", "concatenate"],
)
def test_query_heads_that_take_turns_at_key_value_heads_are_not_called_packed(copied, caplog):
    """Head h reads keys and values h modulo G, where neighbours could share them."""

    def forward(p, x):
        q, k, v = ((x @ p[name]).reshape(2, 6, -1, K) for name in "qkv")
        return x + attend(q, copied(k), copied(v)).reshape(2, 6, D) @ p["o"]

    params = draw({"q": (D, H * K), "k": (D, G * K), "v": (D, G * K), "o": (H * K, D)})

    with caplog.at_level(logging.WARNING):
        found = plan(params, forward, X)

    assert found == {name: P(None, "model") for name in "qkv"} | {"o": P("model")}
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("o (32, 32), q (32, 32): its 8 heads take turns at 4 heads of keys and")
    assert "let neighbouring heads share keys and values" in told
    assert "packs" not in told


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_neighbouring_heads_that_share_keys_and_values_are_not_said_to_take_turns(
    num_groups, caplog
):
    """Head h reads keys and values h // (H / G): each shard gets neighbouring heads."""

    def forward(p, x):
        q, k, v = ((x @ p[name]).reshape(2, 6, -1, K) for name in "qkv")
        k, v = (jnp.repeat(one, H // num_groups, axis=2) for one in (k, v))
        return x + attend(q, k, v).reshape(2, 6, D) @ p["o"]

    shared = (D, num_groups * K)
    params = draw({"q": (D, H * K), "k": shared, "v": shared, "o": (H * K, D)})

    with caplog.at_level(logging.WARNING):
        found = plan(params, forward, X)

    assert found["q"] == P(None, "model")
    assert found["o"] == P("model")
    assert found["k"] == found["v"] == (P(None, "model") if num_groups == 4 else P())
    assert "take turns" not in caplog.text


def test_query_heads_are_split_where_shards_do_not_divide_the_key_value_heads():
    """12 heads that share 3 of keys and values, over 4 shards: each shard gets an equal part."""

    def forward(p, x):
        q, k, v = ((x @ p[name]).reshape(2, 6, -1, K) for name in "qkv")
        k, v = (jnp.repeat(one, 4, axis=2) for one in (k, v))
        return x + attend(q, k, v).reshape(2, 6, 12 * K) @ p["o"]

    params = draw({"q": (D, 12 * K), "k": (D, 3 * K), "v": (D, 3 * K), "o": (12 * K, D)})

    found = plan(params, forward, X)

    assert found == {"q": P(None, "model"), "k": P(), "v": P(), "o": P("model")}


def test_what_a_low_rank_and_heads_make_is_not_called_grouped():
    def forward(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        gate = jnp.einsum("btr,rhk->bthk", x @ p["low"], p["high"])
        return x + jnp.einsum("bthk,hkd->btd", attend(q, k, v) * gate, p["o"])

    heads = (D, H, K)
    dims = {"q": heads, "k": heads, "v": heads, "o": (H, K, D), "low": (D, 3), "high": (3, H, K)}

    reasons = {p.path: p.reason for p in rules(draw(dims), forward, X).parameters}

    assert reasons["high"] == "column-parallel over 8 heads (reads 3 replicated inputs)"


def test_a_low_rank_between_wide_dims_is_whole_and_the_wide_one_split():
    def forward(p, x):
        inner = x @ p["a"] @ p["b"] + x @ p["up"]
        return x + jax.nn.relu(inner) @ p["down"]

    params = draw({"a": (D, 8), "b": (8, F), "up": (D, F), "down": (F, D)})

    assert plan(params, forward, X) == {
        "a": P(),
        "b": P(None, "model"),
        "up": P(None, "model"),
        "down": P("model"),
    }


def test_layers_without_a_residual_alternate_in_the_order_of_the_data():
    def forward(p, x):
        return jax.nn.relu(jax.nn.relu(x @ p["c"] + p["bias"]) @ p["a"]) @ p["b"]

    params = draw({"c": (D, 64), "bias": (64,), "a": (64, 128), "b": (128, 16)})

    assert plan(params, forward, X) == {
        "c": P(None, "model"),
        "bias": P("model"),
        "a": P("model"),
        "b": P(None, "model"),
    }


def test_a_table_read_by_comparison_with_all_rows_is_split_by_rows():
    def forward(p, ids):
        x = jax.nn.one_hot(ids, V) @ p["table"]
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    params = draw({"table": (V, D), "up": (D, F), "down": (F, D)})

    assert plan(params, forward, IDS)["table"] == P("model")


def test_ragged_experts_are_split_inside_each_expert():
    def forward(p, x, sizes):
        inner = jax.lax.ragged_dot(x, p["up"], sizes)
        return x + jax.lax.ragged_dot(jax.nn.silu(inner), p["down"], sizes)

    params = draw({"up": (4, D, F), "down": (4, F, D)})
    rows, sizes = jax.ShapeDtypeStruct((12, D), jnp.float32), jnp.array([3, 3, 3, 3])

    assert plan(params, forward, rows, sizes) == {
        "up": P(None, None, "model"),
        "down": P(None, "model"),
    }


def test_vocabularies_that_the_shards_do_not_divide_are_split_and_stored_padded():
    """Engine case 10, the plan: 97 rows are stored as 100."""

    def forward(p, ids):
        x = p["table"][ids]
        return (x + jnp.tanh(x @ p["up"]) @ p["down"]) @ p["head"] + p["bias"]

    dims = {"table": (97, D), "up": (D, F), "down": (F, D), "head": (D, 97), "bias": (97,)}

    found = rules(draw(dims), forward, IDS)

    specs = {p.path: p.spec for p in found.parameters}
    assert specs["table"] == specs["bias"] == P("model")
    assert specs["head"] == P(None, "model")
    reasons = {p.path: p.reason for p in found.parameters}
    assert "stored padded to a multiple of 4" in reasons["table"]
    assert found.replicated_bytes == 0
    assert found.bytes_per_device == (2 * 100 * D + 100 + 2 * D * F) * 4 // 4


def test_what_an_unknown_operation_takes_is_whole_and_the_operation_is_named(caplog):
    def forward(p, x):
        inner = jnp.fft.fft(x @ p["up"]).real
        return x + inner @ p["down"]

    with caplog.at_level(logging.WARNING):
        found = rules(draw({"up": (D, F), "down": (F, D)}), forward, X)

    assert {p.spec for p in found.parameters} == {P()}
    assert "used by 'fft', whose dataflow is not known" in caplog.text


def test_a_function_may_take_static_values_and_name_mesh_axes():
    def loss(params, batch, rngs, is_training):
        assert is_training is False
        assert rngs is None
        x = jax.lax.with_sharding_constraint(batch["x"], P("data", None, None))
        return jnp.tanh(x @ params["up"]) @ params["down"], x.sum((1, 2))

    found = plan(draw({"up": (D, F), "down": (F, D)}), loss, {"x": np.ones((2, 6, D))}, None, False)

    assert found == {"up": P(None, "model"), "down": P("model")}


def test_overrides_come_before_what_is_derived():
    model = MODELS["multi-head attention"]()

    found = rules(model.params, model.forward, model.ids, overrides=[("embedding$", ())])

    given = {p.path: p for p in found.parameters}["embedding"]
    assert given.spec == P()
    assert given.reason == "given: 'embedding$'"


def test_matrices_and_tables_are_decayed_and_norms_and_biases_are_not():
    model = MODELS["cross-attention and relative bias"]()

    mask = weight_decay_mask(model.params, model.forward, model.ids)

    cross = {"ln": False, "q": True, "kv": True, "o": True}
    assert mask["cross"] == cross
    assert (mask["embedding"], mask["ln"], mask["bias"]) == (True, False, False)
    flat = MODELS["flat kernels"]()
    decayed = weight_decay_mask(flat.params, flat.forward, flat.ids)
    assert decayed["attention"] == {
        "ln": False, **dict.fromkeys("qkvo", True), "bq": False, "bk": False, "bv": False,
    }  # fmt: skip


def test_biases_of_experts_are_neither_decayed_nor_given_factors():
    """transformers leaves out every parameter named bias, and PEFT adapts modules alone."""
    params = draw({"router": (D, 4), "wo": (4, D, D), "wo_bias": (4, D)})

    def forward(params, x):
        shares = jax.nn.softmax(x @ params["router"])
        each = jnp.einsum("bd,edf->bef", x, params["wo"])
        return jnp.einsum("be,bef->bf", shares, each) + shares @ params["wo_bias"]

    x = np.ones((2, D), np.float32)
    mask = weight_decay_mask(params, forward, x)
    lora = plan_lora(params, forward, x, rank=1, alpha=1, targets="all-linear")

    assert mask == {"router": True, "wo": True, "wo_bias": False}
    assert [target.path for target in lora.targets] == ["router", "wo"]
