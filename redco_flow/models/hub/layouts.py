"""Layouts: patterns that map a checkpoint's tensors to one parameter of the model.

    TensorLayout("layer model part heads head_dim", "(heads head_dim) model",
                 "encoder.block.{layer}.layer.0.SelfAttention.{part}.weight",
                 {"part": ("q", "k", "v")})

says that a parameter with those five dims is a stack, over layers and over q, k, v, of tensors with
two dims, the first of which is heads times head dim. Any block of the parameter can be read from
just the tensors, and the parts of them, that it covers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redco_flow.models.layer_config import AttentionConfig, MlpConfig

if TYPE_CHECKING:
    import numpy as np


Shape = tuple[int, ...]
# Reads a block, given a slice per dim, of the tensor of that name.
ReadTensor = Callable[[str, tuple[slice, ...]], "np.ndarray"]


@dataclass(frozen=True)
class TensorLayout:
    """One parameter's dims, its tensors' dims, and the tensors' names.

    Args:
        parameter: names of the parameter's dims.
        tensor: the same for each tensor; dims in parentheses are flattened into one, and `()` is
            a dim of size 1 that the parameter has not.
        name: the tensors' name; `{dim}` is the index in a dim that is stacked.
        labels: what a stacked dim's indices are called in the name; numbers where not given.
        aliases: other such patterns under which the same tensor is published; tied weights
            have many.
        is_optional: files may lack it, which means zeros.
        part: where the parameter begins along a tensor's first dim, and how long that is, where
            other parameters are parts of the same tensor; None: it is all of it.
    """

    parameter: str
    tensor: str
    name: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    is_optional: bool = False
    part: tuple[int, int] | None = None

    @property
    def dims(self) -> list[str]:
        """Names of the parameter's dims."""
        return self.parameter.split()

    @property
    def stacked(self) -> list[str]:
        """Those of them that count tensors."""
        return [dim for dim in self.dims if f"{{{dim}}}" in self.name]

    @property
    def tensor_dims(self) -> list[list[str]]:
        """Names of the dims behind each of a tensor's dims."""
        groups = re.findall(r"\(([^)]*)\)|(\S+)", self.tensor)
        return [(grouped or single).split() for grouped, single in groups]

    def tensor_shape(self, shape: Shape) -> Shape:
        """Return the shape of each tensor of a parameter of this shape."""
        sizes = self._sizes(shape)
        first, *rest = (math.prod(sizes[dim] for dim in group) for group in self.tensor_dims)
        return (first if self.part is None else self.part[1], *rest)

    def tensor_names(self, shape: Shape) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield (index along the stacked dims, name) of every tensor."""
        sizes = self._sizes(shape)
        for index in itertools.product(*(range(sizes[dim]) for dim in self.stacked)):
            yield index, self.names(index)[0]

    def names(self, index: tuple[int, ...]) -> tuple[str, ...]:
        """Return every name of the tensor at an index along the stacked dims, ours first."""
        labels = {
            dim: self.labels[dim][i] if dim in self.labels else str(i)
            for dim, i in zip(self.stacked, index, strict=True)
        }
        return tuple(name.format(**labels) for name in (self.name, *self.aliases))

    def read_block(self, shape: Shape, block: tuple[slice, ...], read: ReadTensor) -> np.ndarray:
        """Assemble a block of the parameter from the tensors that it covers.

        Args:
            shape: the whole parameter's.
            block: a slice of step 1 per dim.
        """
        # Imported here, as below: plans read families' configs, and with them this module.
        import numpy as np

        sizes = self._sizes(shape)
        bounds = {
            dim: range(*part.indices(sizes[dim]))
            for dim, part in zip(self.dims, block, strict=True)
        }
        parts = [
            self._read_one(self.names(index)[0], sizes, bounds, read)
            for index in itertools.product(*(bounds[dim] for dim in self.stacked))
        ]
        stacked_shape = [len(bounds[dim]) for dim in self.stacked]
        whole = (
            np.stack(parts).reshape(*stacked_shape, *parts[0].shape) if self.stacked else parts[0]
        )
        order = self.stacked + self._flat_dims
        return whole.transpose([order.index(dim) for dim in self.dims])

    def split(self, parameter: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, tensor) of every tensor of a parameter; contiguous copies, one at a time.

        Of a tensor that has other parts, the parameter's.
        """
        import numpy as np

        shape = dataclasses.replace(self, part=None).tensor_shape(parameter.shape)
        order = self.stacked + self._flat_dims
        ordered = parameter.transpose([self.dims.index(dim) for dim in order])
        for index, name in self.tensor_names(parameter.shape):
            yield name, np.ascontiguousarray(ordered[index]).reshape(shape)

    @property
    def _flat_dims(self) -> list[str]:
        return [dim for group in self.tensor_dims for dim in group]

    def _sizes(self, shape: Shape) -> dict[str, int]:
        return dict(zip(self.dims, shape, strict=True))

    def _read_one(
        self, name: str, sizes: Mapping[str, int], bounds: Mapping[str, range], read: ReadTensor
    ) -> np.ndarray:
        """Read one tensor's part, with its dims unflattened."""
        runs = [_runs(group, sizes, bounds) for group in self.tensor_dims]
        if self.part is not None:
            start = self.part[0]
            runs[0] = [slice(run.start + start, run.stop + start) for run in runs[0]]
        return _read_runs(name, runs, read).reshape([len(bounds[dim]) for dim in self._flat_dims])


