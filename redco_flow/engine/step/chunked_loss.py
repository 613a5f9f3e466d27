"""Cross-entropy from hidden states, some tokens at a time: the logits are never all in memory.

Where the loss is differentiated, a chunk's logits give its losses and its gradients at once, as if
every label's loss counted once: the backward pass scales them by how much it counts. Of the hidden
states that is exact for any weights. The head's gradient is a sum over tokens, so it is made again
in the backward pass where labels count differently. Every shard adds up its own, over all chunks,
so that it is reduced once.

Over `fsdp` the head may stay split, along its vocabulary: the devices there bring a chunk's hidden
states together, and each scores them with its own part. That is done where it sends less than to
gather the head for each device's own tokens.
Dims in this file: B batch, T sequence, D model, V vocabulary, C chunks, N shards of the batch,
F of them that share a head, X of the sequence, b and t rows and tokens of one shard's chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from redco_flow.engine.sharding.mesh import (
    FSDP_AXIS,
    MODEL_AXIS,
    equations,
    is_mapped,
)
from redco_flow.engine.step.loss import IGNORED_LABEL, PerExample, cross_entropy, label_losses
from redco_flow.engine.step.loss_chunks import HeadSplit, TokenSplit
from redco_flow.engine.step.seldom import SELDOM

NumChunks = int | Literal["auto"]
# (a tree of the head's arrays, hidden states (…, D)) -> logits (…, V)
Score = Callable[[Any, jax.Array], jax.Array]

# Logits of one chunk on one device, by platform. Every chunk reads and writes the head's float32
# gradient: 8 bytes for 6 operations a token. GPUs move those between products: at 2 GiB (4,200
# tokens of 128k entries) in under 10% of an H100's time for both. TPUs move while they multiply;
# the smallest have 16 GiB: at 512 MiB a byte stands for 780 operations, where products need 560 at
# most (v6e). CPUs do some ten operations in the time of a byte.
_MAX_CHUNK_BYTES = {"gpu": 2**31, "cuda": 2**31, "tpu": 2**29}
_MAX_CHUNK_BYTES_ELSEWHERE = 2**28


def chunked_cross_entropy(
    score: Score,
    head: Any,
    hidden: jax.Array,
    labels: jax.Array,
    *,
    num_chunks: NumChunks = "auto",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_dtype: Any = None,
    equal_weights: bool = True,
) -> PerExample:
    """Return `cross_entropy(score(head, hidden), labels, …)`, computed chunk by chunk.

    Outside of a mesh it is computed at once: what derives sharding rules and what counts model
    FLOPs trace it there.

    Args:
        score: scores each token by itself; all arrays that have gradients are in `head`. One that
            multiplies in the dtype of `hidden` even by a float32 head, as `wide_product` does, has
            the head's gradient added up within the product.
        head: a tree of float arrays.
        hidden: (B, T, D).
        labels: (B, T); see `cross_entropy`.
        label_smoothing, z_loss: see `cross_entropy`.
        num_chunks: "auto" keeps a chunk's logits on a device under 2 GiB on GPUs, 512 MiB on TPUs
            and 256 MiB on CPUs.
        logits_dtype: in which logits are stored; None: as `score` returns them.
        equal_weights: whether what is differentiated is a sum of the examples' totals, of some of
            them. Gradients are right in any case; a trained head takes four products where this is
            True of a sum and where it is False, three and five otherwise.
    """
    asked, score = num_chunks, _stored_in(logits_dtype, score)
    num_chunks, cut, sharing = _plan(score, head, hidden, labels, asked)
    head = sharing.split(head)
    if num_chunks == 1:
        logits = score(head, cut.gathered_rows(hidden))
        return cross_entropy(logits, labels, label_smoothing=label_smoothing, z_loss=z_loss)
    has_wide_sums = _multiplies_as_before(score, head, hidden)
    compute = _Chunked(
        score, label_smoothing, z_loss, cut, sharing, num_chunks, equal_weights, has_wide_sums
    )
    losses = _losses(compute, head, hidden, labels)
    counted = _counted(labels)
    return jnp.sum(losses * counted, axis=1), jnp.sum(counted, axis=1)


def _stored_in(dtype: Any, score: Score) -> Score:
    return score if dtype is None else lambda head, hidden: score(head, hidden).astype(dtype)


def _counted(labels: jax.Array) -> jax.Array:
    return ((labels != IGNORED_LABEL) & (labels >= 0)).astype(jnp.float32)


def _widened(head: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), head)


def _multiplies_as_before(score: Score, head: Any, hidden: jax.Array) -> bool:
    """Say whether a widened head is multiplied in the dtypes in which the head itself is."""

    def dtypes(convert: Callable[[Any], Any]) -> list[Any]:
        traced = jax.make_jaxpr(lambda head, hidden: score(convert(head), hidden))(head, hidden)
        products = (one for one in equations(traced.jaxpr) if one.primitive.name == "dot_general")
        return [[x.aval.dtype for x in one.invars] for one in products]

    return dtypes(_widened) == dtypes(lambda head: head)


def _plan(
    score: Score, head: Any, hidden: jax.Array, labels: jax.Array, asked: NumChunks
) -> tuple[int, TokenSplit, HeadSplit]:
    """Return how many chunks to compute on the mesh that is being traced for, and how."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else {a: n for a, n in mesh.shape.items() if not is_mapped(a)}
    cut = TokenSplit.of(labels.shape, sizes)
    if mesh.empty:
        return 1, cut, HeadSplit()
    num_model_shards = sizes.get(MODEL_AXIS, 1)
    logits = jax.eval_shape(score, head, hidden)
    vocab_size = logits.shape[-1]
    sharing = HeadSplit.of(cut, sizes, head, vocab_size, hidden.shape[-1])
    if sharing.axes:
        cut = replace(cut, num_sharing=sizes[FSDP_AXIS])
    if asked != "auto":
        return min(asked, cut.length), cut, sharing
    num_bytes = logits.dtype.itemsize * cut.tokens_per_shard * vocab_size / num_model_shards
    device = mesh.abstract_device
    platform = "" if device is None else device.platform
    chunk_bytes = _MAX_CHUNK_BYTES.get(platform, _MAX_CHUNK_BYTES_ELSEWHERE)
    return min(math.ceil(num_bytes / chunk_bytes), cut.length), cut, sharing


