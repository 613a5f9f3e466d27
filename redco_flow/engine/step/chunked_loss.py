"""Cross-entropy from hidden states, some tokens at a time: the logits are never all in memory.

A chunk's logits are dropped in the forward pass and computed again in the backward pass: how much
each row counts is known only there. Every shard adds up its own gradient of the head over all
chunks, so that it is reduced once.

Over `fsdp` the head may stay split, along its vocabulary: the devices there bring a chunk's hidden
states together, and each scores them with its own part. That is done where it sends less than to
gather the head for each device's own tokens.
Dims in this file: B batch, T sequence, D model, V vocabulary, C chunks, N shards of the batch,
F of them that share a head, X of the sequence, b and t rows and tokens of one shard's chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.mesh import (
    CONTEXT_AXIS,
    DATA_AXIS,
    FSDP_AXIS,
    MODEL_AXIS,
    is_mapped,
)
from redco_flow.engine.step.loss import IGNORED_LABEL, PerExample, cross_entropy, label_losses

NumChunks = int | Literal["auto"]
# (a tree of the head's arrays, hidden states (…, D)) -> logits (…, V)
Score = Callable[[Any, jax.Array], jax.Array]

# Float32 logits of one chunk on one device, and their least share of the head's float32 gradient:
# every chunk reads and writes that, and compilers keep it in memory. At a quarter, with a width of
# 4096, a byte moved stands for 400 operations, which no accelerator's products are faster than.
MAX_CHUNK_BYTES = 256 * 2**20
MIN_SHARE_OF_HEAD = 1 / 4


def chunked_cross_entropy(
    score: Score,
    head: Any,
    hidden: jax.Array,
    labels: jax.Array,
    *,
    num_chunks: NumChunks = "auto",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> PerExample:
    """Return `cross_entropy(score(head, hidden), labels, …)`, computed chunk by chunk.

    Outside of a mesh it is computed at once: what derives sharding rules traces it there.

    Args:
        score: scores each token by itself; all arrays that have gradients are in `head`.
        head: a tree of float arrays.
        hidden: (B, T, D).
        labels: (B, T); see `cross_entropy`.
        label_smoothing, z_loss: see `cross_entropy`.
        num_chunks: "auto" keeps a chunk's logits on a device under MAX_CHUNK_BYTES, or under
            MIN_SHARE_OF_HEAD of the head's gradient there, whichever is more.
    """
    num_chunks, cut, sharing = _plan(score, head, hidden, labels, num_chunks)
    head = sharing.split(head)
    if num_chunks == 1:
        logits = score(head, cut.gathered_rows(hidden))
        return cross_entropy(logits, labels, label_smoothing=label_smoothing, z_loss=z_loss)
    compute = _Chunked(score, label_smoothing, z_loss, cut, sharing, num_chunks)
    losses = _losses(compute, head, hidden, labels)
    counted = ((labels != IGNORED_LABEL) & (labels >= 0)).astype(jnp.float32)
    return jnp.sum(losses * counted, axis=1), jnp.sum(counted, axis=1)


def _plan(
    score: Score, head: Any, hidden: jax.Array, labels: jax.Array, asked: NumChunks
) -> tuple[int, _Cut, _Sharing]:
    """Return how many chunks to compute on the mesh that is being traced for, and how."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else {a: n for a, n in mesh.shape.items() if not is_mapped(a)}
    cut = _Cut.of(labels.shape, sizes)
    if mesh.empty:
        return 1, cut, _Sharing()
    num_model_shards = sizes.get(MODEL_AXIS, 1)
    vocab_size = jax.eval_shape(score, head, hidden).shape[-1]
    sharing = _Sharing.of(cut, sizes, head, vocab_size, hidden.shape[-1])
    if sharing.axes:
        cut = replace(cut, num_sharing=sizes[FSDP_AXIS])
    if asked != "auto":
        return min(asked, cut.length), cut, sharing
    num_bytes = 4 * cut.tokens_per_shard * vocab_size / num_model_shards
    head_bytes = 4 * _size(head) / num_model_shards / cut.num_sharing
    chunk_bytes = max(MAX_CHUNK_BYTES, MIN_SHARE_OF_HEAD * head_bytes)
    return min(math.ceil(num_bytes / chunk_bytes), cut.length), cut, sharing


def _size(head: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(head))


