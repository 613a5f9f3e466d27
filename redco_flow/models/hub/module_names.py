"""Find kernels by the names of transformers' linear modules: `q_proj`, `c_attn`, `SelfAttention.q`.

A kernel of ours may be made of several modules: q, k and v of every layer are one array. The names
come from the family's tensor layouts, so nothing here needs JAX.
Source: PEFT's `target_modules`: a module is meant by its whole name or by the end of it.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redco_flow.models.hub.layouts import Shape, TensorLayout

ALL_LINEAR = "all-linear"
Parts = tuple[int, tuple[int, ...]]
"""The position of the dim that numbers a kernel's parts (q, k, v), and the numbers of some."""

_WEIGHT = ".weight"
_COUNTED = ("layer", "expert")
# Where a plan does not know how many layers there are.
_EXAMPLES = 3
_MOST_NAMES = 3
_DIMS_OF_MATRIX = 2


@dataclass(frozen=True)
class FoundTargets:
    """The kernels of one model that a list of targets selects.

    Args:
        pattern: a regex of parameters' paths, or `ALL_LINEAR`; None: only `modules` are meant.
        modules: kernels that were named by their modules; of some the parts that were.
        without: kernels that `ALL_LINEAR` does not mean: convolutions, as of an image's patches.
    """

    pattern: str | None
    modules: dict[str, Parts | None] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def flat_layouts(layouts: Mapping[str, Any], above: str = "") -> dict[str, TensorLayout]:
    """Return each parameter's layout by its path."""
    found: dict[str, TensorLayout] = {}
    for key, layout in layouts.items():
        path = f"{above}{key}"
        found |= (
            {path: layout} if isinstance(layout, TensorLayout) else flat_layouts(layout, f"{path}/")
        )
    return found


def renamed(name: str, renamings: Mapping[str, str]) -> str:
    """Return the name of a module in transformers, given what files call its tensors.

    Args:
        renamings: the family's `module_renamings`.
    """
    for old, new in renamings.items():
        name = name.replace(old, new)
    return name


def find_targets(
    targets: str | Sequence[str],
    layouts: Mapping[str, TensorLayout],
    shapes: Mapping[str, Shape] | None = None,
    *,
    renamings: Mapping[str, str] | None = None,
) -> FoundTargets:
    """Tell which kernels are meant.

    Each target is a module's name or the end of one (`attn.c_proj`), else a regex searched in the
    parameters' paths, else a regex searched in the modules' names.

    Args:
        targets: one, or several.
        layouts: by path.
        shapes: of the parameters, by path; None: not known, as in a plan.
        renamings: the family's `module_renamings`; both names of a module are known.

    Raises:
        ValueError: a target matches nothing, or only some of the layers that are one array.
    """
    entries = [targets] if isinstance(targets, str) else list(targets)
    if ALL_LINEAR in entries:
        convolutions = tuple(path for path, one in layouts.items() if is_convolution(one))
        return FoundTargets(ALL_LINEAR, without=convolutions)
    names = _Names(shapes, renamings or {})
    matrices = [
        path for path, layout in layouts.items() if len(layout.tensor_dims) >= _DIMS_OF_MATRIX
    ]
    patterns: list[str] = []
    modules: dict[str, Parts | None] = {}
    unknown = []
    for entry in entries:
        named = _named(entry, _is_end_of(entry), layouts, names)
        if named:
            modules = _joined(modules, named)
        elif any(re.search(entry, path) for path in matrices):
            patterns.append(f"(?:{entry})")
        elif named := _named(entry, re.compile(entry).search, layouts, names):
            modules = _joined(modules, named)
        else:
            unknown.append(entry)
    if unknown:
        raise ValueError(_nothing_found(unknown, layouts, names))
    return FoundTargets("|".join(patterns) or None, modules)


def _is_end_of(entry: str) -> Callable[[str], bool]:
    return lambda name: f".{name}".endswith(f".{entry}")


def _joined(
    one: dict[str, Parts | None], other: dict[str, Parts | None]
) -> dict[str, Parts | None]:
    found = {**one, **other}
    for path in one.keys() & other.keys():
        first, second = one[path], other[path]
        if first is not None and second is not None:
            found[path] = (first[0], tuple(sorted({*first[1], *second[1]})))
    return found


