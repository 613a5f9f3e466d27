"""State-space and other blocks as Flax modules, each with the layout that Megatron would give it.

Dims: B batch, T tokens, D width, U inner width, R rank of the step size, N state, H heads, K head
dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

B, T, D, U, R, N, H, K, V = 2, 16, 32, 64, 4, 8, 8, 8, 96
CHUNK = 4


@dataclass(frozen=True)
class Model:
    """A module, the shape of its inputs, and what is split over 2 and 4 model shards.

    Args:
        dtype: int32 are token ids.
        plan: the parameters that are split; all others are replicated.
        reduced: numbers of one example that forward and backward pass have to all-reduce.
    """

    module: nn.Module
    plan: dict[str, P]
    reduced: int
    shape: tuple[int, ...] = (T,)
    dtype: Any = np.int32

    @cached_property
    def params(self) -> Any:
        """Drawn parameters; vectors lie around 1."""
        inputs = jax.ShapeDtypeStruct((B, *self.shape), self.dtype)
        shapes = jax.eval_shape(self.module.init, jax.random.key(0), inputs)["params"]
        rng = np.random.default_rng(0)

        def draw(shape: tuple[int, ...]) -> np.ndarray:
            values = rng.normal(size=shape).astype(np.float32)
            scale = 1 / np.sqrt(np.prod(shape[:-1]), dtype=np.float32)
            return 1 + 0.1 * values if len(shape) == 1 else values * scale

        return jax.tree.map(lambda x: draw(x.shape), shapes)

    def forward(self, params: Any, inputs: jax.Array) -> Any:
        """Return what the module does."""
        return self.module.apply({"params": params}, inputs)

    def examples(self) -> list[dict[str, np.ndarray]]:
        """Return B inputs, with token ids as labels."""
        rng = np.random.default_rng(1)

        def draw() -> np.ndarray:
            if self.dtype == np.int32:
                return rng.integers(0, V, self.shape).astype(np.int32)
            return rng.normal(size=self.shape).astype(np.float32)

        labels = [rng.integers(0, V, self.shape).astype(np.int32) for _ in range(B)]
        return [{"inputs": draw(), "labels": one} for one in labels]


def linear_recurrence(decay, added, *, is_associative):
    """Return every h[t] = decay[t] h[t - 1] + added[t], time along dim 1."""
    if is_associative:

        def join(one, two):
            return one[0] * two[0], two[0] * one[1] + two[1]

        return jax.lax.associative_scan(join, (decay, added), axis=1)[1]

    def step(state, now):
        state = now[0] * state + now[1]
        return state, state

    over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (decay, added))
    start = jnp.zeros_like(over_time[1][0])
    return jnp.moveaxis(jax.lax.scan(step, start, over_time)[1], 0, 1)


def depthwise(width, name="conv"):
    """Return a causal convolution of 4 tokens, of each channel by itself."""
    return nn.Conv(width, (4,), feature_group_count=width, padding=((3, 0),), name=name)


class Mamba1(nn.Module):
    """Mamba's mixer: in-projection of x and gate, convolution, selective scan, out-projection."""

    is_associative: bool = True
    is_fused: bool = True

    @nn.compact
    def __call__(self, hidden):
        if self.is_fused:
            x, gate = jnp.split(nn.Dense(2 * U, use_bias=False, name="in")(hidden), 2, axis=-1)
        else:
            x = nn.Dense(U, use_bias=False, name="in_x")(hidden)
            gate = nn.Dense(U, use_bias=False, name="in_gate")(hidden)
        x = nn.silu(depthwise(U)(x))
        selected = nn.Dense(R + 2 * N, use_bias=False, name="x")(x)
        rank, write, read = jnp.split(selected, [R, R + N], axis=-1)
        step = nn.softplus(nn.Dense(U, name="dt")(rank))
        log_decay = -jnp.exp(self.param("a_log", nn.initializers.zeros, (U, N)))
        skip = self.param("d", nn.initializers.ones, (U,))
        decay = jnp.exp(step[..., None] * log_decay)
        added = (step * x)[..., None] * write[:, :, None, :]
        states = linear_recurrence(decay, added, is_associative=self.is_associative)
        y = jnp.einsum("btun,btn->btu", states, read) + x * skip
        return nn.Dense(D, use_bias=False, name="out")(y * nn.silu(gate))


