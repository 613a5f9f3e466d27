"""Measure how fast devices compute, move their memory and exchange, as `engine.devices` counts it.

Each operation is timed alone, from its dispatch to its end, at several sizes; the fastest of
three runs counts, after one that compiles. Results of collectives are checked, which shows that
each device took part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow.engine.errors import EngineError

_NUM_RUNS = 3
_AXIS = "devices"
_PRODUCTS = {
    "bfloat16_tflops": (jnp.bfloat16, jax.lax.Precision.DEFAULT),
    "tf32_tflops": (jnp.float32, jax.lax.Precision.DEFAULT),
    "float32_tflops": (jnp.float32, jax.lax.Precision.HIGHEST),
}


@dataclass(frozen=True)
class Speed:
    """One measurement.

    Args:
        operation: what was timed.
        figure: the fact about devices that it is one of.
        size: rows of a square matrix, or bytes of a device's array.
        num_devices: that took part.
        value: in the unit of the figure's name.
    """

    operation: str
    figure: str
    size: int
    num_devices: int
    seconds: float
    value: float


class WrongResult(EngineError):
    """An operation did not compute what it is to compute."""


def measure_speeds(
    devices: Sequence[jax.Device],
    product_sizes: Sequence[int],
    copy_bytes: Sequence[int],
    exchange_bytes: Sequence[int],
) -> Iterator[Speed]:
    """Yield the speeds of the first device, and of exchanges between all of them.

    Args:
        devices: of one host.
        product_sizes: rows of square matrices.
        copy_bytes: of an array in a device's memory.
        exchange_bytes: of what each device has of an array that is exchanged.

    Raises:
        WrongResult: a collective's result is wrong.
    """
    for size in product_sizes:
        yield from _products(devices[0], size)
    for num_bytes in copy_bytes:
        ones = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), devices[0])
        seconds = _seconds(jax.jit(lambda array: array + 1), ones)
        value = 2 * ones.nbytes / seconds / 1e9
        yield Speed("copy", "hbm_gb_s", ones.nbytes, 1, seconds, value)
    if len(devices) > 1:
        for num_bytes in exchange_bytes:
            yield from _exchanges(devices, num_bytes)


def figures_of(speeds: Sequence[Speed]) -> dict[str, float]:
    """Return each figure at its largest size, which caches help least: the slowest operation's."""
    largest = {
        figure: max(one.size for one in speeds if one.figure == figure)
        for figure in dict.fromkeys(one.figure for one in speeds)
    }
    return {
        figure: min(one.value for one in speeds if (one.figure, one.size) == (figure, size))
        for figure, size in largest.items()
    }


def _products(device: jax.Device, size: int) -> Iterator[Speed]:
    for figure, (dtype, precision) in _PRODUCTS.items():
        matrix = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)
        product = jax.jit(partial(jnp.matmul, precision=precision))
        seconds = _seconds(product, matrix, matrix)
        value = 2 * size**3 / seconds / 1e12
        yield Speed("product", figure, size, 1, seconds, value)


def _exchanges(devices: Sequence[jax.Device], num_bytes: int) -> Iterator[Speed]:
    """Yield what a device sends in one direction, by NCCL's rings, over the time."""
    count = len(devices)
    mesh = jax.make_mesh((count,), (_AXIS,), devices=devices)
    spec = PartitionSpec(_AXIS)
    # Each device's numbers are its own: the exchanged ones show who took part.
    numbers = np.arange(1, count + 1, dtype=np.float32)
    parts = jax.jit(
        lambda: jnp.repeat(numbers, num_bytes // 4), out_shardings=NamedSharding(mesh, spec)
    )()
    ring = [(one, (one + 1) % count) for one in range(count)]
    collectives: tuple[tuple[str, Callable[[jax.Array], jax.Array], np.ndarray, float], ...] = (
        (
            "all-gather",
            partial(jax.lax.all_gather, axis_name=_AXIS, tiled=True),
            np.tile(numbers, count),
            count - 1,
        ),
        (
            "all-reduce",
            lambda part: jax.lax.pcast(jax.lax.psum(part, _AXIS), _AXIS, to="varying"),
            np.full(count, numbers.sum()),
            2 * (count - 1) / count,
        ),
        (
            "permute",
            partial(jax.lax.ppermute, axis_name=_AXIS, perm=ring),
            np.roll(numbers, 1),
            1,
        ),
    )
    size = parts.nbytes // count
    for name, collective, expected, sent in collectives:
        exchange = jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=spec, out_specs=spec))
        shards = exchange(parts).addressable_shards
        ordered = sorted(shards, key=lambda shard: shard.index[0].start or 0)
        found = np.concatenate([shard.data[:: num_bytes // 4] for shard in ordered])
        if not np.array_equal(found, expected):
            raise WrongResult(f"an {name} of {count} devices gives {found}, not {expected}.")
        seconds = _seconds(exchange, parts)
        yield Speed(name, "host_gb_s", size, count, seconds, sent * size / seconds / 1e9)


def _seconds(run: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    jax.block_until_ready(run(*arguments))
    found = []
    for _ in range(_NUM_RUNS):
        begun = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        found.append(time.perf_counter() - begun)
    return min(found)