@dataclass(frozen=True)
class _Chunked:
    """The settings by which losses are computed: chunks, sharding and gradients.

    Args:
        equal_weights: see `chunked_cross_entropy`.
        has_wide_sums: whether products add up the head's gradient in float32.
    """

    score: Score
    label_smoothing: float
    z_loss: float
    cut: TokenSplit
    sharing: HeadSplit
    num_chunks: int
    equal_weights: bool
    has_wide_sums: bool

    def of_chunk(self, labels: jax.Array, head: Any, hidden: jax.Array) -> jax.Array:
        """Return each label's loss (…, t) of hidden states (…, t, D)."""
        logits = self.score(head, hidden)
        return label_losses(self.label_smoothing, self.z_loss, logits, labels)

    def differentiated(
        self, head: Any, hidden: jax.Array, labels: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        """Return each label's loss, and the gradients of their weighted sum."""
        head = _widened(head) if self.has_wide_sums else head
        losses, pull_back = jax.vjp(partial(self.of_chunk, labels), head, hidden)
        to_head, to_hidden = pull_back(weights)
        return losses, jax.tree.leaves(to_head), to_hidden

    def of_shards(self, head: Any, *chunk: jax.Array) -> tuple[Any, list[jax.Array], Any]:
        """Do so for a chunk (N, X, …) of hidden states, labels and weights."""
        compute = jax.vmap(jax.vmap(partial(self.differentiated, head)))
        losses, to_head, to_hidden = compute(*map(self.cut.gathered, chunk))
        return self.cut.scattered(losses), to_head, self.cut.scattered(to_hidden)

    def chunks(self, hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cut both into chunks; what fills them up has no label."""
        return (
            self.cut.chunks(hidden, self.num_chunks),
            self.cut.chunks(labels, self.num_chunks, IGNORED_LABEL),
        )

    def no_sums(self, x: jax.Array) -> jax.Array:
        """Return zeros (N / F, X, …) for the gradients of an array of the head."""
        shards = (self.cut.num_rows // self.cut.num_sharing, self.cut.num_sequences)
        return self._placed(jnp.zeros((*shards, *x.shape), jnp.float32), x)

    def added(self, sums: _Sums, ones: list[jax.Array], head: Any) -> _Sums:
        """Add a chunk's gradients of the head to what has a sum."""
        arrays = zip(sums, ones, jax.tree.leaves(head), strict=True)
        return [None if s is None else self._placed(s + one, x) for s, one, x in arrays]

    def _placed(self, sums: jax.Array, x: jax.Array) -> jax.Array:
        return self.cut.placed_sum(sums, self.sharing.dims(x))


# Of each array of the head the sum of gradients (N / F, X, …), float32; None where it has none.
_Sums = list[jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(compute: _Chunked, head: Any, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """Return each label's cross-entropy (B, T), float32."""
    cut, head = compute.cut, compute.sharing.split(head)

    def of_shards(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, labels = map(cut.gathered, chunk)
        return cut.scattered(compute.of_chunk(labels, head, hidden))

    return cut.joined(jax.lax.map(of_shards, compute.chunks(hidden, labels)))


class _Kept(NamedTuple):
    """Values for the backward pass: inputs, and gradients where every label counts once."""

    head: Any
    hidden: jax.Array
    labels: jax.Array
    to_head: _Sums
    to_hidden: jax.Array | None


def _forward(compute: _Chunked, *primals: Any) -> tuple[jax.Array, _Kept]:
    head, hidden, labels = jax.tree.map(lambda x: x.value, primals)
    *of_head, of_hidden, _ = (x.perturbed for x in jax.tree.leaves(primals))
    head = compute.sharing.split(head)
    wanted = _Wanted(tuple(of_head), of_hidden)
    losses, to_head, to_hidden = _losses_and_gradients(compute, wanted, head, hidden, labels)
    return losses, _Kept(head, hidden, labels, to_head, to_hidden)


class _Wanted(NamedTuple):
    """Flags of what has a gradient: each of the head's arrays, and hidden states."""

    of_head: tuple[bool, ...]
    of_hidden: bool


# With a rule it is one operation, whose results `jax.checkpoint` may keep. Of a scan that would
# keep what is carried after every turn, and what every turn computes alike.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses_and_gradients(
    compute: _Chunked, wanted: _Wanted, head: Any, hidden: jax.Array, labels: jax.Array
) -> tuple[jax.Array, _Sums, jax.Array | None]:
    """Return losses, and gradients where every label counts once."""
    arrays = zip(wanted.of_head, jax.tree.leaves(head), strict=True)
    start = [compute.no_sums(x) if is_wanted else None for is_wanted, x in arrays]

    def add_one(sums: _Sums, chunk: tuple[jax.Array, jax.Array]) -> tuple[_Sums, Any]:
        losses, to_head, to_hidden = compute.of_shards(head, *chunk, _counted(chunk[1]))
        if compute.equal_weights:
            sums = compute.added(sums, to_head, head)
        return sums, (losses, to_hidden if wanted.of_hidden else None)

    sums, of_tokens = jax.lax.scan(add_one, start, compute.chunks(hidden, labels))
    losses, to_hidden = jax.tree.map(compute.cut.joined, of_tokens)
    return losses, sums, to_hidden


def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError("a loss in chunks has no second derivative: set num_chunks to 1.")


_losses_and_gradients.defvjp(_no_derivative, _no_derivative)


def _backward(compute: _Chunked, kept: _Kept, cotangent: jax.Array) -> tuple[Any, Any, None]:
    arrays, structure = jax.tree.flatten(kept.head)
    sums = kept.to_head
    if any(one is not None for one in sums):
        sums = _weighted(compute, kept, cotangent)
    to_head = [
        None if total is None else jnp.sum(total, (0, 1)).astype(x.dtype)
        for total, x in zip(sums, arrays, strict=True)
    ]
    to_hidden = kept.to_hidden
    if to_hidden is not None:
        to_hidden = (to_hidden * cotangent[..., None]).astype(to_hidden.dtype)
    return jax.tree.unflatten(structure, to_head), to_hidden, None


def _weighted(compute: _Chunked, kept: _Kept, weights: jax.Array) -> _Sums:
    """Return the head's gradients where labels have these weights (B, T)."""
    cut, head = compute.cut, kept.head
    counts = _counted(kept.labels) > 0
    largest = jnp.max(jnp.where(counts, weights, -jnp.inf))
    smallest = jnp.min(jnp.where(counts, weights, jnp.inf))
    chunks = (
        *compute.chunks(kept.hidden, kept.labels), cut.chunks(weights, compute.num_chunks)
    )  # fmt: skip

    def add_one(number: Any, sums: _Sums) -> _Sums:
        chunk = [jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in chunks]
        _, to_head, _ = compute.of_shards(head, *chunk)
        if compute.equal_weights:
            sums = jax.tree.map(lambda x: jnp.where(number == 0, 0, x), sums)
        return compute.added(sums, to_head, head)

    sums = kept.to_head
    if not compute.equal_weights:
        total: _Sums = jax.lax.fori_loop(0, compute.num_chunks, add_one, sums)
        return total
    # A loop that seldom turns, not a `cond`: for shards that are mapped JAX runs both of its sides.
    with jax.named_scope(SELDOM):
        num_again = jnp.where(largest <= smallest, 0, compute.num_chunks)
        sums = jax.lax.fori_loop(0, num_again, add_one, sums)
    scale = jnp.where(largest == smallest, largest, 1)
    return [None if one is None else scale * one for one in sums]


_losses.defvjp(_forward, _backward, symbolic_zeros=True)
