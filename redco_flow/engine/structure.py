"""Read a model's structure off its parameter shapes, whatever the parameters are called.

A transformer's parameters hang on one residual stream of width D. A matrix that contracts D
first *reads* it; one whose last dim is D *writes* it back. Between a reader and a writer lie
hidden units: heads (and their head dim), or feed-forward units. Knows shapes and who shares a
subtree with whom; refuses to know names, devices and mesh axes.
Dims in this file: L scanned layers, D residual width, H heads, K head dim, F feed-forward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redco_flow.engine.errors import ShardingError
from redco_flow.engine.parameter_paths import Path, join, named_leaves

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A leaf.

    Args:
        shape: all dims.
        is_scanned: whether the first dim counts layers.
    """

    path: Path
    shape: Dims
    is_scanned: bool

    @property
    def dims(self) -> Dims:
        """The dims of one layer's part."""
        return self.shape[1:] if self.is_scanned else self.shape


@dataclass(frozen=True)
class Structure:
    """What the shapes tell.

    Args:
        width: D, or None where no parameter has two dims.
        groups: hidden units as the writers contract them: (F,), (H, K).
    """

    parameters: tuple[Parameter, ...]
    width: int | None
    groups: frozenset[Dims]

    @property
    def num_heads(self) -> frozenset[int]:
        """Head counts: the first dim of each group that has a head dim."""
        return frozenset(group[0] for group in self.groups if len(group) > 1)

    @property
    def head_dims(self) -> frozenset[int]:
        """Sizes of one head."""
        return frozenset(group[-1] for group in self.groups if len(group) > 1)

    def siblings(self, parameter: Parameter) -> list[Parameter]:
        """The other leaves of its module."""
        home = parameter.path[:-1]
        return [p for p in self.parameters if p.path[:-1] == home and p != parameter]


def read_structure(
    params: Any, *, scanned_layers: Sequence[str] | None = None, residual_width: int | None = None
) -> Structure:
    """Find scanned layers, the residual width and the hidden groups of a tree.

    Args:
        params: arrays or shapes.
        scanned_layers: regexes of the paths whose first dim counts layers; found by shape where
            None.
        residual_width: D, where the shapes leave it open.

    Raises:
        ShardingError: a pattern matches no parameter, or no parameter has that width.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(params)}
    scanned = (
        _find_scanned(shapes) if scanned_layers is None else _match_scanned(shapes, scanned_layers)
    )
    parameters = tuple(Parameter(path, shape, path in scanned) for path, shape in shapes.items())
    all_dims = [p.dims for p in parameters]
    if residual_width is not None and not any(residual_width in dims for dims in all_dims):
        raise ShardingError(f"no parameter has a dim of residual_width={residual_width}.")
    width = _find_width(all_dims) if residual_width is None else residual_width
    readers = frozenset(out for dims in all_dims if (out := reader_output(dims, width)))
    writers = {dims[:-1] for dims in all_dims if is_writer(dims, width)}
    return Structure(parameters, width, _hidden_groups(writers, readers))


def is_writer(dims: Dims, width: int | None) -> bool:
    """Whether a matrix of these dims puts its result on the residual stream."""
    return len(dims) > 1 and dims[-1] == width and dims[0] != width


def reader_output(dims: Dims, width: int | None) -> Dims | None:
    """Return the dims a reader produces, or None where these dims do not read the residual.

    Dims before D stack several readers: (3, D, H, K) produces (H, K) three times.
    """
    if len(dims) < 2 or width not in dims[:-1] or is_writer(dims, width):
        return None
    return dims[dims.index(width) + 1 :]


def is_bias_of(dims: Dims, kernel: Dims, width: int | None) -> bool:
    """Whether `dims` are what the reader `kernel` produces."""
    return len(dims) < len(kernel) and reader_output(kernel, width) == dims


def _hidden_groups(writers: Iterable[Dims], readers: Iterable[Dims]) -> frozenset[Dims]:
    """Return the parts of the writers' input dims that readers produce."""
    wide = {inputs for inputs in writers if len(inputs) > 1}
    heads = {inputs for inputs in wide if any(_ends(out, inputs) for out in readers)}
    head_dims = {group[-1] for group in heads}
    # A table with as many rows as a head has dims takes nothing from the heads' readers.
    others = {out for out in readers if len(out) == 1 or out[-1] not in head_dims}
    units = {
        inputs[-1:]
        for inputs in writers
        if len(inputs) == 1 and any(_ends(o, inputs) for o in others)
    }
    # (E, F) of stacked experts: the readers produce F, E times.
    experts = {inputs[1:] for inputs in wide - heads if inputs[1:] in others}
    return frozenset(heads | units | experts)


def _ends(dims: Dims, part: Dims) -> bool:
    return dims[-len(part) :] == part


def _find_width(all_dims: Sequence[Dims]) -> int | None:
    """Return the dim that most matrices have, at their ends above all."""
    anywhere: Counter[int] = Counter()
    at_ends: Counter[int] = Counter()
    vectors: Counter[int] = Counter()
    for dims in all_dims:
        if len(dims) > 1:
            anywhere.update(set(dims))
            at_ends.update({dims[0], dims[-1]})
        else:
            vectors.update(dims)
    # Between two equal candidates (one feed-forward block alone) the narrower is the residual.
    return max(anywhere, key=lambda d: (anywhere[d], at_ends[d], vectors[d], -d), default=None)


def _match_scanned(shapes: dict[Path, Dims], patterns: Sequence[str]) -> set[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        matched = {path for path in shapes if re.search(pattern, join(path))}
        if not matched:
            raise ShardingError(f"scanned_layers pattern {pattern!r} matches no parameter.")
        found |= matched
    return found


def _find_scanned(shapes: dict[Path, Dims]) -> set[Path]:
    """Return the leaves of the largest subtrees that look like stacked layers."""
    found: set[Path] = set()
    prefixes = {path[:depth] for path in shapes for depth in range(len(path))}
    for prefix in sorted(prefixes, key=len):
        inside = {path for path in shapes if path[: len(prefix)] == prefix}
        if not inside & found and _looks_stacked([shapes[path] for path in inside]):
            found |= inside
    return found


def _looks_stacked(shapes: list[Dims]) -> bool:
    """Whether one leading dim is common to matrices (L, …, D, …) and to vectors (L, D)."""
    if len(shapes) < 2 or min(map(len, shapes)) < 2 or len({shape[0] for shape in shapes}) > 1:
        return False
    vectors = {shape[1] for shape in shapes if len(shape) == 2}
    matrices = [shape[1:] for shape in shapes if len(shape) > 2]
    # Without a width common to both it is a module whose kernels happen to begin alike.
    return any(2 * sum(width in dims for dims in matrices) > len(matrices) for width in vectors)
