"""Derive sharding rules from shapes: Redco's two rules.

1. A matrix that reads the residual stream is split on its output side: heads, feed-forward
   units, vocabulary; never inside a head. Its bias is split with it.
2. A matrix that writes the residual stream is split on its input side.

Everything else is replicated, and every decision has its reason. Refuses to know names.
Source: Redco (arXiv 2310.16355), section 3.2; differs: by shape instead of by name and order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from redco_flow.engine.mesh import MODEL_AXIS
from redco_flow.engine.parameter_paths import join
from redco_flow.engine.sharding import (
    Axes,
    ShardingRule,
    ShardingRules,
    check_rules,
    override_rules,
)
from redco_flow.engine.structure import (
    Dims,
    Parameter,
    Structure,
    is_bias_of,
    is_writer,
    read_structure,
    reader_output,
)

logger = logging.getLogger(__name__)

# (the dim of one layer's part to split or None, why)
Decision = tuple[int | None, str]


def derive_rules(
    params: Any,
    axis_sizes: Mapping[str, int],
    *,
    overrides: Iterable[tuple[str, Axes]] = (),
    scanned_layers: Sequence[str] | None = None,
    residual_width: int | None = None,
) -> ShardingRules:
    """Give every parameter a spec with a reason; the user's overrides come first.

    Args:
        params: arrays or shapes.
        axis_sizes: devices along each mesh axis.
        overrides: (regex, axes) pairs, as in `[("embedding$", (None, "model"))]`.
        scanned_layers: see `read_structure`.
        residual_width: see `read_structure`.

    Raises:
        ShardingError: an override matches no parameter or does not fit one.
    """
    given = override_rules(overrides)
    structure = read_structure(params, scanned_layers=scanned_layers, residual_width=residual_width)
    derived = []
    for parameter in structure.parameters:
        path = join(parameter.path)
        if not any(rule.matches(path) for rule in given):
            spec, reason = _spec(parameter, structure, axis_sizes[MODEL_AXIS])
            derived.append(ShardingRule(path, spec, reason, exact=True))
    return check_rules((*given, *derived), params, axis_sizes)


def weight_decay_mask(params: Any, *, scanned_layers: Sequence[str] | None = None) -> Any:
    """Return a tree of bools: True for matrices, False for norms, biases and relative biases.

    Raises:
        ShardingError: see `read_structure`.
    """
    structure = read_structure(params, scanned_layers=scanned_layers)
    decayed = [
        len(p.dims) > 1 and structure.width in p.dims and _kernel_of(p, structure) is None
        for p in structure.parameters
    ]
    return jax.tree.unflatten(jax.tree.structure(params), decayed)


def _spec(parameter: Parameter, structure: Structure, num_shards: int) -> tuple[PartitionSpec, str]:
    dim, reason = _decide(parameter, structure)
    if dim is None:
        return PartitionSpec(), reason
    size = parameter.dims[dim]
    if size % num_shards:
        reason = f"{reason}; but {num_shards} model shards do not divide {size}: replicated"
        logger.warning("%s %s: %s", join(parameter.path), parameter.shape, reason)
        return PartitionSpec(), reason
    offset = 1 if parameter.is_scanned else 0
    axes = [None] * (offset + dim) + [MODEL_AXIS]
    return PartitionSpec(*axes), reason


def _decide(parameter: Parameter, structure: Structure) -> Decision:
    dims, width = parameter.dims, structure.width
    kernel = _kernel_of(parameter, structure)
    if kernel is not None:
        return _decide_bias(kernel, structure)
    if len(dims) < 2:
        return None, "a norm, or a bias on the residual: every shard needs all of it"
    output = reader_output(dims, width)
    if output is not None:
        dim, reason = _decide_output(output, structure)
        offset = len(dims) - len(output)
        if dims == (width, width):
            reason = (
                f"square ({width}): its shape does not tell whether it reads or writes the "
                "residual; split on its output side"
            )
        return (None if dim is None else offset + dim), reason
    if is_writer(dims, width):
        return _decide_input(dims, structure)
    heads = [dim for dim, size in enumerate(dims) if size in structure.num_heads]
    if heads:
        return heads[-1], f"a bias per head: split by its {dims[heads[-1]]} heads"
    return None, f"does not touch the residual stream (width {width})"


def _kernel_of(parameter: Parameter, structure: Structure) -> Parameter | None:
    """Return the reader whose bias this is."""
    kernels = [
        sibling
        for sibling in structure.siblings(parameter)
        if sibling.is_scanned == parameter.is_scanned
        and is_bias_of(parameter.dims, sibling.dims, structure.width)
    ]
    # Beside several kernels a vector of width D may as well be a norm or a writer's bias.
    if parameter.dims == (structure.width,) and len(structure.siblings(parameter)) > 1:
        return None
    return kernels[0] if kernels else None


def _decide_bias(kernel: Parameter, structure: Structure) -> Decision:
    output = reader_output(kernel.dims, structure.width)
    assert output is not None
    dim, _ = _decide_output(output, structure)
    return dim, f"the bias of {kernel.path[-1]}: as its output side"


def _decide_output(output: Dims, structure: Structure) -> Decision:
    """Choose among the dims that a reader produces."""
    group = _longest_group(output, structure)
    if len(group) < 2 and output[-1] in structure.head_dims:
        if len(output) > 1:
            return len(output) - 2, f"reads the residual: split by its {output[-2]} key-value heads"
        if not group:
            return None, "reads the residual into one head, which is never split"
    if group:
        return len(output) - len(group), f"reads the residual: split by its {_units(group)}"
    if len(output) == 1:
        return 0, f"reads the residual into {output[0]} outputs that nothing takes back: split"
    dim = 0 if len(output) == 2 else len(output) - 2
    return dim, f"reads the residual: split by its {output[dim]} heads"


def _decide_input(dims: Dims, structure: Structure) -> Decision:
    """Choose among the dims that a writer contracts."""
    inputs = dims[:-1]
    group = _longest_group(inputs, structure)
    if group:
        dim = len(inputs) - len(group)
        return dim, f"writes the residual: split by the {_units(group)} it takes in"
    if len(inputs) == 1:
        return 0, f"a table: split along its {inputs[0]} rows (vocabulary)"
    return 0, f"writes the residual: split by the {inputs[0]} heads it takes in"


def _longest_group(dims: Dims, structure: Structure) -> Dims:
    """Return the hidden group that ends `dims`; () where none does."""
    matching = [group for group in structure.groups if dims[-len(group) :] == group]
    return max(matching, key=len, default=())


def _units(group: Dims) -> str:
    return f"{group[0]} heads" if len(group) > 1 else f"{group[0]} units"
