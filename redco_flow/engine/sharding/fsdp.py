"""Split parameters further, over the axis `fsdp` that also splits the batch (ZeRO-3).

Where they are split over `context` too, axis sizes count its devices among those of `fsdp`
(`mesh.parameter_axis_sizes`).

Each device then keeps a share of parameters, gradients and optimizer state, and all-gathers a
parameter where it is used.
Source: Rajbhandari et al. 2020, ZeRO, stage 3.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.mesh import (
    CONTEXT_AXIS,
    DATA_AXIS,
    FSDP_AXIS,
    parameter_axis_sizes,
)
from redco_flow.engine.sharding.rules import (
    ShardedParameter,
    ShardingRule,
    ShardingRules,
    check_rules,
    mesh_axes,
)
from redco_flow.engine.sharding.state import bytes_per_device, state_layout, widen
from redco_flow.engine.step.lora import Lora
from redco_flow.engine.step.trainable import Trainable, restrict, select


@dataclass(frozen=True)
class ModelStates:
    """Parameters, gradients and optimizer state of a training (ZeRO's model states), from shapes.

    Args:
        params: the model's; arrays or shapes.
        optimizer: keeps state for what is trained alone.
        lora: factors that lie beside the model's parameters; None: none do.
        trainable: as a Trainer of all of these is given it; None: everything is trained.
        param_dtype: of what is trained.
    """

    params: Any
    optimizer: optax.GradientTransformation
    lora: Lora | None = None
    trainable: Trainable | None = None
    param_dtype: str = "float32"

    def bytes_per_device(self, rules: ShardingRules) -> int:
        """Return the bytes of parameters, gradients and optimizer state, padding included.

        What is frozen counts once, in its own dtype; gradients are float32 or wider.

        Args:
            rules: the model's.

        Raises:
            EngineError: `trainable` is no regex or leaves nothing to train.
        """
        params = self.params
        if self.lora is not None:
            params = self.lora.shapes(params)
            rules = self.lora.rules(rules, params)
        optimizer, mask = restrict(self.optimizer, params, self.trainable)
        shapes, specs = state_layout(
            params, optimizer, rules, trainable=mask, param_dtype=self.param_dtype
        )
        gradients = jax.eval_shape(partial(jax.tree.map, widen), shapes["params"]), specs["params"]
        if mask is not None:
            gradients = select(gradients[0], mask), select(gradients[1], mask)
        return sum(bytes_per_device(*of, rules.axis_sizes) for of in ((shapes, specs), gradients))


# No model has as many layers, heads or dims of a head.
_WIDE = 512
# Gathering many small arrays costs more time than their bytes are worth.
SMALL_SHARE = 0.01
# Activations and temporaries need the rest.
STATE_SHARE = 0.8

logger = logging.getLogger(__name__)


def split_over_fsdp(
    rules: ShardingRules, params: Any, axis_sizes: Mapping[str, int]
) -> ShardingRules:
    """Let each parameter be split over `fsdp` too, along a dim that is still replicated.

    Replicated stay the smallest parameters (together at most 1 % of all bytes), those with no dim
    that the shards divide, and those with a rule of the user's, which is taken literally.

    Args:
        rules: `derive_rules`' for the model axis.
        axis_sizes: devices along each mesh axis.

    Raises:
        ShardingError: a user's rule does not fit `fsdp`.
    """
    if axis_sizes[FSDP_AXIS] == 1:
        return check_rules(rules.rules, params, axis_sizes)
    smallest = _smallest_split(rules.parameters)
    by_path = {parameter.path: parameter for parameter in rules.parameters}
    given = [rule for rule in rules.rules if not rule.exact]
    split = [
        _split_rule(rule, by_path[rule.pattern], axis_sizes, smallest)
        for rule in rules.rules
        if rule.exact
    ]
    return check_rules([*given, *split], params, axis_sizes)


class ParameterSplit(NamedTuple):
    """Number of devices that share one copy of the parameters.

    Args:
        num_fsdp: those with rows of their own.
        over_context: whether their context shards share it too.
    """

    num_fsdp: int
    over_context: bool

    def describe(self, num_context: int) -> str:
        """Say it for a log."""
        return f"{self.num_fsdp}" + (f" x {num_context} context" if self.over_context else "")


def choose_parameter_split(
    rules: ShardingRules,
    states: ModelStates,
    axis_sizes: Mapping[str, int],
    memory_bytes: int,
    *,
    over_context: bool | None = None,
) -> ParameterSplit:
    """Return the split over fewest devices with which what a training keeps fits a device.

    Parameters, gradients and optimizer state may take 80 % of the memory. Where nothing fits it
    is the largest possible, with a warning.

    Args:
        rules: `derive_rules`' for the model axis.
        axis_sizes: the mesh's, however `data` and `fsdp` share their devices.
        memory_bytes: of one device.
        over_context: whether context shards share copies; None: where that is needed.
    """
    num_data = axis_sizes[DATA_AXIS] * axis_sizes[FSDP_AXIS]
    num_context = axis_sizes[CONTEXT_AXIS]
    choices = _possible_splits(num_data, num_context, over_context=over_context)
    for split in choices:
        sizes = {**axis_sizes, DATA_AXIS: num_data // split.num_fsdp, FSDP_AXIS: split.num_fsdp}
        sizes = parameter_axis_sizes(sizes, over_context=split.over_context)
        needed = states.bytes_per_device(split_over_fsdp(rules, states.params, sizes))
        if needed <= STATE_SHARE * memory_bytes:
            break
    else:
        logger.warning(
            "parameters, gradients and optimizer state take %s bytes per device over %s fsdp "
            "shards, more than %d %% of its %s bytes; use more model shards or more devices.",
            f"{needed:,}", split.describe(num_context), 100 * STATE_SHARE, f"{memory_bytes:,}",
        )  # fmt: skip
    logger.info(
        "fsdp: %s shards; parameters, gradients and optimizer state take %s bytes per device",
        split.describe(num_context), f"{needed:,}",
    )  # fmt: skip
    return split


def _possible_splits(
    num_data: int, num_context: int, *, over_context: bool | None
) -> list[ParameterSplit]:
    """Return those that what is decided leaves, over the fewest devices first."""
    if num_context == 1:
        over_context = False
    counts = [n for n in range(1, num_data + 1) if num_data % n == 0]
    of_context = (False, True) if over_context is None else (over_context,)
    splits = [ParameterSplit(count, over) for count in counts for over in of_context]
    return sorted(
        splits, key=lambda one: (one.num_fsdp * num_context**one.over_context, one.over_context)
    )


def device_memory_bytes(device: jax.Device, given_gib: float | None = None) -> int:
    """Return how much memory a device has.

    Args:
        given_gib: what it is where the device does not tell. Without it, CPU devices share
            the host's memory.

    Raises:
        ValueError: the device does not tell and nothing is given.
    """
    known = known_memory_bytes(device, given_gib)
    if known is not None:
        return known
    if device.platform == "cpu":
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host // jax.local_device_count()
    raise ValueError(
        f"{device} does not tell its memory, which num_fsdp_shards='auto' needs: pass "
        "device_memory_gib, or a number of shards."
    )


def known_memory_bytes(device: jax.Device, given_gib: float | None = None) -> int | None:
    """Return how much memory a device says that it has; else what is given, or None."""
    told = _told_memory(device)
    if told is None and given_gib is not None:
        return round(given_gib * 2**30)
    return told


def _told_memory(device: jax.Device) -> int | None:
    try:
        told = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a device that is not there
        return None
    return None if told is None else int(told)


def _smallest_split(parameters: tuple[ShardedParameter, ...]) -> int:
    """Return the bytes from which on a parameter is large enough to split."""
    spared = SMALL_SHARE * sum(parameter.num_bytes for parameter in parameters)
    for size in sorted({parameter.num_bytes for parameter in parameters}):
        spared -= sum(p.num_bytes for p in parameters if p.num_bytes == size)
        if spared < 0:
            return size
    return 0


def _split_rule(
    rule: ShardingRule,
    parameter: ShardedParameter,
    axis_sizes: Mapping[str, int],
    smallest: int,
) -> ShardingRule:
    count = axis_sizes[FSDP_AXIS]
    axes = list(rule.spec) + [None] * (len(parameter.shape) - len(rule.spec))
    free = [
        position
        for position, size in enumerate(parameter.shape)
        if axes[position] is None and size and size % count == 0
    ]
    if FSDP_AXIS in mesh_axes(rule.spec):
        return rule
    if parameter.num_bytes < smallest or not free:
        why = "too small" if free else f"no replicated dim that {count} divides"
        return replace(rule, reason=f"{rule.reason}; not over fsdp: {why}")
    position = _position_over_fsdp(parameter.shape, free)
    axes[position] = FSDP_AXIS
    reason = f"{rule.reason}; its {parameter.shape[position]} over fsdp"
    return replace(rule, spec=PartitionSpec(*axes), reason=reason)


def _position_over_fsdp(shape: tuple[int, ...], free: list[int]) -> int:
    """Choose among the dims that may be split.

    A model's width is the narrowest wide dim of its kernels and tables: rows of a table whose
    columns are split are had without the table (`step/gathering.py`), and of most kernels it stands
    before what it is mapped to, so that the shards' parts lie one behind the other.
    """
    wide = [position for position in free if shape[position] >= _WIDE]
    if wide:
        return min(wide, key=lambda position: shape[position])
    # Of equal dims the last: the first may count layers, which are used one by one.
    return max(free, key=lambda position: (shape[position], position))