class Mamba2(nn.Module):
    """State-space duality: heads with a decay each, chunks of tokens, states between them."""

    @nn.compact
    def __call__(self, hidden):
        x = nn.Dense(U, use_bias=False, name="in_x")(hidden)
        gate = nn.Dense(U, use_bias=False, name="in_gate")(hidden)
        write_read = nn.Dense(2 * N, use_bias=False, name="in_bc")(hidden)
        step = nn.Dense(H, use_bias=False, name="in_dt")(hidden)
        x = nn.silu(depthwise(U)(x))
        write, read = jnp.split(nn.silu(depthwise(2 * N, "conv_bc")(write_read)), 2, axis=-1)
        step = nn.softplus(step + self.param("dt_bias", nn.initializers.zeros, (H,)))
        decay = -jnp.exp(self.param("a_log", nn.initializers.zeros, (H,))) * step
        heads = x.reshape(*x.shape[:2], H, K)
        y = state_space_duality(heads * step[..., None], decay, write, read)
        y = y + heads * self.param("d", nn.initializers.ones, (H,))[:, None]
        y = y.reshape(x.shape) * nn.silu(gate)
        return nn.Dense(D, use_bias=False, name="out")(y)


def state_space_duality(x, decay, write, read, length=CHUNK):
    """Return (B, T, H, K) of x (B, T, H, K), log decay (B, T, H), write and read (B, T, N)."""
    x, decay, write, read = (
        a.reshape(a.shape[0], -1, length, *a.shape[2:]) for a in (x, decay, write, read)
    )
    decay = jnp.moveaxis(decay, 3, 1)  # (B, H, chunks, length)
    passed = jnp.cumsum(decay, axis=-1)
    within = jnp.exp(segment_sums(decay))
    y = jnp.einsum("bcln,bcsn,bhcls,bcshk->bclhk", read, write, within, x)
    to_end = jnp.exp(passed[..., -1:] - passed)
    states = jnp.einsum("bcln,bhcl,bclhk->bchkn", write, to_end, x)
    states = jnp.concatenate([jnp.zeros_like(states[:, :1]), states], axis=1)
    between = jnp.exp(segment_sums(jnp.pad(passed[..., -1], ((0, 0), (0, 0), (1, 0)))))
    states = jnp.einsum("bhzc,bchkn->bzhkn", between, states)[:, :-1]
    y = y + jnp.einsum("bcln,bchkn,bhcl->bclhk", read, states, jnp.exp(passed))
    return y.reshape(y.shape[0], -1, *y.shape[3:])


def segment_sums(x):
    """Return sums of x over (s, t], as (…, t, s), -inf where s > t."""
    length = x.shape[-1]
    total = jnp.cumsum(x, axis=-1)
    return jnp.where(
        jnp.tril(jnp.ones((length, length), bool)), total[..., :, None] - total[..., None, :], -1e9
    )


class RgLru(nn.Module):
    """Griffin's recurrent block: gates of blocks of channels, a gated linear recurrence."""

    is_associative: bool = True

    @nn.compact
    def __call__(self, hidden):
        gate = nn.gelu(nn.Dense(U, name="in_gate")(hidden))
        x = depthwise(U)(nn.Dense(U, name="in_x")(hidden))
        blocks = x.reshape(*x.shape[:2], H, K)
        remembers, reads = (
            nn.sigmoid(
                jnp.einsum(
                    "bthk,hkl->bthl", blocks,
                    self.param(name, nn.initializers.lecun_normal(), (H, K, K)),
                ) + self.param(f"{name}_bias", nn.initializers.zeros, (H, K))
            ).reshape(x.shape)
            for name in ("recurrence", "input")
        )  # fmt: skip
        log_decay = -8 * remembers * nn.softplus(self.param("a", nn.initializers.ones, (U,)))
        added = jnp.sqrt(1 - jnp.exp(2 * log_decay)) * reads * x
        y = linear_recurrence(jnp.exp(log_decay), added, is_associative=self.is_associative)
        return nn.Dense(D, name="out")(y * gate)


