"""One block of queries over one block of keys by TPUs' splash attention, forward and backward.

What `block.py` does, with the same results, but the scores stay in the kernel. A block is as long
as a shard's part of a sequence, so where it lies is known only while it runs: the kernel gets the
queries' numbers, and which of its own blocks to skip, as arrays. Of one turn the backward kernels
need nothing but the whole softmax' log-sum-exp and each query's heads times their cotangent.
Dims in this file: B batch, Q queries, M keys, G key-value groups, R heads per group, H = G * R
heads, K head dim; q and m blocks of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Hiding, SameDocument, ScoreBlock, VisibleKeys
from redco_flow.models.attention.block import (
    NEVER,
    Gradients,
    Result,
    Running,
    Scoring,
    Shared,
    safe,
)
from redco_flow.models.attention.kernel_calls import HIDDEN, padded_to
from redco_flow.models.attention.splash import Segments, block_length

# Below it a log-sum-exp is that of hidden keys alone.
_SEEN = -1e37


def absorb(
    scoring: Scoring,
    shared: Shared,
    block: ScoreBlock,
    query: jax.Array,
    running: Running,
    key: jax.Array,
    value: jax.Array,
) -> Running:
    """Bring keys and values (B, M, G, K) into the softmax of queries (B, Q, G, R, K)."""

    def attend(call: _Call) -> tuple[jax.Array, jax.Array]:
        return call.forward(_by_head(query), _by_head(key), _by_head(value))

    heads, log_sum = _by_window(scoring, shared, block, attend)
    log_sum = log_sum.reshape(running.largest.shape)
    is_seen = log_sum > _SEEN
    heads = jnp.where(is_seen[..., None], heads.reshape(running.total.shape), 0)
    largest = jnp.maximum(running.largest, jnp.where(is_seen, log_sum, NEVER))
    weight = jnp.where(is_seen, jnp.exp(log_sum - largest), 0)
    shrunk = jnp.exp(running.largest - largest)
    return Running(
        running.total * shrunk[..., None] + heads.astype(jnp.float32) * weight[..., None],
        largest,
        running.normaliser * shrunk + weight,
    )


def pull_back(
    scoring: Scoring,
    shared: Shared,
    block: ScoreBlock,
    query: jax.Array,
    result: Result,
    key: jax.Array,
    value: jax.Array,
) -> Gradients:
    """Return what a block adds to the gradients; its scores are computed again, in the kernel."""
    log_sum = result.largest + jnp.log(safe(result.normaliser))
    log_sum = log_sum.reshape(query.shape[0], -1, log_sum.shape[-1])
    inner = jnp.moveaxis(result.inner, 1, -1).reshape(log_sum.shape)

    def pull(call: _Call) -> tuple[jax.Array, jax.Array, jax.Array]:
        cotangent = _by_head(result.cotangent)
        return call.backward(
            _by_head(query), _by_head(key), _by_head(value), cotangent, log_sum, inner
        )

    of_query, of_key, of_value = (
        jnp.swapaxes(gradient, 1, 2).astype(jnp.float32)
        for gradient in _by_window(scoring, shared, block, pull)
    )
    return Gradients(of_query.reshape(query.shape), of_key, of_value, ())


def _by_head(x: jax.Array) -> jax.Array:
    """View (B, T, G, R, K) or (B, T, G, K) as (B, H, T, K)."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, x.shape[-1]), 1, 2)


def _by_window(
    scoring: Scoring, shared: Shared, block: ScoreBlock, run: Callable[[_Call], Any]
) -> Any:
    """Run with the layer's window; where that is an array there is a kernel for each it may be."""
    segments = _segments(scoring, shared.hiding, block)
    calls = [
        _Call(
            _Visible(scoring.is_causal, window, block.num_keys),
            scoring.cap,
            block,
            segments,
            is_interpreted=scoring.is_interpreted,
        )
        for window in (scoring.windows if shared.window is not None else (scoring.window,))
    ]
    if len(calls) == 1:
        return run(calls[0])
    number = jnp.argmax(jnp.asarray(scoring.windows) == shared.window)
    return jax.lax.switch(number, [partial(run, call) for call in calls])


def _segments(scoring: Scoring, hiding: tuple[Hiding, ...], block: ScoreBlock) -> Segments | None:
    """Return the segments that hide what rows hide, and keys that only fill up a sequence."""
    # Causal queries see no key behind the text's last one.
    if scoring.is_causal and not hiding:
        return None
    num_rows = jax.tree.leaves(hiding)[0].shape[0] if hiding else 1
    of_queries = jnp.zeros((num_rows, block.num_queries), jnp.int32)
    of_keys = jnp.zeros((num_rows, block.num_keys), jnp.int32)
    for bias in hiding:
        if isinstance(bias, SameDocument):
            of_queries, of_keys = (x.astype(jnp.int32) for x in bias.segments(block))
    for bias in hiding:
        if isinstance(bias, VisibleKeys):
            of_keys = jnp.where(bias.visible(block) != 0, of_keys, HIDDEN)
    return of_queries, jnp.where(block.keys < scoring.num_keys, of_keys, HIDDEN)


