"""Attention over sequences that are split over the context shards, by a ring.

The whole as other code sees it: arrays of any length, with gradients. The backward pass is written
out, since differentiating the loop would keep the scores of every turn.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, R heads per group, K
head dim.
Source: Liu et al. 2023, Ring Attention with Blockwise Transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from redco_flow.engine.random import check_num_elements
from redco_flow.models.attention.bias import Biases, ByDistance, Hiding
from redco_flow.models.attention.block import Result, Scoring, Shared
from redco_flow.models.attention.context import CONTEXT_AXIS, num_context_shards, on_context_shards
from redco_flow.models.attention.cudnn import cudnn_attend
from redco_flow.models.attention.grouped import (
    Window,
    attend_grouped,
    split_groups,
)
from redco_flow.models.attention.kernel_calls import KEPT, padded_to, row_and_head_axes
from redco_flow.models.attention.kernels import choose_kernel
from redco_flow.models.attention.ring_turns import (
    Ring,
    RingKernel,
    backward,
    forward,
    plan_ring,
)
from redco_flow.models.attention.splash import splash_attend
from redco_flow.models.attention.triton import triton_attend
from redco_flow.models.layer_config import AttentionConfig
from redco_flow.models.numerics import scaled
from redco_flow.models.transformer.saved_activations import named_in_parts


def ring_attend(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    dropout_keys: jax.Array | None = None,
    dropout_site: int = 0,
    is_balanced: bool = False,
    kernel: RingKernel = "xla",
    windows: tuple[int, ...] = (),
    is_interpreted: bool = False,
    offload_share: float = 1.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    Q and M are split over the mesh axis `context`; neither has to be a multiple of it. Results are
    those of `attend_grouped`, but for rows that may see no key at all: those stay finite. Per
    layer and device a forward pass sends (n - 1) / n of the keys and values, a backward pass as
    much again and their gradients in float32.

    Args:
        biases: in the forms that are made by blocks.
        window: how many tokens back, itself included, a query looks; None: all.
        dropout_keys: raw keys (B, 2); None: no dropout of the weights.
        is_balanced: whether tokens are in the order of `SequenceOrder`; positions, and what
            biases tell, are those of the text.
        kernel: what works on a block; splash knows neither dropout nor biases of distances, and
            the mesh's model shards divide H and G there.
        windows, is_interpreted: see `splash_attend`.
        offload_share: see `attend_sequence`.
        sinks: see `attend_grouped`; splash knows none.

    Raises:
        ValueError: a bias is an array; or there are too many weights for their dropout.
    """
    num_shards = num_context_shards()
    learned, hiding = _sorted(biases)
    lengths = query.shape[1], key.shape[1]
    if dropout_keys is not None and config.dropout > 0:
        check_num_elements((config.num_heads, *lengths))
    scoring = Scoring(
        num_queries=lengths[0],
        num_keys=lengths[1],
        is_causal=config.is_causal,
        window=None if isinstance(window, jax.Array) else window,
        cap=config.cap,
        dropout_rate=config.dropout,
        dropout_site=dropout_site,
        windows=windows,
        is_interpreted=is_interpreted,
    )
    ring = plan_ring(scoring, num_shards, is_balanced=is_balanced, kernel=kernel)
    padded = ring.queries.length, ring.keys.length
    shared = Shared(
        learned=tuple(bias.padded(*padded) for bias in learned),
        hiding=tuple(bias.padded(*padded) for bias in hiding),
        window=window if isinstance(window, jax.Array) else None,
        dropout_keys=dropout_keys if kernel == "xla" else None,
        sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(key.shape[2], -1),
    )
    grouped = split_groups(scaled(query, config.scale), key.shape[2])
    multiple = _Layout.of(kernel).row_multiple

    def filled(x: jax.Array, length: int) -> jax.Array:
        return padded_to(_padded(x, length), 0, multiple)

    hiding = jax.tree.map(lambda x: padded_to(x, 0, multiple), shared.hiding)
    heads = _attend(
        ring,
        offload_share,
        filled(grouped, padded[0]),
        filled(key, padded[1]),
        filled(value, padded[1]),
        shared._replace(hiding=hiding),
    )
    return heads[: query.shape[0], : lengths[0]].reshape(query.shape)


class _Layout(NamedTuple):
    """The mesh axes that a ring takes besides `context`; all others are the compiler's.

    Args:
        rows, heads: what splits dims B and G.
        row_multiple: what B is filled up to a multiple of.
    """

    takes_all_axes: bool
    rows: tuple[str, ...] | None
    heads: str | None
    row_multiple: int

    @classmethod
    def of(cls, kernel: RingKernel) -> _Layout:
        """Return the layout on the mesh that is being traced for."""
        if kernel == "xla":
            return cls(False, None, None, 1)
        return cls(True, *row_and_head_axes())

    @property
    def sequence(self) -> PartitionSpec:
        """Of (B, T, G, …)."""
        return PartitionSpec(self.rows, CONTEXT_AXIS, self.heads)

    @property
    def chunks(self) -> PartitionSpec:
        """Of (N, B, G, …)."""
        return PartitionSpec(CONTEXT_AXIS, self.rows, self.heads)

    @property
    def operands(self) -> tuple[Any, ...]:
        """Of shards' numbers, queries, keys, values and what is shared."""
        everywhere = PartitionSpec()
        rows = PartitionSpec(self.rows)
        shared = Shared(everywhere, rows, everywhere, everywhere, everywhere)  # type: ignore[arg-type]
        return (PartitionSpec(CONTEXT_AXIS), *[self.sequence] * 3, shared)

    def on_shards(self, function: Any, *in_specs: Any, out_specs: Any) -> Any:
        return on_context_shards(
            function,
            in_specs=(*self.operands, *in_specs),
            out_specs=out_specs,
            takes_all_axes=self.takes_all_axes,
        )