@dataclass(frozen=True)
class _Sharing:
    """The split of the vocabulary while losses are computed.

    Args:
        axes: of the mesh, the major one first; empty: as the head's own layout says.
        vocab_size: V.
    """

    axes: tuple[str, ...] = ()
    vocab_size: int = 0

    @classmethod
    def of(
        cls, cut: _Cut, sizes: Mapping[str, int], head: Any, vocab_size: int, width: int
    ) -> _Sharing:
        """Let the devices along `fsdp` share the head where that sends less.

        Either the head is gathered twice and its gradient reduced, or the tokens' hidden states
        are, and the head is laid out by vocabulary. Kernels without that dim would be multiplied
        by every token on every device.

        Args:
            sizes: of the mesh's axes.
            width: D.
        """
        axes = tuple(axis for axis in (MODEL_AXIS, FSDP_AXIS) if sizes.get(axis, 1) > 1)
        divides = vocab_size % math.prod(sizes[axis] for axis in axes) == 0
        kernels = [x for x in jax.tree.leaves(head) if x.ndim > 1]
        if FSDP_AXIS not in cut.batch_axes or not divides or not kernels:
            return cls()
        if any(vocab_size not in kernel.shape for kernel in kernels):
            return cls()
        count = sizes[FSDP_AXIS]
        gathered = count * cut.tokens_per_shard * width
        spared = (1 - 1 / count) * _size(head) / sizes.get(MODEL_AXIS, 1)
        return cls(axes, vocab_size) if gathered < spared else cls()

    def split(self, head: Any) -> Any:
        """Split every array of a head along its vocabulary."""
        return jax.tree.map(self.placed, head) if self.axes else head

    def placed(self, x: jax.Array) -> jax.Array:
        """Split one array of a head."""
        placed: jax.Array = jax.lax.with_sharding_constraint(x, PartitionSpec(*self.dims(x)))
        return placed

    def dims(self, x: jax.Array) -> list[Any]:
        """Return what splits each dim of an array of the head."""
        free = PartitionSpec.UNCONSTRAINED
        if not self.axes:
            return [free] * x.ndim
        places = [place for place, size in enumerate(x.shape) if size == self.vocab_size]
        return [self.axes if place in places[-1:] else None for place in range(x.ndim)]


