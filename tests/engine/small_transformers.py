"""Small hand-written transformers as pure functions, each with the layout an expert would give.

Sizes coincide on purpose (heads times head dim is the width, positions are as many as the
batch's), so that a layout guessed from shapes fails. Dims: L layers, D width, H heads, G key-value
heads, K head dim, F feed-forward, V vocabulary, E experts, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.drawn_params import draw_like

L, D, H, G, K, F, V, E, POSITIONS = 2, 32, 8, 4, 4, 64, 96, 4, 6


@dataclass(frozen=True)
class Model:
    """A forward function, drawn parameters, and the layout over four model shards."""

    forward: Callable[..., Any]
    params: Any
    plan: dict[str, P]

    @property
    def ids(self):
        return np.random.default_rng(1).integers(0, V, (4, POSITIONS)).astype(np.int32)


def draw(dims, seed=0):
    """Random parameters of these dims; vectors lie around 1."""
    rng = np.random.default_rng(seed)

    def array(shape):
        values = rng.normal(size=shape).astype(np.float32)
        return 1 + 0.1 * values if len(shape) == 1 else values * shape[0] ** -0.5

    return jax.tree.map(array, dims, is_leaf=lambda x: isinstance(x, tuple))


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attend(q, k, v, bias=0.0):
    """(B, T, H, K) over (B, S, H, K)."""
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) + bias)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def grouped_attend(q, k, v):
    """(B, T, H, K) over (B, S, G, K), H / G heads to a group."""
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, size)
    weights = jax.nn.softmax(jnp.einsum("btgrk,bsgk->bgrts", q, k))
    return jnp.einsum("bgrts,bsgk->btgrk", weights, v).reshape(batch, length, heads, size)


def mha(p, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
    return jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["o"])


def mlp(p, x):
    return jax.nn.gelu(x @ p["up"] + p["b1"]) @ p["down"] + p["b2"]


MHA = {"ln": (D,), "q": (D, H, K), "k": (D, H, K), "v": (D, H, K), "o": (H, K, D)}
MHA_PLAN = {"ln": P(), **dict.fromkeys("qkv", P(None, "model")), "o": P("model")}
MLP = {"ln": (D,), "up": (D, F), "b1": (F,), "down": (F, D), "b2": (D,)}
MLP_PLAN = {"ln": P(), "up": P(None, "model"), "b1": P("model"), "down": P("model"), "b2": P()}
ENDS = {"embedding": (V, D), "ln": (D,), "head": (D, V)}
ENDS_PLAN = {"embedding": P("model"), "ln": P(), "head": P(None, "model")}


def whole_plan(parts, ends=ENDS_PLAN):
    """Join the plans of named parts and of the ends by path."""
    layer = {f"{name}/{key}": spec for name, plan in parts.items() for key, spec in plan.items()}
    return {**ends, **layer}


def decoder(blocks, dims, parts, *, around=None, seed=0):
    """A model whose residual stream meets each of `blocks`: (name, params, x) -> x."""

    def forward(params, ids):
        x = params["embedding"][ids]
        for name, block in blocks.items():
            p = params[name]
            x = x + block(p, norm(x, p["ln"]))
        return norm(x, params["ln"]) @ params["head"]

    return Model(around or forward, draw({**ENDS, **dims}, seed), whole_plan(parts))


def plain():
    return decoder(
        {"attention": mha, "mlp": mlp},
        {"attention": MHA, "mlp": MLP},
        {"attention": MHA_PLAN, "mlp": MLP_PLAN},
    )


def flat_kernels():
    """Kernels (D, H K), biases (H K): heads appear by a reshape alone."""

    def block(p, x):
        q, k, v = ((x @ p[n] + p["b" + n]).reshape(*x.shape[:2], H, K) for n in "qkv")
        return attend(q, k, v).reshape(x.shape) @ p["o"]

    dims = {"ln": (D,), **dict.fromkeys("qkvo", (D, D)), **{f"b{n}": (D,) for n in "qkv"}}
    plan = {"ln": P(), **dict.fromkeys("qkv", P(None, "model")), "o": P("model")}
    plan |= {f"b{n}": P("model") for n in "qkv"}
    blocks = {"attention": block, "mlp": mlp}
    return decoder(blocks, {"attention": dims, "mlp": MLP}, {"attention": plan, "mlp": MLP_PLAN})


def rotated(x):
    """Rotary positions on halves of the head dim."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None] / 100 ** (jnp.arange(half) / half)
    sin, cos = (f(jnp.concatenate([angles, angles], -1))[None, :, None] for f in (jnp.sin, jnp.cos))
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def grouped_dims(groups):
    return {
        "ln": (D,), "q": (D, H, K), "k": (D, groups, K), "v": (D, groups, K), "o": (H, K, D),
        "q_norm": (K,), "k_norm": (K,),
    }  # fmt: skip