def _sorted(biases: Biases) -> tuple[tuple[ByDistance, ...], tuple[Hiding, ...]]:
    """Return those with gradients, and the others."""
    learned: list[ByDistance] = []
    hiding: list[Hiding] = []
    for bias in biases:
        if isinstance(bias, ByDistance):
            learned.append(bias)
        elif isinstance(bias, jax.Array):
            raise ValueError(
                f"a bias is an array {bias.shape}; over {num_context_shards()} context shards "
                "biases are given by blocks: VisibleKeys, SameDocument or ByDistance of "
                "models.attention.bias."
            )
        else:
            hiding.append(bias)
    return tuple(learned), tuple(hiding)


def _padded(x: jax.Array, length: int) -> jax.Array:
    widths = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    ring: Ring,
    offload_share: float,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    shared: Shared,
) -> jax.Array:
    """Attend with queries (B, Q, G, R, K), whose lengths the shards divide: the same shape."""
    return _attend_forward(ring, offload_share, query, key, value, shared)[0]


def _attend_forward(
    ring: Ring,
    offload_share: float,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    shared: Shared,
) -> tuple[jax.Array, tuple[Any, ...]]:
    layout = _Layout.of(ring.kernel)
    on_shards = layout.on_shards(
        partial(forward, ring), out_specs=(layout.sequence, layout.chunks, layout.chunks)
    )
    heads, *statistics = on_shards(_numbers(ring), query, key, value, shared)
    # All three: without one of them the backward pass would go round the ring for it.
    heads = named_in_parts(heads, KEPT, offload_share)
    largest, normaliser = checkpoint_name(statistics, KEPT)
    return heads, (query, key, value, shared, heads, largest, normaliser)


def _attend_backward(
    ring: Ring, _offload_share: float, saved: tuple[Any, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Shared]:
    query, key, value, shared, heads, largest, normaliser = saved
    inner = jnp.einsum("bqgrk,bqgrk->bqgr", heads, cotangent, preferred_element_type=jnp.float32)
    result = Result(largest, normaliser, cotangent, inner)
    layout = _Layout.of(ring.kernel)
    sequence, chunks = layout.sequence, layout.chunks
    results = Result(chunks, chunks, sequence, sequence)  # type: ignore[arg-type]
    on_shards = layout.on_shards(
        partial(backward, ring),
        results,
        out_specs=(sequence, sequence, sequence, PartitionSpec(), PartitionSpec()),
    )
    *gradients, of_learned, of_sinks = on_shards(_numbers(ring), query, key, value, shared, result)
    of_query, of_key, of_value = (
        gradient.astype(like.dtype)
        for gradient, like in zip(gradients, (query, key, value), strict=True)
    )
    # Nothing else that is shared is a number to be learned.
    of_shared = Shared(of_learned, None, None, None, of_sinks)  # type: ignore[arg-type]
    return of_query, of_key, of_value, of_shared


_attend.defvjp(_attend_forward, _attend_backward)


def _numbers(ring: Ring) -> jax.Array:
    """Return what tells each shard its number."""
    return jnp.arange(ring.keys.num_shards, dtype=jnp.int32)


def attend_sequence(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    dropout_keys: jax.Array | None = None,
    dropout_site: int = 0,
    is_balanced: bool = False,
    kernel: str = "auto",
    windows: tuple[int, ...] = (),
    offload_share: float = 1.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    See `attend_grouped` and `ring_attend` for the other arguments.

    Args:
        kernel: what computes it, one of ATTENTION_KERNELS; over several context shards it works
            on the blocks of a ring.
        windows: the values that `window` may have, where it is an array.
        offload_share: of each device's queries, whose results are offloaded, where results are;
            of kernels without a ring, which name them themselves, all are.

    Raises:
        ValueError: a bias is whole where sequences are split, or the mesh's devices do not have
            the kernel.
    """
    drops = dropout_keys is not None and config.dropout > 0
    chosen = choose_kernel(
        kernel, config, query, key, biases, window=window, windows=windows, drops=drops
    )
    if num_context_shards() == 1:
        # Kernels name their results themselves.
        if chosen == "splash":
            return splash_attend(config, query, key, value, biases, window=window, windows=windows)
        if chosen == "cudnn":
            return cudnn_attend(config, query, key, value, biases, window=window, windows=windows)
        if chosen == "triton":
            return triton_attend(config, query, key, value, biases, window=window)
        heads = attend_grouped(
            config,
            query,
            key,
            value,
            biases,
            window=window,
            dropout_keys=dropout_keys,
            dropout_site=dropout_site,
            sinks=sinks,
        )
        return named_in_parts(heads, KEPT, offload_share)
    return ring_attend(
        config,
        query,
        key,
        value,
        biases,
        window=window,
        dropout_keys=dropout_keys,
        dropout_site=dropout_site,
        is_balanced=is_balanced,
        kernel="splash" if chosen == "splash" else "xla",
        windows=windows,
        offload_share=offload_share,
        sinks=sinks,
    )
