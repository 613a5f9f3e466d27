"""Match parameter paths to mesh axes, and say why.

`ShardingRules` is an ordered list of rules; the first whose pattern is found in a parameter's
path decides its PartitionSpec. Pure: reads shapes, never devices. Where the rules come from, the
user or the dataflow (`two_rules.py`), it does not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from redco_flow.engine.errors import ShardingError
from redco_flow.engine.sharding.fused_parts import FusedParts
from redco_flow.engine.sharding.mesh import FSDP_AXIS, MODEL_AXIS, PARAMETER_AXES

Path = tuple[str, ...]


def key_names(key_path: tuple[Any, ...]) -> Path:
    """Return one name per key: dict keys, attribute names and indices alike."""
    names = []
    for key in key_path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                names.append(str(getattr(key, attribute)))
                break
        else:
            names.append(str(key))
    return tuple(names)


def named_leaves(tree: Any) -> list[tuple[Path, Any]]:
    """List (path, leaf) in the tree's own order."""
    return [(key_names(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def join(path: Path) -> str:
    """Spell a path as text; the root itself is `.`."""
    return "/".join(path) or "."


def is_bias(path: Path) -> bool:
    """Whether a parameter is named as a bias.

    A bias of each expert is multiplied by the experts' weights, as a kernel is by activations.
    """
    return bool(path) and path[-1].endswith("bias")


Axes = Sequence[str | None]
_EXPLAINED_COLUMNS = ("parameter", "shape", "axes", "reason")


@dataclass(frozen=True)
class ShardingRule:
    """One rule.

    Args:
        pattern: a regex searched in the path, or the whole path where `exact`.
        spec: mesh axis per leading dim, as in `PartitionSpec`.
        reason: why, for people.
        exact: whether the pattern is a path rather than a regex.
        is_padded: whether a dim that its axis does not divide is stored padded; else that is an
            error.
        fused: the parts of a dim whose columns are stored sorted by shard; None: as they are.
    """

    pattern: str
    spec: PartitionSpec
    reason: str
    exact: bool = False
    is_padded: bool = False
    fused: FusedParts | None = None

    def matches(self, path: str) -> bool:
        """Tell whether the rule speaks about the parameter at `path`."""
        return path == self.pattern if self.exact else re.search(self.pattern, path) is not None


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter and what the rules decided about it.

    Args:
        num_bytes: of one replica, unpadded.
        stored_bytes: of one replica as it is stored, with its padding.
    """

    path: str
    shape: tuple[int, ...]
    num_bytes: int
    stored_bytes: int
    spec: PartitionSpec
    reason: str
    fused: FusedParts | None = None

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds all of it."""
        return not mesh_axes(self.spec)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: "1 array", "1,024 arrays"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def decimal_bytes(num_bytes: int) -> str:
    """Return bytes in SI units with three digits: 98832 → "98.8 kB"."""
    amount, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.5 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{amount:.3g} {units[0]}"


@dataclass(frozen=True)
class ShardingRules:
    """Ordered rules, and what they make of the parameters they were checked against.

    Build it with `check_rules`. `rules` is all that decides; `parameters` is for people.
    """

    rules: tuple[ShardingRule, ...]
    parameters: tuple[ShardedParameter, ...]
    axis_sizes: Mapping[str, int]

    def specs(self, params: Any) -> Any:
        """Return the tree of PartitionSpecs for a tree of arrays or shapes, as they are stored.

        Raises:
            ShardingError: no rule matches a parameter, or its shape does not fit the rule.
        """
        return self._find(params, lambda rule: rule.spec)

    def fused(self, params: Any) -> Any:
        """Return, in a tree like `params`, which dim of each is stored sorted by shard, if any.

        Raises:
            ShardingError: as `specs`.
        """
        return self._find(params, lambda rule: rule.fused)

    def _find(self, params: Any, ask: Callable[[ShardingRule], Any]) -> Any:
        """Ask each parameter's rule."""

        def find(key_path: tuple[Any, ...], leaf: Any) -> Any:
            path = join(key_names(key_path))
            rule = _first_match(self.rules, path, tuple(leaf.shape))
            _check_fit(rule, path, tuple(leaf.shape), self.axis_sizes)
            return ask(rule)

        return jax.tree_util.tree_map_with_path(find, params)

    @property
    def total_bytes(self) -> int:
        """Bytes of one full copy of the parameters."""
        return sum(p.num_bytes for p in self.parameters)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the parameters that are replicated on every device."""
        return sum(p.num_bytes for p in self.parameters if p.is_replicated)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of parameters on one device."""
        return sum(
            p.stored_bytes // math.prod(self.axis_sizes[axis] for axis in mesh_axes(p.spec))
            for p in self.parameters
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all arrays, without padding."""
        return sum(math.prod(p.shape) for p in self.parameters)

    def counts(self) -> str:
        """Say how many parameters there are: "24,708 parameters in 21 arrays (98.8 kB), …"."""
        num_model, num_fsdp = self.axis_sizes[MODEL_AXIS], self.axis_sizes.get(FSDP_AXIS, 1)
        shards = f"{num_model} model{f' x {num_fsdp} fsdp' if num_fsdp > 1 else ''} shard"
        return (
            f"{counted(self.num_parameters, 'parameter')} in "
            f"{counted(len(self.parameters), 'array')} ({decimal_bytes(self.total_bytes)}), "
            f"{shards}{'s' if num_model * num_fsdp > 1 else ''}"
        )

    def summary(self) -> str:
        """Say in one line how many parameters there are and how much of them is sharded."""
        count = sum(p.is_replicated for p in self.parameters)
        return (
            f"{self.counts()}: {decimal_bytes(self.bytes_per_device)} per device; "
            f"{counted(count, 'array')} replicated ({decimal_bytes(self.replicated_bytes)})"
        )

    def explain(self) -> str:
        """Say for every parameter which axes it has and why; the last line is the summary."""
        rows = [_EXPLAINED_COLUMNS] + [
            (p.path, str(p.shape), describe_spec(p.spec), p.reason) for p in self.parameters
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join((*map(str.ljust, row[:3], widths), row[3])) for row in rows]
        return "\n".join([*lines, self.summary()])


def check_rules(
    rules: Iterable[ShardingRule], params: Any, axis_sizes: Mapping[str, int]
) -> ShardingRules:
    """Bind rules to a tree of arrays or shapes.

    Args:
        axis_sizes: devices along each mesh axis.

    Raises:
        ShardingError: a rule matches no parameter, a parameter has no rule, or a rule does not
            fit a shape it decides about.
    """
    rules = tuple(rules)
    decided = []
    paths = [(join(path), leaf) for path, leaf in named_leaves(params)]
    for rule in rules:
        _check_matches_something(rule, [path for path, _ in paths])
    for path, leaf in paths:
        shape = tuple(leaf.shape)
        rule = _first_match(rules, path, shape)
        _check_fit(rule, path, shape, axis_sizes)
        item = np.dtype(leaf.dtype).itemsize
        stored = stored_shape(shape, rule.spec, axis_sizes)
        sizes = (math.prod(shape) * item, math.prod(stored) * item)
        decided.append(ShardedParameter(path, shape, *sizes, rule.spec, rule.reason, rule.fused))
    return ShardingRules(rules, tuple(decided), axis_sizes)


def override_rules(overrides: Iterable[tuple[str, Axes]]) -> tuple[ShardingRule, ...]:
    """Turn the user's (regex, axes) pairs into rules.

    Raises:
        ShardingError: not a regex, or an axis that the mesh does not have.
    """
    rules = []
    for pattern, axes in overrides:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ShardingError(f"sharding rule {pattern!r} is not a regex: {error}.") from error
        unknown = [a for a in axes if a is not None and a not in PARAMETER_AXES]
        if unknown:
            raise ShardingError(
                f"sharding rule {pattern!r} names axis {unknown[0]!r}; "
                f"allowed: None, {', '.join(map(repr, PARAMETER_AXES))}."
            )
        named = [a for a in axes if a is not None]
        if len(set(named)) < len(named):
            raise ShardingError(f"sharding rule {pattern!r} names one axis twice: {tuple(axes)}.")
        rules.append(ShardingRule(pattern, PartitionSpec(*axes), f"given: {pattern!r}"))
    return tuple(rules)


def stored_shape(
    shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the shape whose split dims are rounded up to multiples of their axes."""
    axes = tuple(spec) + (None,) * (len(shape) - len(spec))
    return tuple(
        size if axis is None else -(-size // axis_sizes[axis]) * axis_sizes[axis]
        for size, axis in zip(shape, axes, strict=True)
    )


def mesh_axes(spec: PartitionSpec) -> set[str]:
    """Return the mesh axes that a spec uses."""
    return {axis for axis in spec if axis is not None}


def describe_spec(spec: PartitionSpec) -> str:
    """Spell a spec: `(-, model)`, or `replicated`."""
    if not mesh_axes(spec):
        return "replicated"
    return "(" + ", ".join("-" if axis is None else str(axis) for axis in spec) + ")"


def _first_match(
    rules: tuple[ShardingRule, ...], path: str, shape: tuple[int, ...]
) -> ShardingRule:
    for rule in rules:
        if rule.matches(path):
            return rule
    raise ShardingError(f"no sharding rule matches {path} {shape}; add one, or end with ('', ()).")


def _check_matches_something(rule: ShardingRule, paths: list[str]) -> None:
    if not any(rule.matches(path) for path in paths):
        shown = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
        raise ShardingError(
            f"sharding rule {rule.pattern!r} matches no parameter; parameters: {shown}."
        )


def _check_fit(
    rule: ShardingRule, path: str, shape: tuple[int, ...], axis_sizes: Mapping[str, int]
) -> None:
    if len(rule.spec) > len(shape):
        raise ShardingError(
            f"sharding rule {rule.pattern!r} names {len(rule.spec)} axes, "
            f"but {path} {shape} has {len(shape)} dims."
        )
    for size, axis in zip(shape, rule.spec, strict=False):
        if axis is not None and size % axis_sizes[axis] and not rule.is_padded:
            raise ShardingError(
                f"sharding rule {rule.pattern!r} splits {path} {shape} along its dim of {size}, "
                f"which the {axis_sizes[axis]} shards of axis {axis!r} do not divide; "
                "use None there."
            )