def _named(
    entry: str,
    matches: Callable[[str], Any],
    layouts: Mapping[str, TensorLayout],
    all_names: _Names,
) -> dict[str, Parts | None]:
    """Return the kernels, and parts of them, whose modules' names match in every layer."""
    found: dict[str, Parts | None] = {}
    for path, layout in layouts.items():
        if not is_matrix(layout):
            continue
        numbers: list[int] = []
        for number, names in all_names.of(path, layout):
            hits = [any(matches(name) for name in of_one) for of_one in names]
            if any(hits) and not all(hits):
                raise ValueError(
                    f"{entry!r} matches some layers only; the layers of {path} are one array, so "
                    "all of them have factors or none: give the name without a layer's number, "
                    f"such as {names[0][0].rpartition('.')[2]}"
                )
            if all(hits):
                numbers.append(number)
        if numbers:
            position = _part_position(layout)
            found[path] = None if position is None else (position, tuple(numbers))
    return found


@dataclass(frozen=True)
class _Names:
    """Names of the modules that kernels are made of."""

    shapes: Mapping[str, Shape] | None
    renamings: Mapping[str, str]

    def of(self, path: str, layout: TensorLayout) -> Iterator[tuple[int, list[list[str]]]]:
        """Yield each part's number with all names of its module in each layer.

        A kernel without parts is part 0.
        """
        position = _part_position(layout)
        part = None if position is None else layout.dims[position]
        ranges = {dim: self._indices(path, layout, dim) for dim in layout.stacked}
        for number in range(1) if part is None else ranges[part]:
            chosen = (range(number, number + 1) if dim == part else ranges[dim] for dim in ranges)
            yield number, [self._at(layout, index) for index in itertools.product(*chosen)]

    def _at(self, layout: TensorLayout, index: tuple[int, ...]) -> list[str]:
        names = [name.removesuffix(_WEIGHT) for name in layout.names(index)]
        return list(dict.fromkeys([*names, *(renamed(name, self.renamings) for name in names)]))

    def _indices(self, path: str, layout: TensorLayout, dim: str) -> range:
        if self.shapes is not None:
            return range(self.shapes[path][layout.dims.index(dim)])
        return range(len(layout.labels[dim]) if dim in layout.labels else _EXAMPLES)


def _part_position(layout: TensorLayout) -> int | None:
    """The position of the one dim that numbers modules of a layer; None: a layer has one."""
    parts = [dim for dim in layout.stacked if dim not in _COUNTED]
    return layout.dims.index(parts[0]) if len(parts) == 1 else None


def is_matrix(layout: TensorLayout) -> bool:
    """Say whether a parameter is the weight of a module with inputs and outputs."""
    return layout.name.endswith(_WEIGHT) and len(layout.tensor_dims) >= _DIMS_OF_MATRIX


def is_convolution(layout: TensorLayout) -> bool:
    """Say whether a kernel is moved over an image, and not multiplied with."""
    return len(layout.tensor_dims) > _DIMS_OF_MATRIX and "expert" not in layout.dims


def _nothing_found(
    unknown: Sequence[str], layouts: Mapping[str, TensorLayout], all_names: _Names
) -> str:
    of_layers = {
        path: layout
        for path, layout in layouts.items()
        if is_matrix(layout) and "layer" in layout.stacked
    }
    names = {
        name.rpartition(".")[2]
        for path, layout in of_layers.items()
        for _, modules in all_names.of(path, layout)
        for name in modules[0]
    }
    words = [word for entry in unknown for word in re.split(r"[^\w.-]+", entry) if word]
    known = sorted({*names, *of_layers})
    near = [name for word in words for name in difflib.get_close_matches(word, known, _MOST_NAMES)]
    advice = f"did you mean {', '.join(dict.fromkeys(near))}? " if near else ""
    if any("," in entry for entry in unknown):
        advice += f"Several targets are a list: [{', '.join(words)}]. "
    return (
        f"{', '.join(map(repr, unknown))} matches no kernel: {advice}The modules of the layers "
        f"are {', '.join(sorted(names))}; their kernels here are {', '.join(of_layers)}"
    )
