"""The device mesh: `data` shards the batch, `model` shards the parameters.

Knows devices and which process holds which. Refuses to know parameters, batches and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA_AXIS = "data"
MODEL_AXIS = "model"


def build_mesh(num_model_shards: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arrange devices as (data, model).

    Args:
        num_model_shards: devices that share one copy of the parameters; must divide their number.
        devices: all of them by default.

    Raises:
        ValueError: it does not divide; the message lists what does.
    """
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices)
    if num_model_shards < 1 or count % num_model_shards:
        allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(
            f"num_model_shards={num_model_shards} does not divide the {count} devices; "
            f"allowed: {allowed}."
        )
    return jax.make_mesh(
        (count // num_model_shards, num_model_shards),
        (DATA_AXIS, MODEL_AXIS),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices,
    )


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
