"""The device mesh: `model` shards the parameters, `data` and `fsdp` shard the batch.

Over `fsdp` parameters and optimizer state are split as well, over `data` they are copied. Knows
devices and which process holds which. Refuses to know parameters, batches and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA_AXIS = "data"
FSDP_AXIS = "fsdp"
MODEL_AXIS = "model"
MESH_AXES = (DATA_AXIS, FSDP_AXIS, MODEL_AXIS)
# The batch is split over both.
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)


def build_mesh(
    num_model_shards: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    num_fsdp_shards: int = 1,
) -> Mesh:
    """Arrange devices as (data, fsdp, model).

    Args:
        num_model_shards: devices that each have a share of every product; must divide their
            number.
        devices: all of them by default.
        num_fsdp_shards: devices with different rows that share one copy of the parameters; must
            divide what is left.

    Raises:
        ValueError: one of them does not divide; the message lists what does.
    """
    devices = list(jax.devices() if devices is None else devices)
    _check_divides("num_model_shards", num_model_shards, len(devices), "devices")
    num_left = len(devices) // num_model_shards
    _check_divides("num_fsdp_shards", num_fsdp_shards, num_left, "data-parallel devices")
    return jax.make_mesh(
        (num_left // num_fsdp_shards, num_fsdp_shards, num_model_shards),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices,
    )


def _check_divides(name: str, value: int, count: int, noun: str) -> None:
    if value < 1 or count % value:
        allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(f"{name}={value} does not divide the {count} {noun}; allowed: {allowed}.")


@dataclass(frozen=True)
class DataProcess:
    """Which share of each global batch this process reads.

    Processes that hold model shards of the same rows read the same rows, so `count` can be
    smaller than the number of processes.

    Args:
        index: this process' share, from 0.
        count: number of different shares.
    """

    index: int
    count: int


def find_data_process(processes: np.ndarray, process_index: int) -> DataProcess:
    """Return the share of the batch that a process reads.

    Args:
        processes: which process holds each device, (data, model).
        process_index: of the process in question.

    Raises:
        ValueError: processes hold overlapping or unequal parts of the data axis, or this one
            holds none.
    """
    held: dict[int, set[int]] = {}
    for (row, _), process in np.ndenumerate(processes):
        held.setdefault(int(process), set()).add(row)
    shares = sorted({tuple(sorted(rows)) for rows in held.values()})
    if sum(map(len, shares)) != len(processes) or len({len(share) for share in shares}) != 1:
        raise ValueError(
            f"the processes' devices do not split the {len(processes)} data shards evenly; "
            "let num_model_shards divide, or be a multiple of, the devices per process."
        )
    if process_index not in held:
        raise ValueError(f"process {process_index} holds no device of the mesh.")
    return DataProcess(shares.index(tuple(sorted(held[process_index]))), len(shares))
