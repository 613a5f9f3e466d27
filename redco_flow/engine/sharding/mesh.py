"""The device mesh: `model` shards products, `context` sequences, `data` and `fsdp` the batch.

Over `fsdp` parameters and optimizer state are split as well, over `data` they are copied, over
`context` either. Knows devices and which process holds which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from redco_flow.engine.errors import ShardingError
from redco_flow.engine.sharding.dataflow.trace import function_jaxpr

DATA_AXIS = "data"
FSDP_AXIS = "fsdp"
CONTEXT_AXIS = "context"
MODEL_AXIS = "model"
# What exchanges most comes last: neighbours there are neighbours in the machine.
MESH_AXES = (DATA_AXIS, FSDP_AXIS, CONTEXT_AXIS, MODEL_AXIS)
# What rules name. Where parameters are split over `context`, that is a part of their `fsdp`.
PARAMETER_AXES = (DATA_AXIS, FSDP_AXIS, MODEL_AXIS)
# The batch is split over both.
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)
_AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)

logger = logging.getLogger(__name__)


def build_mesh(
    num_model_shards: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    num_fsdp_shards: int = 1,
    num_context_shards: int = 1,
) -> Mesh:
    """Arrange devices as (data, fsdp, context, model).

    Args:
        num_model_shards: devices that each have a share of every product; must divide their
            number.
        devices: all of them by default.
        num_fsdp_shards: devices with different rows that share one copy of the parameters; must
            divide what the others leave.
        num_context_shards: devices that each have a part of every sequence; must divide what
            the model shards leave.

    Raises:
        ValueError: one of them does not divide; the message lists what does.
    """
    devices = list(jax.devices() if devices is None else devices)
    _check_divides("num_model_shards", num_model_shards, len(devices), "devices")
    num_left = len(devices) // num_model_shards
    noun = f"groups of {num_model_shards} model shards"
    _check_divides("num_context_shards", num_context_shards, num_left, noun)
    num_left //= num_context_shards
    _check_divides("num_fsdp_shards", num_fsdp_shards, num_left, "data-parallel devices")
    shape = (num_left // num_fsdp_shards, num_fsdp_shards, num_context_shards, num_model_shards)
    return Mesh(_arrange(devices, shape), MESH_AXES, axis_types=_AXIS_TYPES)


def _arrange(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Lay devices out so that neighbours are neighbours in the machine, as far as JAX knows how."""
    try:
        return jax.make_mesh(shape, MESH_AXES, axis_types=_AXIS_TYPES, devices=devices).devices
    except (NotImplementedError, AssertionError):
        pass  # an axis that is no product of a TPU slice's physical ones, or a part of a slice
    try:
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, AssertionError, ValueError):
        logger.info(
            "the mesh %s takes %s devices in their own order: JAX cannot arrange these along the "
            "machine's links.",
            " x ".join(map(str, shape)),
            devices[0].device_kind,
        )
        return np.array(devices).reshape(shape)


def merge_context(mesh: Mesh, *, into_fsdp: bool) -> Mesh:
    """Return the mesh in which context shards have rows of their own instead.

    Every device holds the same part of the parameters in both.

    Args:
        into_fsdp: whether parameters are split over the context shards; else into `data`.
    """
    num_data, num_fsdp, num_context, num_model = mesh.devices.shape
    if into_fsdp:
        devices = mesh.devices.reshape(num_data, num_fsdp * num_context, 1, num_model)
    else:
        devices = mesh.devices.transpose(0, 2, 1, 3).reshape(-1, num_fsdp, 1, num_model)
    return Mesh(devices, MESH_AXES, axis_types=_AXIS_TYPES)


def parameter_axis_sizes(sizes: Mapping[str, int], *, over_context: bool) -> dict[str, int]:
    """Return the devices along each axis of what rules name.

    Args:
        sizes: the mesh's.
        over_context: whether parameters are split over `context` as over `fsdp`.
    """
    if not over_context:
        return dict(sizes)
    return {**sizes, FSDP_AXIS: sizes[FSDP_AXIS] * sizes[CONTEXT_AXIS], CONTEXT_AXIS: 1}


def _check_divides(name: str, value: int, count: int, noun: str) -> None:
    if value < 1 or count % value:
        allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(f"{name}={value} does not divide the {count} {noun}; allowed: {allowed}.")


@dataclass(frozen=True)
class DataProcess:
    """The share of each global batch that one process reads.

    Processes that hold model or context shards of the same rows read the same rows, so `count`
    can be smaller than the number of processes.

    Args:
        index: this process' share, from 0.
        count: number of different shares.
    """

    index: int
    count: int


def own_device(devices: Sequence[jax.Device]) -> jax.Device:
    """Return a device that this process can ask; of devices that are not there, any."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    return (own or devices)[0]


def find_data_process(processes: np.ndarray, process_index: int) -> DataProcess:
    """Return the share of the batch that a process reads.

    Args:
        processes: which process holds each device, (data, shards of the same rows).
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
            "let num_model_shards x num_context_shards divide, or be a multiple of, the devices "
            "per process."
        )
    if process_index not in held:
        raise ValueError(f"process {process_index} holds no device of the mesh.")
    return DataProcess(shares.index(tuple(sorted(held[process_index]))), len(shares))


def is_mapped(axis: str) -> bool:
    """Say whether what is being traced runs on each of a mesh axis' shards, as under `jax.vmap`."""
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield every equation, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        yield from equations_inside(equation)


def equations_inside(equation: Any) -> Iterator[Any]:
    """Yield the equations of the jaxprs that one holds."""
    for value in _parameters(equation):
        if isinstance(value, ClosedJaxpr):
            yield from equations(value.jaxpr)
        elif isinstance(value, Jaxpr):
            yield from equations(value)


def names_axis(equation: Any, axis: str) -> bool:
    """Say whether an equation lays arrays out over the axis, or runs on each of its shards."""
    specs = (_spec(value) for value in _parameters(equation))
    entries = (entry for spec in specs if spec is not None for entry in spec)
    return any(axis in (e if isinstance(e, tuple) else (e,)) for e in entries)


def takes_axis(equation: Any, axis: str) -> bool:
    """Say whether a shard_map runs on each of the axis' shards, whatever its specs name."""
    # Which parameter holds the axes is not the same in all versions of JAX.
    held = (value for value in equation.params.values() if isinstance(value, frozenset))
    return any(axis in axes for axes in held)


def _parameters(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _spec(value: Any) -> PartitionSpec | None:
    if isinstance(value, NamedSharding):
        return value.spec
    return value if isinstance(value, PartitionSpec) else None


def check_context_is_used(
    function: Callable[..., Any], params: Any, inputs: Sequence[Any], num_context_shards: int
) -> None:
    """Trace `function(params, *inputs)`, which sees the mesh, where there are several shards.

    Raises:
        ShardingError: it splits no sequence; the message says what does.
    """
    if num_context_shards == 1:
        return
    traced = equations(function_jaxpr(function, params, inputs).jaxpr)
    if not any(names_axis(equation, CONTEXT_AXIS) for equation in traced):
        raise ShardingError(
            f"num_context_shards={num_context_shards}, and the function splits no sequence: every "
            "context shard would compute the same. Take a model of redco_flow.models; or attend "
            "with models.sequence_attention.attend_sequence in your own, and lay its activations "
            "out with models.context_axis.split_sequence; or leave num_context_shards at 1."
        )