def grouped_block(p, x):
    q = rotated(norm(jnp.einsum("btd,dhk->bthk", x, p["q"]), p["q_norm"]))
    k = rotated(norm(jnp.einsum("btd,dgk->btgk", x, p["k"]), p["k_norm"]))
    v = jnp.einsum("btd,dgk->btgk", x, p["v"])
    return jnp.einsum("bthk,hkd->btd", grouped_attend(q, k, v), p["o"])


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


GATED = {"ln": (D,), "gate": (D, F), "up": (D, F), "down": (F, D)}
GATED_PLAN = {"ln": P(), "gate": P(None, "model"), "up": P(None, "model"), "down": P("model")}


def grouped(groups=G):
    """Grouped queries with rotary positions and norms of queries and keys; a gated MLP."""
    key_value = P(None, "model") if groups % 4 == 0 else P()
    plan = {"ln": P(), "q": P(None, "model"), "k": key_value, "v": key_value, "o": P("model")}
    plan |= {"q_norm": P(), "k_norm": P()}
    return decoder(
        {"attention": grouped_block, "mlp": gated},
        {"attention": grouped_dims(groups), "mlp": GATED},
        {"attention": plan, "mlp": GATED_PLAN},
    )


def fused():
    """One kernel (D, 3, H, K), and gate and up in one (D, 2, F)."""

    def attention(p, x):
        q, k, v = jnp.unstack(jnp.einsum("btd,dchk->btchk", x, p["qkv"]) + p["bias"], axis=2)
        return jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["o"])

    def feed_forward(p, x):
        both = jnp.einsum("btd,dgf->btgf", x, p["wi"])
        return (jax.nn.gelu(both[:, :, 0]) * both[:, :, 1]) @ p["wo"]

    return decoder(
        {"attention": attention, "mlp": feed_forward},
        {
            "attention": {"ln": (D,), "qkv": (D, 3, H, K), "bias": (3, H, K), "o": (H, K, D)},
            "mlp": {"ln": (D,), "wi": (D, 2, F), "wo": (F, D)},
        },
        {
            "attention": {
                "ln": P(), "qkv": P(None, None, "model"), "bias": P(None, "model"),
                "o": P("model"),
            },
            "mlp": {"ln": P(), "wi": P(None, None, "model"), "wo": P("model")},
        },
    )  # fmt: skip


def parallel():
    """Attention and feed-forward side by side, as in GPT-J; learned positions."""

    def forward(params, ids):
        x = params["embedding"][ids] + params["positions"][jnp.arange(ids.shape[1])]
        p = params["block"]
        normed = norm(x, p["ln"])
        x = x + mha(p, normed) + mlp(p, normed)
        return norm(x, params["ln"]) @ params["head"] + params["head_bias"]

    dims = {**ENDS, "positions": (2 * D, D), "head_bias": (V,), "block": {**MHA, **MLP}}
    plan = whole_plan({"block": {**MHA_PLAN, **MLP_PLAN}})
    return Model(forward, draw(dims), plan | {"positions": P(), "head_bias": P("model")})


def bert():
    """Token types, positions that are added whole, a tied head with a bias, a pooled class."""

    def forward(params, ids):
        kinds = (ids > 50).astype(jnp.int32)
        x = params["embedding"][ids] + params["kinds"][kinds] + params["positions"]
        for name, block in (("attention", mha), ("mlp", mlp)):
            x = norm(x + block(params[name], x), params[name]["ln"])
        pooled = jnp.tanh(x[:, 0] @ params["pooler"]) @ params["classes"]
        return x @ params["embedding"].T + params["head_bias"], pooled

    dims = {
        "embedding": (V, D), "kinds": (2, D), "positions": (POSITIONS, D), "head_bias": (V,),
        "pooler": (D, D), "classes": (D, 3), "attention": MHA, "mlp": MLP,
    }  # fmt: skip
    ends = {
        "embedding": P("model"), "kinds": P(), "positions": P(), "head_bias": P("model"),
        "pooler": P(None, "model"), "classes": P("model"),
    }  # fmt: skip
    return Model(forward, draw(dims), whole_plan({"attention": MHA_PLAN, "mlp": MLP_PLAN}, ends))


def encoder_decoder():
    """Cross-attention with one kernel for keys and values; relative bias shared by all layers."""

    def relative(table, length):
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        return jnp.moveaxis(table[jnp.clip(distance, 0, 7)], -1, 0)

    def self_attention(p, x, bias):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        return jnp.einsum("bthk,hkd->btd", attend(q, k, v, bias), p["o"])

    def cross(p, x, source):
        both = jnp.einsum("btd,dchk->btchk", source, p["kv"])
        q = jnp.einsum("btd,dhk->bthk", x, p["q"])
        return jnp.einsum("bthk,hkd->btd", attend(q, both[:, :, 0], both[:, :, 1]), p["o"])

    def forward(params, ids):
        bias = relative(params["bias"], ids.shape[1])
        source = params["embedding"][ids]
        target = params["embedding"][jnp.pad(ids[:, :-1], ((0, 0), (1, 0)))]
        for n in ("first", "second"):
            p = params[n]
            source = source + self_attention(p, norm(source, p["ln"]), bias)
        p, last = params["cross"], params["last"]
        target = target + self_attention(last, norm(target, last["ln"]), bias)
        target = target + cross(p, norm(target, p["ln"]), source)
        return norm(target, params["ln"]) @ params["embedding"].T

    cross_dims = {"ln": (D,), "q": (D, H, K), "kv": (D, 2, H, K), "o": (H, K, D)}
    cross_plan = {
        "ln": P(), "q": P(None, "model"), "kv": P(None, None, "model"), "o": P("model"),
    }  # fmt: skip
    dims = {"embedding": (V, D), "ln": (D,), "bias": (8, H), "cross": cross_dims}
    dims |= dict.fromkeys(("first", "second", "last"), MHA)
    ends = {"embedding": P("model"), "ln": P(), "bias": P(None, "model")}
    parts = {"cross": cross_plan} | dict.fromkeys(("first", "second", "last"), MHA_PLAN)
    return Model(forward, draw(dims), whole_plan(parts, ends))