def _runs(group: list[str], sizes: Mapping[str, int], bounds: Mapping[str, range]) -> list[slice]:
    """Return where the wanted elements of dims that are flattened into one lie, in runs."""
    if not group:
        return [slice(0, 1)]
    outer, *inner = group
    stride = math.prod(sizes[dim] for dim in inner)
    if all(len(bounds[dim]) == sizes[dim] for dim in inner):
        return [slice(bounds[outer].start * stride, bounds[outer].stop * stride)]
    within = _runs(inner, sizes, bounds)
    return [
        slice(index * stride + run.start, index * stride + run.stop)
        for index in bounds[outer]
        for run in within
    ]


def _read_runs(name: str, runs: list[list[slice]], read: ReadTensor) -> np.ndarray:
    """Read the block that runs along every dim of a tensor span."""
    import numpy as np

    def read_within(chosen: tuple[slice, ...]) -> np.ndarray:
        dim = len(chosen)
        if dim == len(runs):
            return read(name, chosen)
        parts = [read_within((*chosen, run)) for run in runs[dim]]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)

    return read_within(())


Layouts = dict[str, Any]


def table_layout(
    rows: str, name: str, *, width: str = "model", aliases: tuple[str, ...] = ()
) -> TensorLayout:
    """Return the layout of a table of embeddings or positions, (rows, width)."""
    dims = f"{rows} {width}"
    return TensorLayout(dims, dims, name, aliases=aliases)


def head_layout(name: str, *, width: str = "model") -> TensorLayout:
    """Return the layout of an untied head, (width, vocabulary)."""
    return TensorLayout(f"{width} vocabulary", f"vocabulary {width}", name)


def linear_layouts(name: str, inputs: str, outputs: str) -> Layouts:
    """Return the layouts of a linear layer's kernel (inputs, outputs) and bias."""
    return {
        "kernel": TensorLayout(f"{inputs} {outputs}", f"{outputs} {inputs}", f"{name}.weight"),
        "bias": TensorLayout(outputs, outputs, f"{name}.bias"),
    }


def norm_layouts(name: str, *, has_bias: bool) -> Layouts:
    """Return the layouts of a `Norm`, one per layer where the name has `{layer}`."""
    dims = "layer model" if "{layer}" in name else "model"
    layouts = {"scale": TensorLayout(dims, "model", f"{name}.weight")}
    if has_bias:
        layouts["bias"] = TensorLayout(dims, "model", f"{name}.bias")
    return layouts