@dataclass(frozen=True)
class _Cut:
    """The split of labels (B, T) over the mesh.

    Args:
        batch_axes, sequence_axes: what splits B and T.
        num_rows, num_sequences: N and X.
        rows, length: of one shard.
        num_sharing: F; 1 where each shard scores its own tokens.
    """

    batch_axes: tuple[str, ...]
    sequence_axes: tuple[str, ...]
    num_rows: int
    num_sequences: int
    rows: int
    length: int
    num_sharing: int = 1

    @classmethod
    def of(cls, shape: tuple[int, ...], sizes: dict[str, int]) -> _Cut:
        """Cut (B, T) by the sizes of the mesh's axes; not along a dim that they do not divide."""
        batch_axes, num_rows = _dividing(shape[0], sizes, DATA_AXIS, FSDP_AXIS)
        sequence_axes, num_sequences = _dividing(shape[1], sizes, CONTEXT_AXIS)
        rows, length = shape[0] // num_rows, shape[1] // num_sequences
        return cls(batch_axes, sequence_axes, num_rows, num_sequences, rows, length)

    @property
    def tokens_per_shard(self) -> int:
        return self.rows * self.length

    def chunks(self, x: jax.Array, num_chunks: int, fill: int = 0) -> jax.Array:
        """View (B, T, …) as (C, N, X, b, t, …); what fills up the last chunk is `fill`."""
        trailing = x.shape[2:]
        x = x.reshape(self.num_rows, self.rows, self.num_sequences, self.length, *trailing)
        size = math.ceil(self.length / num_chunks)
        missing = num_chunks * size - self.length
        widths = [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * len(trailing)
        x = jnp.pad(x, widths, constant_values=fill)
        x = x.reshape(*x.shape[:3], num_chunks, size, *trailing)
        return self.placed(jnp.moveaxis(x, (3, 0, 2), (0, 1, 2)), 1)

    def joined(self, chunks: jax.Array) -> jax.Array:
        """View (C, N, X, b, t, …) as (B, T, …) again."""
        trailing = chunks.shape[5:]
        x = jnp.moveaxis(chunks, (0, 1, 2), (3, 0, 2))
        x = x.reshape(*x.shape[:3], -1, *trailing)[:, :, :, : self.length]
        return x.reshape(self.num_rows * self.rows, self.num_sequences * self.length, *trailing)

    def placed(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """Lay dims N and X, from `dim` on, over the axes that split them."""
        return self._placed(x, self.batch_axes, [None] * dim)

    def gathered(self, chunk: jax.Array) -> jax.Array:
        """View (N, X, b, t, …) as (N / F, X, F b, t, …), on each of the shards that share."""
        if self.num_sharing == 1:
            return chunk
        parts = chunk.reshape(-1, self.num_sharing, *chunk.shape[1:])
        parts = jnp.moveaxis(parts, 1, 2)
        parts = parts.reshape(*parts.shape[:2], -1, *parts.shape[4:])
        return self._placed(parts, self._shared_axes, [], [None])

    def scattered(self, shared: jax.Array) -> jax.Array:
        """View (N / F, X, F b, t, …) as (N, X, b, t, …) again, on the shard of each."""
        if self.num_sharing == 1:
            return shared
        parts = shared.reshape(*shared.shape[:2], self.num_sharing, -1, *shared.shape[3:])
        parts = jnp.moveaxis(parts, 2, 1)
        return self.placed(parts.reshape(-1, *parts.shape[2:]))

    def gathered_rows(self, x: jax.Array) -> jax.Array:
        """Lay (B, T, …) out so that shards that share have each other's rows too."""
        if self.num_sharing == 1:
            return x
        # The first is for the gradient, which each shard wants of its own rows alone.
        return self._placed(self.placed(x), self._shared_axes)

    def placed_sum(self, x: jax.Array, dims: Sequence[Any]) -> jax.Array:
        """Lay out a sum (N / F, X, …) of gradients, its further dims by `dims`."""
        return self._placed(x, self._shared_axes, [], dims)

    @property
    def _shared_axes(self) -> tuple[str, ...]:
        """Name the axes that split the batch between those that share."""
        if self.num_sharing == 1:
            return self.batch_axes
        return tuple(axis for axis in self.batch_axes if axis != FSDP_AXIS)

    def _placed(
        self,
        x: jax.Array,
        batch_axes: tuple[str, ...],
        before: Sequence[None] = (),
        after: Sequence[Any] = (),
    ) -> jax.Array:
        free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(before) - 2 - len(after))
        spec = PartitionSpec(*before, batch_axes, self.sequence_axes, *after, *free)
        placed: jax.Array = jax.lax.with_sharding_constraint(x, spec)
        return placed


def _dividing(size: int, sizes: dict[str, int], *axes: str) -> tuple[tuple[str, ...], int]:
    present = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    number = math.prod(sizes[axis] for axis in present)
    return (present, number) if size % number == 0 else ((), 1)


@dataclass(frozen=True)
class _Chunked:
    """The chunks and the sharding with which losses are computed."""

    score: Score
    label_smoothing: float
    z_loss: float
    cut: _Cut
    sharing: _Sharing
    num_chunks: int

    def of_chunk(self, labels: jax.Array, head: Any, hidden: jax.Array) -> jax.Array:
        """Return each label's loss (…, t) of hidden states (…, t, D)."""
        logits = self.score(head, hidden)
        return label_losses(self.label_smoothing, self.z_loss, logits, labels)

    def gradients_of_chunk(
        self, head: Any, hidden: jax.Array, labels: jax.Array, cotangent: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Return the gradients of head and hidden states."""
        _, pull_back = jax.vjp(partial(self.of_chunk, labels), head, hidden)
        gradients: tuple[Any, jax.Array] = pull_back(cotangent)
        return gradients

    def chunks(self, hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cut both into chunks; what fills them up has no label."""
        return (
            self.cut.chunks(hidden, self.num_chunks),
            self.cut.chunks(labels, self.num_chunks, IGNORED_LABEL),
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(compute: _Chunked, head: Any, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """Return each label's cross-entropy (B, T), float32."""
    cut, head = compute.cut, compute.sharing.split(head)

    def of_shards(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, labels = map(cut.gathered, chunk)
        return cut.scattered(compute.of_chunk(labels, head, hidden))

    return cut.joined(jax.lax.map(of_shards, compute.chunks(hidden, labels)))


_Kept = tuple[Any, jax.Array, jax.Array]


def _forward(
    compute: _Chunked, head: Any, hidden: jax.Array, labels: jax.Array
) -> tuple[jax.Array, _Kept]:
    return _losses(compute, head, hidden, labels), (head, hidden, labels)


def _backward(compute: _Chunked, kept: _Kept, cotangent: jax.Array) -> tuple[Any, jax.Array, None]:
    head, hidden, labels = kept
    cut, sharing = compute.cut, compute.sharing
    head = sharing.split(head)
    of_shards = jax.vmap(jax.vmap(partial(compute.gradients_of_chunk, head)))

    def placed(sums: jax.Array, x: jax.Array) -> jax.Array:
        return cut.placed_sum(sums, sharing.dims(x))

    def add_one(total: Any, chunk: Any) -> tuple[Any, jax.Array]:
        to_head, to_hidden = of_shards(*map(cut.gathered, chunk))
        total = jax.tree.map(lambda sums, one, x: placed(sums + one, x), total, to_head, head)
        return total, cut.scattered(to_hidden)

    shards = (cut.num_rows // cut.num_sharing, cut.num_sequences)
    start = jax.tree.map(lambda x: placed(jnp.zeros((*shards, *x.shape), jnp.float32), x), head)
    chunks = (*compute.chunks(hidden, labels), cut.chunks(cotangent, compute.num_chunks))
    total, to_hidden = jax.lax.scan(add_one, start, chunks)
    to_head = jax.tree.map(lambda sums, x: jnp.sum(sums, (0, 1)).astype(x.dtype), total, head)
    return to_head, cut.joined(to_hidden), None


_losses.defvjp(_forward, _backward)
