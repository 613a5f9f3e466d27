"""Low-rank factors as a PEFT adapter: A and B for each of transformers' linear modules.

Dims in this file: R rank, I a module's inputs, O its outputs.
Source: PEFT's checkpoint format, `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from redco_flow.models.hub.layouts import Shape, TensorLayout
from redco_flow.models.hub.module_names import renamed

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_RANK = "rank"
_WEIGHT = ".weight"
# transformers' names of a head of labels; one module even where it has several layers.
_HEADS = ("classifier", "score")
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


@dataclass(frozen=True)
class FactoredKernel:
    """A kernel of ours with low-rank factors, A (*stack, *inputs, R) and B (*stack, R, *outputs).

    DoRA's magnitudes have its dims without the inputs, in their order.

    Args:
        path: the parameter's.
        layout: which tensors the kernel is made of.
        shape: the kernel's.
        stack, inputs, outputs: positions of its dims.
        parts: the position of the dim that numbers its parts, and those that have factors; None:
            all have.
    """

    path: str
    layout: TensorLayout
    shape: Shape
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parts: tuple[int, tuple[int, ...]] | None = None

    @property
    def problem(self) -> str | None:
        """The reason that PEFT has no adapter for it; None where it has one."""
        if "expert" in self.layout.dims:
            return f"{self.path}: experts and their router are no linear modules of transformers"
        if self.layout.part is not None:
            return f"{self.path}: a part of a linear module of transformers has no adapter"
        groups = [set(group) for group in self._groups]
        inputs, outputs = set(self._names(self.inputs)), set(self._names(self.outputs))
        sides = ((inputs, outputs), (outputs, inputs))
        is_matrix = len(groups) == 2 and self.layout.name.endswith(_WEIGHT)
        if is_matrix and any(groups[0] <= one and groups[1] <= other for one, other in sides):
            return None
        return f"{self.path}: it is no matrix from its inputs to its outputs"

    @cached_property
    def modules(self) -> list[str]:
        """Names of transformers' modules."""
        return [_module(name) for _, name in self._tensors()]

    @property
    def is_input_major(self) -> bool:
        """Whether the modules keep (I, O) and not (O, I): Conv1D of GPT-2."""
        return set(self._groups[0]) <= set(self._names(self.inputs))

    def split(
        self, a: np.ndarray, b: np.ndarray, m: np.ndarray | None = None
    ) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield each module with A (R, I), B (O, R) and magnitudes (O,), by PEFT's names.

        Modules that are one kernel here have one A.
        """
        inputs, outputs = self._groups
        if not self.is_input_major:
            inputs, outputs = outputs, inputs
        a_dims = [*self._names(self.stack), *self._names(self.inputs), _RANK]
        b_dims = [*self._names(self.stack), _RANK, *self._names(self.outputs)]
        for at, name in self._tensors():
            at |= dict.fromkeys(self._alone, 0)
            first = _matrix(a, a_dims, at, [_RANK], inputs)
            found = {
                "lora_A.weight": first,
                "lora_B.weight": _matrix(b, b_dims, at, outputs, [_RANK]),
            }
            if m is not None:
                m_dims = self._names(sorted((*self.stack, *self.outputs)))
                found["lora_magnitude_vector"] = _matrix(m, m_dims, at, outputs, []).ravel()
            yield _module(name), found

    def _tensors(self) -> Iterator[tuple[dict[str, int], str]]:
        """Yield where each tensor with factors is along the factors' stacked dims, and its name."""
        part = None if self.parts is None else self.layout.dims[self.parts[0]]
        numbers = () if self.parts is None else self.parts[1]
        for index, name in self.layout.tensor_names(self.shape):
            at = dict(zip(self.layout.stacked, index, strict=True))
            if part is None:
                yield at, name
            elif at[part] in numbers:
                yield {**at, part: numbers.index(at[part])}, name

    @property
    def _groups(self) -> list[list[str]]:
        """Names of the dims behind each dim of a module's matrix."""
        return [
            [dim for dim in group if dim not in self._alone] for group in self.layout.tensor_dims
        ]

    @property
    def _alone(self) -> set[str]:
        """Dims of one element that a trace takes for a stack, as the gates of an MLP with one."""
        sizes = dict(zip(self.layout.dims, self.shape, strict=True))
        stack = set(self._names(self.stack)) - set(self.layout.stacked)
        return {dim for dim in stack if sizes[dim] == 1}

    def _names(self, positions: Iterable[int]) -> list[str]:
        return [self.layout.dims[position] for position in positions]