class GatedLinearAttention(nn.Module):
    """Linear attention whose state decays by gates of a low rank, scanned over tokens."""

    @nn.compact
    def __call__(self, hidden):
        query, key, value = (
            nn.DenseGeneral((H, K), use_bias=False, name=name)(hidden) for name in "qkv"
        )
        low = nn.Dense(R, use_bias=False, name="decay_low")(hidden)
        decay = nn.sigmoid(nn.DenseGeneral((H, K), name="decay_high")(low))
        gate = nn.silu(nn.DenseGeneral((H, K), use_bias=False, name="gate")(hidden))

        def step(state, now):
            query, key, value, decay = now
            state = decay[..., None] * state + key[..., None] * value[..., None, :]
            return state, jnp.einsum("bhk,bhkl->bhl", query, state)

        over_time = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, decay)]
        start = jnp.zeros((hidden.shape[0], H, K, K))
        y = jnp.moveaxis(jax.lax.scan(step, start, over_time)[1], 0, 1)
        y = nn.RMSNorm(name="head_norm")(y) * gate
        return nn.DenseGeneral(D, axis=(-2, -1), use_bias=False, name="out")(y)


class Experts(nn.Module):
    """A router and stacked experts, each token by its best two, dense."""

    num_experts: int = 4

    @nn.compact
    def __call__(self, hidden):
        scores = nn.softmax(nn.Dense(self.num_experts, use_bias=False, name="router")(hidden))
        best, which = jax.lax.top_k(scores, 2)
        weights = jnp.sum(jax.nn.one_hot(which, self.num_experts) * best[..., None], axis=-2)
        draw = nn.initializers.lecun_normal()
        up, gate = (self.param(n, draw, (self.num_experts, D, U)) for n in ("up", "gate"))
        down = self.param("down", draw, (self.num_experts, U, D))
        inner = nn.silu(jnp.einsum("btd,edu->betu", hidden, gate))
        inner = inner * jnp.einsum("btd,edu->betu", hidden, up)
        inner = inner * jnp.moveaxis(weights, -1, 1)[..., None]
        return jnp.einsum("betu,eud->btd", inner, down)


class Mlp(nn.Module):
    """Two kernels with biases."""

    @nn.compact
    def __call__(self, hidden):
        return nn.Dense(D, name="down")(nn.gelu(nn.Dense(U, name="up")(hidden)))


class Attention(nn.Module):
    """Flax's own."""

    @nn.compact
    def __call__(self, hidden):
        return nn.MultiHeadDotProductAttention(H, qkv_features=H * K, name="inner")(hidden)


class Decoder(nn.Module):
    """Token ids to logits: a table, residual blocks of one mixer each, the table again."""

    mixers: tuple[Callable[..., nn.Module], ...]

    @nn.compact
    def __call__(self, ids):
        table = self.param("table", nn.initializers.normal(1.0), (V, D))
        x = table[ids]
        for number, mixer in enumerate(self.mixers):
            x = x + mixer(name=f"{number}")(nn.RMSNorm(name=f"norm_{number}")(x))
        return x @ table.T


class VisionTransformer(nn.Module):
    """Patches by a strided convolution, a class token, a table of positions, blocks, a head."""

    @nn.compact
    def __call__(self, images):
        patches = nn.Conv(D, (4, 4), strides=(4, 4), name="patch")(images)
        x = patches.reshape(patches.shape[0], -1, D)
        token = self.param("token", nn.initializers.normal(1.0), (1, 1, D))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, D)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(1.0), (1, x.shape[1], D))
        x = x + Attention(name="attention")(nn.LayerNorm(name="norm_0")(x))
        x = x + Mlp(name="mlp")(nn.LayerNorm(name="norm_1")(x))
        return nn.Dense(V, name="head")(nn.LayerNorm(name="norm_2")(x)[:, 0])