def experts():
    """Two of four experts to a token, by a mask over all of them."""

    def block(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        best, chosen = jax.lax.top_k(gates, 2)
        mixed = jnp.einsum("btc,btce->bte", best, jax.nn.one_hot(chosen, E))
        inner = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["up"]))
        return jnp.einsum("btef,efd,bte->btd", inner, p["down"], mixed)

    moe = {"ln": (D,), "router": (D, E), "up": (E, D, F), "down": (E, F, D)}
    plan = {"ln": P(), "router": P(), "up": P(None, None, "model"), "down": P(None, "model")}
    blocks = {"attention": mha, "moe": block}
    return decoder(blocks, {"attention": MHA, "moe": moe}, {"attention": MHA_PLAN, "moe": plan})


def scanned(*, remat=False, unroll=False):
    """Stacked layers, the attention by `jax.nn.dot_product_attention`."""

    def layer(x, p):
        q, k, v = (jnp.einsum("btd,dhk->bthk", norm(x, p["ln"]), p[n]) for n in "qkv")
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bthk,hkd->btd", mixed, p["o"])
        return x + mlp(p, norm(x, p["ln2"])), None

    def forward(params, ids):
        step = jax.checkpoint(layer) if remat else layer
        x = params["embedding"][ids]
        if unroll:
            for i in range(L):
                x, _ = step(x, jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]))
        else:
            x, _ = jax.lax.scan(step, x, params["layers"])
        return norm(x, params["ln"]) @ params["head"]

    one = {**MHA, **MLP, "ln2": (D,)}
    dims = {**ENDS, "layers": {name: (L, *shape) for name, shape in one.items()}}
    plan = {**MHA_PLAN, **MLP_PLAN, "ln2": P()}
    stacked = {name: P(None, *spec) if len(spec) else P() for name, spec in plan.items()}
    return Model(forward, draw(dims), whole_plan({"layers": stacked}))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=H)(normed, normed)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(F)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(V, D)(ids)
        for _ in range(L):
            x = Block()(x)
        return nn.Dense(V)(nn.LayerNorm()(x))


def flax_linen():
    ids = jnp.zeros((1, 4), jnp.int32)
    shapes = jax.eval_shape(Transformer().init, jax.random.key(0), ids)["params"]
    params = draw_like(shapes, stddev=0.3)
    plan = {
        "Embed_0/embedding": P("model"), "LayerNorm_0/scale": P(), "LayerNorm_0/bias": P(),
        "Dense_0/kernel": P(None, "model"), "Dense_0/bias": P("model"),
    }  # fmt: skip
    for i in range(L):
        attention = f"Block_{i}/MultiHeadDotProductAttention_0"
        for name in ("query", "key", "value"):
            plan[f"{attention}/{name}/kernel"] = P(None, "model")
            plan[f"{attention}/{name}/bias"] = P("model")
        plan |= {f"{attention}/out/kernel": P("model"), f"{attention}/out/bias": P()}
        plan |= {f"Block_{i}/LayerNorm_{j}/{n}": P() for j in (0, 1) for n in ("scale", "bias")}
        # Flax numbers modules as they are made: the outer one first.
        plan |= {f"Block_{i}/Dense_1/kernel": P(None, "model")}
        plan |= {f"Block_{i}/Dense_1/bias": P("model")}
        plan |= {f"Block_{i}/Dense_0/kernel": P("model"), f"Block_{i}/Dense_0/bias": P()}
    return Model(lambda p, ids: Transformer().apply({"params": p}, ids), params, plan)


MODELS: dict[str, Callable[[], Model]] = {
    "multi-head attention": plain,
    "flat kernels": flat_kernels,
    "grouped queries": grouped,
    "fewer key-value heads than shards": partial(grouped, 2),
    "fused projections": fused,
    "parallel attention and feed-forward": parallel,
    "encoder with token types and a tied head": bert,
    "cross-attention and relative bias": encoder_decoder,
    "mixture of experts": experts,
    "scanned layers": scanned,
    "scanned and rematerialised layers": partial(scanned, remat=True),
    "stacked but unrolled layers": partial(scanned, unroll=True),
    "a user's Flax module": flax_linen,
}
