"""Split parameters further, over the axis `fsdp` that also splits the batch (ZeRO-3).

Each device then keeps a share of parameters, gradients and optimizer state, and gathers a parameter
where it is used.
Source: Rajbhandari et al. 2020, ZeRO, stage 3.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from redco_flow.engine.sharding.mesh import DATA_AXIS, FSDP_AXIS
from redco_flow.engine.sharding.rules import (
    ShardedParameter,
    ShardingRule,
    ShardingRules,
    check_rules,
    mesh_axes,
)
from redco_flow.engine.sharding.state import bytes_per_device, state_layout
from redco_flow.engine.step.lora import Lora
from redco_flow.engine.step.trainable import Trainable, restrict, select


@dataclass(frozen=True)
class Training:
    """What is trained, as far as it decides how much there is to keep.

    Args:
        params: the model's; arrays or shapes.
        optimizer: keeps state for what is trained alone.
        lora: factors that lie beside the model's parameters; None: none do.
        trainable: as a Trainer of all of these is given it; None: everything is trained.
    """

    params: Any
    optimizer: optax.GradientTransformation
    lora: Lora | None = None
    trainable: Trainable | None = None

    def bytes_per_device(self, rules: ShardingRules) -> int:
        """Return the bytes of parameters, gradients and optimizer state, padding included.

        What is frozen counts once, in its own dtype.

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
        shapes, specs = state_layout(params, optimizer, rules, trainable=mask)
        gradients = shapes["params"], specs["params"]
        if mask is not None:
            gradients = select(gradients[0], mask), select(gradients[1], mask)
        return sum(bytes_per_device(*of, rules.axis_sizes) for of in ((shapes, specs), gradients))


# Gathering many small arrays costs more time than their bytes are worth.
SMALL_SHARE = 0.01
# Activations and temporaries need the rest.
STATE_SHARE = 0.8

logger = logging.getLogger(__name__)


def split_over_fsdp(
    rules: ShardingRules, params: Any, axis_sizes: Mapping[str, int]
) -> ShardingRules:
    """Let each parameter be split over `fsdp` too, along its largest dim that is still whole.

    Whole stay the smallest parameters (together at most 1 % of all bytes), those with no dim
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


def choose_num_fsdp_shards(
    rules: ShardingRules,
    training: Training,
    axis_sizes: Mapping[str, int],
    memory_bytes: int,
) -> int:
    """Return the smallest number of fsdp shards with which what a training keeps fits a device.

    Parameters, gradients and optimizer state may take 80 % of the memory. Where nothing fits it
    is the largest possible, with a warning.

    Args:
        rules: `derive_rules`' for the model axis.
        axis_sizes: with all of `data` still in one axis.
        memory_bytes: of one device.
    """
    num_data = axis_sizes[DATA_AXIS] * axis_sizes[FSDP_AXIS]
    for count in (n for n in range(1, num_data + 1) if num_data % n == 0):
        sizes = {**axis_sizes, DATA_AXIS: num_data // count, FSDP_AXIS: count}
        needed = training.bytes_per_device(split_over_fsdp(rules, training.params, sizes))
        if needed <= STATE_SHARE * memory_bytes:
            break
    else:
        logger.warning(
            "parameters, gradients and optimizer state take %s bytes per device over %d fsdp "
            "shards, more than %d %% of its %s bytes; use more model shards or more devices.",
            f"{needed:,}", num_data, 100 * STATE_SHARE, f"{memory_bytes:,}",
        )  # fmt: skip
    logger.info(
        "fsdp: %d shards; parameters, gradients and optimizer state take %s bytes per device",
        count, f"{needed:,}",
    )  # fmt: skip
    return count


def device_memory_bytes(device: jax.Device, given_gib: float | None = None) -> int:
    """Return how much memory a device has.

    Args:
        given_gib: what it is where the device does not tell. Without it, CPU devices share
            the host's memory.

    Raises:
        ValueError: the device does not tell and nothing is given.
    """
    told = (device.memory_stats() or {}).get("bytes_limit")
    if told is not None:
        return int(told)
    if given_gib is not None:
        return round(given_gib * 2**30)
    if device.platform == "cpu":
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host // jax.local_device_count()
    raise ValueError(
        f"{device} does not tell its memory, which num_fsdp_shards='auto' needs: pass "
        "device_memory_gib, or a number of shards."
    )


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
        place
        for place, size in enumerate(parameter.shape)
        if axes[place] is None and size and size % count == 0
    ]
    if FSDP_AXIS in mesh_axes(rule.spec):
        return rule
    if parameter.num_bytes < smallest or not free:
        why = "too small" if free else f"no whole dim that {count} divides"
        return replace(rule, reason=f"{rule.reason}; not over fsdp: {why}")
    # Of equal dims the last: the first may count layers, which are used one by one.
    place = max(free, key=lambda place: (parameter.shape[place], place))
    axes[place] = FSDP_AXIS
    reason = f"{rule.reason}; its {parameter.shape[place]} over fsdp"
    return replace(rule, spec=PartitionSpec(*axes), reason=reason)
