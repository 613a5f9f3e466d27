"""The blocks that transformers here are made of, as Flax modules: norm, attention, feed-forward.

Driven by the configs of `config.py`; each holds its parameters and offers its parts, so that
a layer can bring the products of several blocks together.
Dims in this file: B batch, T sequence, D model, H heads, G key-value groups, K head dim,
F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_flow.engine.random import dropout
from redco_flow.models.attention.rope import RotaryConfig
from redco_flow.models.attention.rotary import Rotation, rotate
from redco_flow.models.layer_config import AttentionConfig, ClampedGate, MlpConfig, NormConfig
from redco_flow.models.numerics import layer_norm, rms_norm
from redco_flow.models.projections import SplitKernel, num_groups_held, product, wide_product

Activation = Callable[[jax.Array], jax.Array]

_NARROW_ACTIVATIONS: dict[str, Activation] = {
    "relu": nn.relu,
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_new": partial(nn.gelu, approximate=True),
    "silu": nn.silu,
}


def _widened(function: Activation) -> Activation:
    """Compute in float32: 8 bits of 1 + tanh(x) have nothing left of GELU below -3."""
    return lambda x: function(x.astype(jnp.float32)).astype(x.dtype)


ACTIVATION_FUNCTIONS = {name: _widened(function) for name, function in _NARROW_ACTIVATIONS.items()}


def activate(projected: jax.Array, activation: str) -> jax.Array:
    """Apply the activation to the first gate and multiply by the second, where there is one.

    (…, G, F) to (…, F).
    """
    return (
        _plain(projected, activation) if projected.shape[-2] == 1 else _gated(activation, projected)
    )


@partial(jax.checkpoint, static_argnums=1, prevent_cse=False)
def clamped_gate(projected: jax.Array, gate: ClampedGate) -> jax.Array:
    """Bring both gates together as gpt-oss does: (…, 2, F) to (…, F); float32 inside."""
    wide = projected.astype(jnp.float32)
    first = jnp.minimum(wide[..., 0, :], gate.limit)
    second = jnp.clip(wide[..., 1, :], -gate.limit, gate.limit)
    return (first * nn.sigmoid(gate.alpha * first) * (second + 1)).astype(projected.dtype)


@partial(jax.checkpoint, static_argnums=1, prevent_cse=False)
def _plain(projected: jax.Array, activation: str) -> jax.Array:
    return ACTIVATION_FUNCTIONS[activation](projected[..., 0, :])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: str, projected: jax.Array) -> jax.Array:
    return ACTIVATION_FUNCTIONS[activation](projected[..., 0, :]) * projected[..., 1, :]


def _gated_forward(activation: str, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gated(activation, projected), projected


def _gated_backward(
    activation: str, projected: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    """Give both gates' gradients as one array, written in one pass, in the dtype of `projected`.

    Slices' own gradients would be padded with zeros and added. A choice between the two by place
    took GPUs a second pass: compiled for an H100, a layer of 16k tokens and 8,192 units moves 10.2
    instead of 11.2 GB (of SiLU; of GELU the same), with one kernel less. A float32 derivative is
    written to memory: with 2,048 dims the backward pass would move 4.76 instead of 4.23 GB.
    """
    first, second = projected[..., 0, :], projected[..., 1, :]
    inner, pull_back = jax.vjp(_NARROW_ACTIVATIONS[activation], first)
    (to_first,) = pull_back(cotangent * second)
    return (jnp.stack([to_first, cotangent * inner], axis=-2),)


_gated.defvjp(_gated_forward, _gated_backward)

Initializer = Callable[..., jax.Array]
Heads = tuple[jax.Array, jax.Array, jax.Array]

normal: Callable[..., Initializer] = nn.initializers.normal
zeros: Initializer = nn.initializers.zeros


class Norm(nn.Module):
    """A norm over the last dim: scale (D), and bias (D) for a layer norm; or over all heads (H, K).

    Heads may be repeated: more than the scale has, neighbours equal.
    """

    config: NormConfig
    width: int | tuple[int, int]

    def setup(self) -> None:
        """Declare the parameters."""
        is_offset = self.config.kind == "rms_offset"
        initial = 0.0 if is_offset else self.config.initial_scale
        shape = self.width if isinstance(self.width, tuple) else (self.width,)
        self.scale = self.param("scale", nn.initializers.constant(initial), shape)
        if self.config.kind == "layer":
            self.bias = self.param("bias", zeros, shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise (…, D), or (…, H, K); float32 inside."""
        if self.config.kind == "layer":
            centred: jax.Array = layer_norm(x, self.scale, self.bias, self.config.epsilon)
            return centred
        scale = self.scale + 1 if self.config.kind == "rms_offset" else self.scale
        if isinstance(self.width, tuple) and x.shape[-2] != self.width[0]:
            scale = jnp.repeat(scale, x.shape[-2] // self.width[0], axis=0)
        normed: jax.Array = rms_norm(x, scale, self.config.epsilon)
        return normed


class Linear(nn.Module):
    """A linear layer around the transformer: kernel (D, F) and bias (F)."""

    num_inputs: int
    num_outputs: int
    init_stddev: float

    def setup(self) -> None:
        """Declare the parameters."""
        shape = (self.num_inputs, self.num_outputs)
        self.kernel = self.param("kernel", normal(self.init_stddev), shape)
        self.bias = self.param("bias", zeros, shape[1:])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (…, D) to (…, F)."""
        return product(x, self.kernel.astype(x.dtype)) + self.bias.astype(x.dtype)

    def wide(self, x: jax.Array) -> jax.Array:
        """Map (…, D) to (…, F), float32."""
        return wide_product(x, self.kernel.astype(x.dtype)) + self.bias


class Attention(nn.Module):
    """Attention's parameters: from the model's width to heads, and back.

    With as many key-value heads as heads one kernel `qkv` (D, 3, H, K), else, and over another
    sequence, `q` (D, H, K) and `kv` (D, 2, G, K); `out` (H, K, D); biases like the kernels
    without D, or (D); `sinks` (H) where heads have them.
    """

    config: AttentionConfig
    width: int
    init_stddev: float
    out_stddev: float

    def setup(self) -> None:
        """Declare the parameters."""
        c, init = self.config, normal(self.init_stddev)
        shapes: dict[str, tuple[int, ...]] = {"qkv": (3, c.num_heads, c.head_dim)}
        if not c.is_fused:
            shapes = {"q": (c.num_heads, c.head_dim), "kv": (2, c.num_kv_heads, c.head_dim)}
        for name, shape in shapes.items():
            setattr(self, name, self.param(name, self._initial(init, name), (self.width, *shape)))
            if c.has_input_bias:
                setattr(self, f"{name}_bias", self.param(f"{name}_bias", zeros, shape))
        shape = (c.num_heads, c.head_dim, self.width)
        self.out = self.param("out", normal(self.out_stddev), shape)
        if c.has_output_bias:
            self.out_bias = self.param("out_bias", zeros, (self.width,))
        if c.has_sinks:
            self.sinks = self.param("sinks", init, (c.num_heads,))
        if c.norm is not None:
            joint = c.is_norm_joint
            self.q_norm = Norm(c.norm, (c.num_heads, c.head_dim) if joint else c.head_dim)
            self.k_norm = Norm(c.norm, (c.num_kv_heads, c.head_dim) if joint else c.head_dim)

    def kernels(self) -> list[SplitKernel]:
        """Return what reads the activation, for `project_together`.

        The last, of keys and values, reads the other sequence in cross-attention.
        """
        if self.config.is_fused:
            return [SplitKernel(self.qkv, 2)]
        return [SplitKernel(self.q, 1), SplitKernel(self._repeated(self.kv), 2)]

    def heads(
        self, projected: list[jax.Array], rotary: RotaryConfig | None, rotation: Rotation | None
    ) -> Heads:
        """Turn the kernels' products into queries (B, T, H, K), keys and values (B, T, G, K)."""
        if self.config.is_fused:
            biased = self._biased(projected[0], "qkv")
            query, key, value = jnp.unstack(biased, axis=-3)
            query, key = self._normed(query, "q_norm"), self._normed(key, "k_norm")
        else:
            query, (key, value) = self.queries(projected[0]), self.keys_values(projected[1])
        if rotary is not None and rotation is not None:
            query, key = rotate(rotary, query, rotation), rotate(rotary, key, rotation)
        return query, key, value

    def queries(self, projected: jax.Array) -> jax.Array:
        """Turn the product with `q` into queries (B, T, H, K)."""
        return self._normed(self._biased(projected, "q"), "q_norm")

    def keys_values(self, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Turn the product with `kv` into keys and values (B, T, G, K)."""
        key, value = jnp.unstack(self._biased(projected, "kv"), axis=-3)
        return self._normed(key, "k_norm"), value

    def head_sinks(self) -> jax.Array | None:
        """Return each head's score of no token, (H,)."""
        return self.sinks if self.config.has_sinks else None

    def output_bias(self) -> jax.Array | None:
        """Return what is added after `out`."""
        return self.out_bias if self.config.has_output_bias else None

    def _biased(self, projected: jax.Array, kernel: str) -> jax.Array:
        if not self.config.has_input_bias:
            return projected
        bias = getattr(self, f"{kernel}_bias")
        bias = self._repeated(bias) if kernel == "kv" else bias
        return projected + bias.astype(projected.dtype)

    def _normed(self, heads: jax.Array, norm: str) -> jax.Array:
        if self.config.norm is None:
            return heads
        normed: jax.Array = getattr(self, norm)(heads)
        return normed

    def _initial(self, init: Initializer, kernel: str) -> Initializer:
        """Return an initializer that multiplies what makes queries by the config's factor."""
        factor = self.config.query_init
        if factor == 1.0 or kernel == "kv":
            return init
        queries = (slice(None), 0) if kernel == "qkv" else ()

        def initialize(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return init(key, shape).at[queries].multiply(factor)

        return initialize

    def _repeated(self, kv: jax.Array) -> jax.Array:
        """Repeat the groups (…, G, K) until the model's shards can split them."""
        c = self.config
        held = num_groups_held(c.num_kv_heads, c.num_heads)
        return kv if held == c.num_kv_heads else jnp.repeat(kv, held // c.num_kv_heads, axis=-2)


class Mlp(nn.Module):
    """The position-wise layer's parameters: `wi` (D, 1 or 2 gates, F), `wo` (F, D), biases."""

    config: MlpConfig
    width: int
    init_stddev: float
    out_stddev: float

    def setup(self) -> None:
        """Declare the parameters."""
        c = self.config
        shape = (2 if c.is_gated else 1, c.mlp_dim)
        self.wi = self.param("wi", normal(self.init_stddev), (self.width, *shape))
        self.wo = self.param("wo", normal(self.out_stddev), (c.mlp_dim, self.width))
        if c.has_bias:
            self.wi_bias = self.param("wi_bias", zeros, shape)
            self.wo_bias = self.param("wo_bias", zeros, (self.width,))

    def kernels(self) -> list[SplitKernel]:
        """Return what reads the activation, for `project_together`."""
        return [SplitKernel(self.wi, 2)]

    def inner(self, projected: jax.Array, keys: jax.Array | None, site: int) -> jax.Array:
        """Turn the kernel's product (B, T, gates, F) into (B, T, F), which `wo` reads."""
        c = self.config
        if c.has_bias:
            projected = projected + self.wi_bias.astype(projected.dtype)
        return dropout(activate(projected, c.activation), c.dropout, keys, site)

    def output_bias(self) -> jax.Array | None:
        """Return what is added after `wo`."""
        return self.wo_bias if self.config.has_bias else None