def adapter_tensors(
    kernels: Sequence[tuple[Any, ...]],
    full: Iterable[tuple[TensorLayout, np.ndarray]] = (),
    renamings: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Return what `adapter_model.safetensors` holds; float32.

    Args:
        renamings: the family's `module_renamings`.
        kernels: each `FactoredKernel` with its A, B and, of DoRA, magnitudes.
        full: parameters that were trained in full, with their layouts.
    """
    factors = {
        f"{module}.{name}": values
        for kernel, *parts in kernels
        for module, found in kernel.split(*parts)
        for name, values in found.items()
    }
    saved = dict(tensor for layout, values in full for tensor in layout.split(values))
    return {
        f"base_model.model.{renamed(name, renamings or {})}": np.ascontiguousarray(
            values, np.float32
        )
        for name, values in (factors | saved).items()
    }


def adapter_config(
    kernels: Sequence[FactoredKernel],
    others: Iterable[str],
    *,
    rank: int,
    alpha: float,
    architectures: Sequence[str],
    base: str | None,
    revision: str | None,
    rank_stabilized: bool = False,
    dora: bool = False,
    full: Iterable[str] = (),
    renamings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return `adapter_config.json`.

    Args:
        renamings: the family's `module_renamings`.
        full: names of the tensors that were trained in full.
        others: names of the model's tensors, those of `kernels` too.
        architectures: what transformers calls the model.
        base: the hub's name of the model that the adapter belongs to; None: it has none.
    """
    new = renamings or {}
    modules = {renamed(module, new) for kernel in kernels for module in kernel.modules}
    apart = {renamed(_module(name), new) for name in others} - modules
    return {
        "peft_type": "LORA",
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "revision": revision,
        "task_type": _task(architectures),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": rank_stabilized,
        "use_dora": dora,
        "bias": "none",
        "fan_in_fan_out": any(kernel.is_input_major for kernel in kernels),
        "init_lora_weights": True,
        "target_modules": _shortest_names(modules, apart),
        "modules_to_save": _saved_modules(renamed(name, new) for name in full) or None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _saved_modules(tensors: Iterable[str]) -> list[str]:
    """Return the modules that PEFT keeps a copy of instead of factors."""
    modules = (name.rpartition(".")[0] for name in tensors)
    tops = ((name, name.partition(".")[0]) for name in modules)
    return sorted({top if top in _HEADS else name for name, top in tops})


def _shortest_names(modules: set[str], others: set[str]) -> list[str]:
    """Return ends of names, as short as can be, that are those of `modules` and of no other."""
    taken = {end for name in others for end in _ends(name)}
    return sorted({next(end for end in _ends(name) if end not in taken) for name in modules})


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in reversed(range(len(parts))))


def _task(architectures: Sequence[str]) -> str | None:
    found = (task for end, task in _TASKS.items() for one in architectures if one.endswith(end))
    return next(found, None)


def _module(tensor: str) -> str:
    return tensor.removesuffix(_WEIGHT)


def _matrix(
    factor: np.ndarray,
    dims: list[str],
    at: Mapping[str, int],
    rows: list[str],
    columns: list[str],
) -> np.ndarray:
    """Return one module's part of a factor, as a matrix of these dims."""
    part = factor[tuple(at.get(dim, slice(None)) for dim in dims)]
    left = [dim for dim in dims if dim not in at]
    ordered = part.transpose([left.index(dim) for dim in (*rows, *columns)])
    sizes = dict(zip(left, part.shape, strict=True))
    return ordered.reshape(math.prod(sizes[dim] for dim in rows), -1)