class Recommender(nn.Module):
    """DLRM: tables of ids, an MLP of numbers, their pairwise products, an MLP on top."""

    rows: tuple[int, ...] = (96, 64, 6)

    @nn.compact
    def __call__(self, ids):
        vectors = [
            nn.Embed(count, 16, name=f"table_{count}")(ids[:, number] % count)
            for number, count in enumerate(self.rows)
        ]
        numbers = jnp.sin(ids.astype(jnp.float32))
        dense = nn.relu(nn.Dense(U, name="bottom_up")(numbers))
        dense = nn.relu(nn.Dense(16, name="bottom_down")(dense))
        both = jnp.stack([dense, *vectors], axis=1)
        pairs = jnp.einsum("bid,bjd->bij", both, both)
        rows, columns = np.triu_indices(both.shape[1], 1)
        x = jnp.concatenate([dense, pairs[:, rows, columns]], axis=-1)
        x = nn.relu(nn.Dense(U, name="top_up")(x))
        return nn.Dense(1, name="top_down")(x)[:, 0]


class ResidualConvolutions(nn.Module):
    """ResNet's basic blocks on channels that stay: convolve, norm, convolve, add."""

    num_channels: int = 16

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.num_channels, (3, 3), name="stem")(images)
        for number in range(2):
            inner = nn.Conv(2 * self.num_channels, (3, 3), name=f"{number}_up")(nn.silu(x))
            inner = nn.silu(nn.GroupNorm(8, name=f"{number}_norm")(inner))
            x = x + nn.Conv(self.num_channels, (3, 3), name=f"{number}_down")(inner)
        return nn.Dense(V, name="head")(x.mean((1, 2)))


class UNet(nn.Module):
    """A convolution down, one in the middle, one up again, and what was before beside it."""

    @nn.compact
    def __call__(self, images):
        outer = nn.silu(nn.Conv(16, (3, 3), name="first")(images))
        inner = nn.silu(nn.Conv(32, (3, 3), strides=(2, 2), name="lower")(outer))
        inner = nn.silu(nn.Conv(32, (3, 3), name="middle")(inner))
        upper = nn.silu(nn.ConvTranspose(16, (2, 2), strides=(2, 2), name="upper")(inner))
        both = jnp.concatenate([outer, upper], axis=-1)
        return nn.Conv(3, (3, 3), name="last")(nn.silu(nn.Conv(16, (3, 3), name="join")(both)))


COLUMNS, ROWS = P(None, "model"), P("model")
WIDE, NARROW = P(None, None, None, "model"), P(None, None, "model")
UP = {"kernel": COLUMNS, "bias": ROWS}
MLP = {"up/kernel": COLUMNS, "up/bias": ROWS, "down/kernel": ROWS}
CONVOLUTION = {"conv/kernel": P(None, None, "model"), "conv/bias": ROWS}
SCANNED = {
    **CONVOLUTION, "x/kernel": ROWS, "dt/kernel": COLUMNS, "dt/bias": ROWS, "a_log": ROWS,
    "d": ROWS, "out/kernel": ROWS,
}  # fmt: skip
RECURRENT = {
    **CONVOLUTION, "in_gate/kernel": COLUMNS, "in_gate/bias": ROWS, "in_x/kernel": COLUMNS,
    "in_x/bias": ROWS, "recurrence": ROWS, "recurrence_bias": ROWS, "input": ROWS,
    "input_bias": ROWS, "a": ROWS, "out/kernel": ROWS,
}  # fmt: skip
ATTENTION = {
    **{f"inner/{name}/kernel": COLUMNS for name in ("query", "key", "value")},
    **{f"inner/{name}/bias": ROWS for name in ("query", "key", "value")},
    "inner/out/kernel": ROWS,
}


def under(prefix: str, plan: dict[str, P]) -> dict[str, P]:
    """Return a plan with a prefix before its paths."""
    return {f"{prefix}/{path}": spec for path, spec in plan.items()}