@dataclass(frozen=True)
class _Visible:
    """Says what the kernel asks: which keys queries see; by their numbers from the first key on.

    Args:
        num_keys: those of the block; what the kernel has beyond only fills it up.
    """

    is_causal: bool
    window: int | None
    num_keys: int

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Compare numbers of queries and keys, of equal shapes."""
        visible = keys < self.num_keys
        if self.is_causal:
            visible &= queries >= keys
        if self.window is not None:
            visible &= queries - keys < self.window
        return visible

    def any(self, firsts: jax.Array, lasts: jax.Array, keys: jax.Array, size: int) -> jax.Array:
        """Say (q, m) where any of the queries firsts … lasts (q,) sees any of `size` keys (m,)."""
        needed = jnp.broadcast_to(keys < self.num_keys, (firsts.size, keys.size))
        if self.is_causal:
            needed &= lasts[:, None] >= keys
        if self.window is not None:
            needed &= firsts[:, None] - (keys + size - 1) < self.window
        return needed


class _Call(NamedTuple):
    """A kernel, and where the block lies that it is called for."""

    visible: _Visible
    cap: float | None
    block: ScoreBlock
    segments: Segments | None
    is_interpreted: bool

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the lengths of the kernel's own blocks of queries and keys."""
        return block_length(self.block.num_queries), block_length(self.block.num_keys)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "mask_value": _kernels().DEFAULT_MASK_VALUE,
            "is_mqa": False,
            "attn_logits_soft_cap": self.cap,
            "mask_function": self.visible,
            "interpret": self.is_interpreted,
        }

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the heads (B, H, Q, K) over these keys alone and their log-sum-exp (B, H, Q)."""
        of_queries, of_keys = self.lengths
        kernel = _kernels().SplashAttentionKernel(
            self._mask_info(along_keys=True),
            None,
            None,
            block_sizes=_kernels().BlockSizes(of_queries, of_keys),
            save_residuals=True,
            residual_checkpoint_name=None,
            **self.options,
        )
        heads, (log_sum,) = self._each_row(
            kernel, self._filled(query, 0), self._filled(key, 1), self._filled(value, 1)
        )
        num_queries = self.block.num_queries
        return heads[:, :, :num_queries], log_sum[:, :, :num_queries]

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cotangent: jax.Array,
        log_sum: jax.Array,
        inner: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients of queries (B, H, Q, K), keys and values (B, G, M, K)."""
        of_queries, of_keys = self.lengths
        layout = _kernels().QKVLayout.HEAD_DIM_MINOR
        options = {
            "bq": of_queries,
            "bkv": of_keys,
            **dict.fromkeys(("q_layout", "k_layout", "v_layout"), layout),
            **self.options,
        }
        along_keys, along_queries = (self._mask_info(along_keys=along) for along in (True, False))

        def pull(*operands: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            query, key, value, cotangent, log_sum, inner, ids = operands
            given = (query, key, value, ids, None, log_sum, cotangent, inner)
            # No public function takes a log-sum-exp that is not of these keys alone.
            of_query = _kernels()._splash_attention_bwd_dq(*given, mask_info=along_keys, **options)
            _, of_key, of_value = _kernels()._splash_attention_bwd_dkv(
                *given,
                mask_info=along_queries,
                bkv_compute=of_keys,
                use_fused_bwd_kernel=False,
                **options,
            )
            return of_query, of_key, of_value

        of_query, of_key, of_value = self._each_row(
            pull,
            self._filled(query, 0),
            *(self._filled(x, 1) for x in (key, value)),
            *(self._filled(x, 0) for x in (cotangent, log_sum, inner)),
        )
        num_queries, num_keys = self.block.num_queries, self.block.num_keys
        return of_query[:, :, :num_queries], of_key[:, :, :num_keys], of_value[:, :, :num_keys]

    def _filled(self, x: jax.Array, side: int) -> jax.Array:
        """Fill the sequence of (B, H, T, …) up to whole blocks of queries (0) or keys (1)."""
        return padded_to(x, 2, self.lengths[side])

    def _each_row(self, function: Callable[..., Any], *operands: jax.Array) -> Any:
        """Call it with each row, and its segments behind them."""
        if self.segments is None:
            return jax.vmap(lambda *row: function(*row, None))(*operands)
        batch = operands[0].shape[0]
        of_queries, of_keys = (
            jnp.broadcast_to(
                padded_to(ids, 1, length), (batch, ids.shape[1] + -ids.shape[1] % length)
            )
            for ids, length in zip(self.segments, self.lengths, strict=True)
        )
        return jax.vmap(function)(*operands, _kernels().SegmentIds(of_queries, of_keys))

    def _mask_info(self, *, along_keys: bool) -> Any:
        """Return what tells the kernel which blocks to skip, and the queries' numbers.

        A block that is skipped names the nearest one that is not, which is in memory already.

        Args:
            along_keys: whether the kernel goes along the keys; else along the queries.
        """
        of_queries, of_keys = self.lengths
        offset = (self.block.first_query - self.block.first_key).astype(jnp.int32)
        num_queries, num_keys = self.block.num_queries, self.block.num_keys
        queries = offset + jnp.arange(num_queries + -num_queries % of_queries, dtype=jnp.int32)
        firsts = queries[::of_queries]
        keys = jnp.arange(0, num_keys, of_keys, dtype=jnp.int32)
        needed = self.visible.any(firsts, firsts + of_queries - 1, keys, of_keys)
        dim = 1 if along_keys else 0
        first = jnp.argmax(needed, dim, keepdims=True)
        last = needed.shape[dim] - 1 - jnp.argmax(jnp.flip(needed, dim), dim, keepdims=True)
        numbers = jax.lax.broadcasted_iota(jnp.int32, needed.shape, dim)
        # Scalar memory is small.
        nearest = jnp.clip(numbers, first, last).astype(jnp.int16)
        return _mask_infos().MaskInfo(
            data_next=nearest[None],
            mask_next=None,
            block_mask=needed[None].astype(jnp.int8),
            partial_mask_blocks=None,
            q_sequence=queries,
        )


def _kernels() -> Any:
    # Importing Mosaic takes most of a second, which only TPUs' users should wait for.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def _mask_infos() -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

    return splash_attention_mask_info