def attention_layouts(
    config: AttentionConfig, inputs: str, output: str, labels: tuple[str, str, str]
) -> Layouts:
    """Return the layouts of an `Attention` whose q, k and v are linear layers of their own.

    Args:
        inputs: name with `{layer}` and `{part}`, such as `model.layers.{layer}.attn.{part}_proj`.
        output: name with `{layer}`.
        labels: the values of `{part}` for q, k and v.
    """
    layouts: Layouts = {}
    # One kernel of all three, or q apart from k and v.
    kernels = {"qkv": labels} if config.is_fused else {"q": labels[:1], "kv": labels[1:]}
    for name, parts in kernels.items():
        part = "part " if len(parts) > 1 else ""
        tensor = inputs if part else inputs.replace("{part}", parts[0])
        names: Mapping[str, tuple[str, ...]] = {"part": parts} if part else {}
        layouts[name] = TensorLayout(
            f"layer model {part}heads head_dim", "(heads head_dim) model", f"{tensor}.weight", names
        )
        if config.has_input_bias:
            layouts[f"{name}_bias"] = TensorLayout(
                f"layer {part}heads head_dim", "(heads head_dim)", f"{tensor}.bias", names
            )
    layouts["out"] = TensorLayout(
        "layer heads head_dim model", "model (heads head_dim)", f"{output}.weight"
    )
    if config.has_output_bias:
        layouts["out_bias"] = TensorLayout("layer model", "model", f"{output}.bias")
    return layouts


def mlp_layouts(config: MlpConfig, inner: str, outer: str, labels: tuple[str, ...] = ()) -> Layouts:
    """Return the layouts of an `Mlp` of linear layers.

    Args:
        inner: name with `{layer}`, and `{gate}` where there are two.
        labels: the values of `{gate}` for the activated one and for the other.
    """
    # Without gates the name is the same for the only one there is.
    names = {"gate": labels} if labels else {}
    unit = "units" if labels else "(gate units)"
    layouts = {
        "wi": TensorLayout("layer model gate units", f"{unit} model", f"{inner}.weight", names),
        "wo": TensorLayout("layer units model", "model units", f"{outer}.weight"),
    }
    if config.has_bias:
        layouts["wi_bias"] = TensorLayout("layer gate units", unit, f"{inner}.bias", names)
        layouts["wo_bias"] = TensorLayout("layer model", "model", f"{outer}.bias")
    return layouts


def with_numbers(layouts: Layouts, numbers: Sequence[int]) -> Layouts:
    """Let the layers that are stacked have these numbers in the names of tensors."""
    labels = {"layer": tuple(map(str, numbers))}
    return {
        key: dataclasses.replace(layout, labels={**layout.labels, **labels})
        if isinstance(layout, TensorLayout)
        else with_numbers(layout, numbers)
        for key, layout in layouts.items()
    }


def with_prefix(layouts: Layouts, prefix: str) -> Layouts:
    """Let the names of all tensors begin with `prefix`."""
    return {
        key: dataclasses.replace(
            layout,
            name=prefix + layout.name,
            aliases=tuple(prefix + alias for alias in layout.aliases),
        )
        if isinstance(layout, TensorLayout)
        else with_prefix(layout, prefix)
        for key, layout in layouts.items()
    }


def with_other_prefix(layouts: Layouts, prefix: str, other: str) -> Layouts:
    """Let every tensor whose name begins with `prefix` be found under `other` instead, too."""
    renamed: Layouts = {}
    for key, layout in layouts.items():
        if not isinstance(layout, TensorLayout):
            renamed[key] = with_other_prefix(layout, prefix, other)
        else:
            names = (layout.name, *layout.aliases)
            others = tuple(
                other + name.removeprefix(prefix) for name in names if name.startswith(prefix)
            )
            renamed[key] = dataclasses.replace(layout, aliases=(*layout.aliases, *others))
    return renamed
