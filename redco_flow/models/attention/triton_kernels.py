"""Flash attention in Pallas' Triton: causal order, windows, segments, soft caps, grouped queries.

No array as large as the scores is made: a program of the grid holds a block of queries (or, for
the gradients of keys and values, of keys) and walks over the blocks of the other that it sees; of
packed rows those of other documents are passed by.
Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2; a group's gradients are added
up inside of the kernel, so keys and values are never repeated for their heads.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, R heads of a group,
K head dim; q, m, d of a block.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from redco_flow.models.attention.triton_blocks import (
    Form,
    Operands,
    Segments,
    by_head,
    in_range,
    keys_seen,
    padded_head_dim,
    queries_seeing,
    shared_specs,
    specs_of_queries,
    sums_spec,
    with_ranges,
)

_LOG2_E = math.log2(math.e)
# Below all scores, and finite: of a block that shows nothing it leaves no NaN.
_LOWEST = -0.7 * float(np.finfo(np.float32).max)
# With the blocks of `triton_blocks`, for heads of 64 and 128 dims in bfloat16: within 10% of the
# fastest of 24 or 36 choices for each kernel on an H200.
_FORWARD_STAGES = {128: 3}
_BACKWARD_WARPS = 4
_NUM_STAGES = 2


class Results(NamedTuple):
    """The forward pass's results that the backward pass reads, as arrays, specs or references.

    Args:
        cotangent: of the results, (B, Q, H, K).
        log_sums: base-2 logarithms of the softmax' sums, (B, H, Q).
        inner: products of results and cotangent, summed over K, (B, H, Q).
    """

    cotangent: Any
    log_sums: Any
    inner: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(form: Form, operands: Operands) -> jax.Array:
    """Attend: (B, Q, H, K). Q and M are multiples of their blocks.

    Products of float32 are of float32; all others are added up in float32. A query that sees no
    key gives 0.
    """
    heads: jax.Array = _forward(form, operands)[0]
    return heads


def _flash_forward(form: Form, operands: Operands) -> tuple[jax.Array, tuple[Any, ...]]:
    heads, log_sums = _forward(form, operands)
    return heads, (operands, heads, log_sums)


def _flash_backward(form: Form, kept: tuple[Any, ...], cotangent: jax.Array) -> tuple[Operands]:
    operands, heads, log_sums = kept
    products = heads.astype(jnp.float32) * cotangent.astype(jnp.float32)
    results = Results(cotangent, log_sums, jnp.sum(products, axis=-1).swapaxes(1, 2))
    of_query = _query_gradient(form, operands, results)
    return (Operands(of_query, *_key_gradients(form, operands, results), None, None),)


flash_attention.defvjp(_flash_forward, _flash_backward)


@functools.partial(jax.jit, static_argnums=0)
def _forward(form: Form, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Return heads (B, Q, H, K), and their softmax' `Results.log_sums`."""
    num_rows, num_queries, num_heads, head_dim = operands.query.shape
    block = form.blocks.queries
    operands = with_ranges(operands, 0, block, form.blocks.keys)
    specs = specs_of_queries(operands, block)
    found: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_forward_kernel, form, head_dim),
        grid=(num_queries // block, num_heads, num_rows),
        in_specs=[specs],
        out_specs=[specs.query, sums_spec(block)],
        out_shape=[
            operands.query,
            jax.ShapeDtypeStruct((num_rows, num_heads, num_queries), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if head_dim <= 64 and block < 128 else 8,
            num_stages=_FORWARD_STAGES.get(block, _NUM_STAGES),
        ),
        interpret=form.is_interpreted,
        name=_name("flash_forward", form),
    )(operands)
    return found


def _forward_kernel(form: Form, head_dim: int, refs: Operands, out_ref: Any, sums_ref: Any) -> None:
    """Attend with a block of queries: walk over keys with the largest score and the sum so far."""
    block, step = form.blocks.queries, form.blocks.keys
    number = pl.program_id(0)
    load = _Loader(refs.query.shape[-1], head_dim)
    query, window = load(refs.query), _window_of(refs)
    side = _Side.of(number, block, refs.segments, 0)

    def visit(index: Any, carry: Any) -> Any:
        accumulated, largest, total = carry
        where = pl.ds(index * step, step)
        key, value = load(refs.key.at[where, :]), load(refs.value.at[where, :])
        scores, _ = _scores(form, _product(query, key, trans_b=True))
        shown = _visible(form, side, _Side.of(index, step, refs.segments, 1, where), window)
        if shown is not None:
            scores = jnp.where(shown, scores, _LOWEST)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = _shown(shown, jnp.exp2(scores - new_largest[:, None]))
        shrunk = jnp.exp2(largest - new_largest)
        accumulated = accumulated * shrunk[:, None] + _product(weights.astype(value.dtype), value)
        return accumulated, new_largest, total * shrunk + jnp.sum(weights, axis=1)

    start = (
        jnp.zeros(query.shape, jnp.float32),
        jnp.full(block, _LOWEST, jnp.float32),
        jnp.zeros(block, jnp.float32),
    )
    first, end = in_range(refs, *keys_seen(form, number * block, block, step, window))
    accumulated, largest, total = jax.lax.fori_loop(first, end, visit, start)
    total = jnp.where(total > 0, total, 1.0)
    load.store(out_ref, accumulated / total[:, None])
    sums_ref[...] = largest + jnp.log2(total)


def _name(kernel: str, form: Form) -> str:
    """Return a kernel's name in programs, by which `engine.step.step_time` counts its products."""
    return f"{kernel}_causal" if form.is_causal else kernel


def _query_gradient(form: Form, operands: Operands, results: Results) -> jax.Array:
    """Return the gradient of queries (B, Q, H, K)."""
    num_rows, num_queries, num_heads, head_dim = operands.query.shape
    block = form.blocks.held
    operands = with_ranges(operands, 0, block, form.blocks.walked)
    specs, sums = specs_of_queries(operands, block), sums_spec(block)
    gradient: jax.Array = pl.pallas_call(
        functools.partial(_query_gradient_kernel, form, head_dim),
        grid=(num_queries // block, num_heads, num_rows),
        in_specs=[specs, Results(specs.query, sums, sums)],
        out_specs=specs.query,
        out_shape=operands.query,
        compiler_params=plgpu.CompilerParams(num_warps=_BACKWARD_WARPS, num_stages=_NUM_STAGES),
        interpret=form.is_interpreted,
        name=_name("flash_query_gradient", form),
    )(operands, results)
    return gradient


def _query_gradient_kernel(
    form: Form, head_dim: int, refs: Operands, results: Results, out_ref: Any
) -> None:
    """Compute a block of queries' gradient: walk over the keys that they see."""
    block, step = form.blocks.held, form.blocks.walked
    number = pl.program_id(0)
    load = _Loader(refs.query.shape[-1], head_dim)
    query, cotangent, window = load(refs.query), load(results.cotangent), _window_of(refs)
    sums = results.log_sums[...], results.inner[...]
    side = _Side.of(number, block, refs.segments, 0)

    def visit(index: Any, accumulated: jax.Array) -> jax.Array:
        where = pl.ds(index * step, step)
        key, value = load(refs.key.at[where, :]), load(refs.value.at[where, :])
        shown = _visible(form, side, _Side.of(index, step, refs.segments, 1, where), window)
        arrays = (query, key, value, cotangent)
        _, of_products = _weights_and_gradient(form, arrays, sums, shown)
        return accumulated + _product(of_products.astype(key.dtype), key)

    first, end = in_range(refs, *keys_seen(form, number * block, block, step, window))
    zeros = jnp.zeros(query.shape, jnp.float32)
    load.store(out_ref, jax.lax.fori_loop(first, end, visit, zeros))


def _key_gradients(form: Form, operands: Operands, results: Results) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of keys and values (B, M, G, K)."""
    num_rows, num_keys, num_groups, head_dim = operands.key.shape
    num_queries = operands.query.shape[1]
    num_repeats = operands.query.shape[2] // num_groups
    block = form.blocks.held
    operands = with_ranges(operands, 1, block, form.blocks.walked)
    of_queries = pl.BlockSpec(
        (None, num_queries, num_repeats, padded_head_dim(head_dim)), lambda i, g, b: (b, 0, g, 0)
    )
    of_keys = by_head(block, head_dim, lambda i, g, b: (b, i, g, 0))
    sums = pl.BlockSpec((None, num_repeats, num_queries), lambda i, g, b: (b, g, 0))
    shared = shared_specs(
        operands, (num_queries, lambda i, g, b: (b, 0)), (block, lambda i, g, b: (b, i))
    )
    gradients: list[jax.Array] = pl.pallas_call(
        functools.partial(_key_gradients_kernel, form, head_dim, num_repeats),
        grid=(num_keys // block, num_groups, num_rows),
        in_specs=[
            Operands(of_queries, of_keys, of_keys, *shared), Results(of_queries, sums, sums)
        ],
        out_specs=[of_keys, of_keys],
        out_shape=[operands.key, operands.value],
        compiler_params=plgpu.CompilerParams(num_warps=_BACKWARD_WARPS, num_stages=_NUM_STAGES),
        interpret=form.is_interpreted,
        name=_name("flash_key_gradients", form),
    )(operands, results)  # fmt: skip
    return gradients[0], gradients[1]


def _key_gradients_kernel(
    form: Form,
    head_dim: int,
    num_repeats: int,
    refs: Operands,
    results: Results,
    key_ref: Any,
    value_ref: Any,
) -> None:
    """Compute a block of keys' gradients: walk over the queries, of all heads, that see them."""
    block, step = form.blocks.held, form.blocks.walked
    number = pl.program_id(0)
    load = _Loader(refs.key.shape[-1], head_dim)
    key, value, window = load(refs.key), load(refs.value), _window_of(refs)
    keys = _Side.of(number, block, refs.segments, 1)

    def visit(head: Any, index: Any, carry: Any) -> Any:
        of_key, of_value = carry
        where = pl.ds(index * step, step)
        query, cotangent = (load(x.at[where, head, :]) for x in (refs.query, results.cotangent))
        shown = _visible(form, _Side.of(index, step, refs.segments, 0, where), keys, window)
        sums = results.log_sums[head, where], results.inner[head, where]
        arrays = (query, key, value, cotangent)
        weights, of_products = _weights_and_gradient(form, arrays, sums, shown)
        of_value += _product(weights.astype(cotangent.dtype), cotangent, trans_a=True)
        of_key += _product(of_products.astype(query.dtype), query, trans_a=True)
        return of_key, of_value

    num_steps = refs.query.shape[0] // step
    first, end = queries_seeing(form, number * block, block, step, num_steps, window)
    first, end = in_range(refs, first, end)

    def visit_head(head: Any, carry: Any) -> Any:
        return jax.lax.fori_loop(first, end, functools.partial(visit, head), carry)

    zeros = jnp.zeros(key.shape, jnp.float32)
    of_key, of_value = jax.lax.fori_loop(0, num_repeats, visit_head, (zeros, zeros))
    load.store(key_ref, of_key)
    load.store(value_ref, of_value)


class _Loader:
    """Loads and stores (tokens, K), filled up with 0 to a power of 2."""

    def __init__(self, padded: int, head_dim: int) -> None:
        self._mask = (jnp.arange(padded) < head_dim)[None, :] if padded != head_dim else None

    def __call__(self, ref: Any) -> jax.Array:
        other = None if self._mask is None else 0.0
        loaded: jax.Array = plgpu.load(ref, mask=self._mask, other=other)
        return loaded

    def store(self, ref: Any, numbers: jax.Array) -> None:
        """Store in the reference's dtype."""
        plgpu.store(ref, numbers.astype(ref.dtype), mask=self._mask)


class _Side(NamedTuple):
    """The places and segments of a block's queries or keys."""

    places: jax.Array
    segments: jax.Array | None

    @classmethod
    def of(
        cls, index: Any, block: int, segments: Segments | None, side: int, where: Any = ...
    ) -> _Side:
        """Return those of the block `index` of queries (side 0) or keys (side 1)."""
        ids = None if segments is None else segments[side][where]
        return cls(index * block + jnp.arange(block), ids)


def _window_of(refs: Operands) -> Any:
    return None if refs.window is None else refs.window[0]


def _visible(form: Form, queries: _Side, keys: _Side, window: Any) -> jax.Array | None:
    """Return (q, m) which queries see which keys; None: all."""
    back = queries.places[:, None] - keys.places[None, :]
    parts = []
    if form.is_causal:
        parts.append(back >= 0)
    if window is not None:
        parts.append(back < window)
    if queries.segments is not None and keys.segments is not None:
        parts.append(queries.segments[:, None] == keys.segments[None, :])
    if form.num_keys % form.blocks.of_keys:
        parts.append(jnp.broadcast_to(keys.places[None, :] < form.num_keys, back.shape))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _shown(shown: jax.Array | None, weights: jax.Array) -> jax.Array:
    return weights if shown is None else jnp.where(shown, weights, 0.0)


def _scores(form: Form, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return scores in base 2 of products (q, m), and the soft cap's tanh where there is one."""
    if form.cap is None:
        return products * (form.scale * _LOG2_E), None
    squeezed = jnp.tanh(products * (form.scale / form.cap))
    return squeezed * (form.cap * _LOG2_E), squeezed


def _weights_and_gradient(
    form: Form,
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    sums: tuple[jax.Array, jax.Array],
    shown: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the softmax' weights (q, m), and the gradient of the products of queries and keys.

    Args:
        arrays: query, key, value and the cotangent of the results, of a block each.
        sums: `Results.log_sums` and `inner` (q,) of a block's queries.
    """
    (query, key, value, cotangent), (log_sums, inner) = arrays, sums
    scores, squeezed = _scores(form, _product(query, key, trans_b=True))
    weights = _shown(shown, jnp.exp2(scores - log_sums[:, None]))
    of_weights = _product(cotangent, value, trans_b=True)
    of_scores = weights * (of_weights - inner[:, None]) * form.scale
    if squeezed is not None:
        of_scores *= 1.0 - squeezed * squeezed
    return weights, of_scores


def _product(one: jax.Array, other: jax.Array, **transposed: bool) -> jax.Array:
    """Multiply matrices; float32 by float32, and not by TF32."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    product: jax.Array = plgpu.dot(one, other, precision=precision, **transposed)
    return product.astype(jnp.float32)