def decoder(mixer: Callable[..., nn.Module], plan: dict[str, P], reduced: int) -> Model:
    """Return a decoder of one such block and one MLP; what is reduced is of one token."""
    plan = {"table": ROWS, **under("0", plan), **under("1", MLP)}
    # Of the table, the head and the MLP, each D forwards or backwards.
    return Model(Decoder((mixer, Mlp)), plan, T * (reduced + 4 * D))


def selective_scan(**options: bool) -> Model:
    """Return a Mamba decoder; of the step size and the state, R + 2 N are reduced each way."""
    is_fused = options.get("is_fused", True)
    into = (
        {"in/kernel": COLUMNS} if is_fused else {"in_x/kernel": COLUMNS, "in_gate/kernel": COLUMNS}
    )
    return decoder(partial(Mamba1, **options), SCANNED | into, 2 * D + 2 * (R + 2 * N))


MODELS: dict[str, Model] = {
    "selective scan, associative": selective_scan(is_associative=True),
    "selective scan, by scan": selective_scan(is_associative=False),
    "selective scan, separate kernels": selective_scan(is_associative=False, is_fused=False),
    # Write and read vectors serve all heads: their gradients are reduced, and those of the
    # products of all pairs within a chunk.
    "state-space duality": decoder(
        Mamba2,
        CONVOLUTION
        | {f"in_{name}/kernel": COLUMNS for name in ("x", "gate", "dt")}
        | {"a_log": ROWS, "dt_bias": ROWS, "d": ROWS, "out/kernel": ROWS},
        2 * D + 2 * N + CHUNK,
    ),
    "gated linear recurrence": decoder(RgLru, RECURRENT, 2 * D),
    "gated linear recurrence, by scan": decoder(
        partial(RgLru, is_associative=False), RECURRENT, 2 * D
    ),
    # The low rank between width and heads is replicated.
    "gated linear attention": decoder(
        GatedLinearAttention,
        {f"{name}/kernel": COLUMNS for name in ("q", "k", "v", "gate", "decay_high")}
        | {"decay_high/bias": ROWS, "out/kernel": ROWS},
        2 * D + R,
    ),
    "attention": decoder(Attention, ATTENTION, 2 * D),
    # Summed over experts and units at once: whole experts are split.
    "experts": decoder(
        Experts,
        {"up": ROWS, "gate": ROWS, "down": ROWS},
        2 * D + 4,
    ),
    "vision transformer": Model(
        VisionTransformer(),
        under("attention", ATTENTION)
        | under("mlp", MLP)
        | {"head/kernel": COLUMNS, "head/bias": ROWS},
        17 * 4 * D + D,
        (16, 16, 3),
        np.float32,
    ),
    # The table of 6 rows is small. Two are looked up, the bottom's and the top's rows reduced,
    # and what the top reads: 16 numbers and 6 pairs.
    "recommender": Model(
        Recommender(),
        {"table_96/embedding": ROWS, "table_64/embedding": ROWS}
        | {f"{side}_up/{name}": s for side in ("bottom", "top") for name, s in UP.items()}
        | {"bottom_down/kernel": ROWS, "top_down/kernel": ROWS},
        2 * 16 + 16 + 1 + 22,
        shape=(6,),
    ),
    "residual convolutions": Model(
        ResidualConvolutions(),
        {"head/kernel": COLUMNS, "head/bias": ROWS}
        | {
            f"{number}_{name}": spec
            for number in range(2)
            for name, spec in {
                "up/kernel": WIDE, "up/bias": ROWS, "norm/scale": ROWS, "norm/bias": ROWS,
                "down/kernel": NARROW,
            }.items()
        },
        2 * 2 * 64 * 16 + 16,
        shape=(8, 8, 3),
        dtype=np.float32,
    ),
    # 16 pixels of 32 channels in the middle, 64 of 16 before and of 32 after, 3 come out.
    "U-Net": Model(
        UNet(),
        {"lower/kernel": WIDE, "lower/bias": ROWS, "middle/kernel": NARROW}
        | {"join/kernel": WIDE, "join/bias": ROWS, "last/kernel": NARROW},
        16 * 32 + 64 * 16 + 64 * 32 + 64 * 3,
        shape=(8, 8, 3),
        dtype=np.float32,
    ),
}  # fmt: skip
