"""The safetensors files of a checkpoint directory as named tensors, read by blocks.

Knows single files and Hugging Face's sharded index.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from redco_flow.engine.files import reading, write_json
from redco_flow.models.hub import mxfp4
from redco_flow.models.hub.layouts import TensorLayout
from redco_flow.models.hub.model_files import INDEX_FILE, SINGLE_FILE, weight_names

_ROWS_AT_A_TIME = 4096
# Ends of the names of a tensor's two parts, of four bits a number and of their scales.
_PACKED = ("_blocks", "_scales")
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


# What a parameter is made of, and the parameter.
Parameter = tuple[TensorLayout, Any]


class CheckpointMismatch(ValueError):
    """The tensors are not those of the model; the message names every one that differs."""


class TensorFiles:
    """The tensors of a checkpoint directory, opened without reading them; a context manager.

    Raises:
        CheckpointMismatch: no safetensors there, or a file that is none (cut off, for example).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        try:
            for path in _find_files(directory):
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Every tensor's name; of one that is packed (MXFP4), what it is called unpacked."""
        parts = {name + end for name in self._packed for end in _PACKED}
        return (set(self._file_of) - parts) | self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if name in self._packed:
            *lead, num_rows, num_blocks = self.shape(name + _PACKED[1])
            return (*lead, num_blocks * mxfp4.BLOCK, num_rows)
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, block: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a block of a tensor, all of it by default."""
        if name in self._packed:
            return self._unpacked(name, block)
        tensor = self._file_of[name].get_slice(name)
        dtype = tensor.get_dtype()
        if dtype not in _DTYPES:
            raise CheckpointMismatch(
                f"{self._path_of[name]}: tensor {name} is {dtype}; parameters are read from "
                f"{', '.join(_DTYPES)}."
            )
        whole = tuple(slice(0, size) for size in tensor.get_shape())
        with reading(self._path_of[name], "a safetensors file"):
            values: np.ndarray = np.asarray(tensor[block or whole])
        return values

    @cached_property
    def _packed(self) -> set[str]:
        """Names of the tensors that are there as blocks of four bits and their scales."""
        blocks, scales = _PACKED
        found = {name.removesuffix(scales) for name in self._file_of if name.endswith(scales)}
        return {name for name in found if name + blocks in self._file_of}

    def _unpacked(self, name: str, block: tuple[slice, ...]) -> np.ndarray:
        """Read a block (…, C, R) of a tensor that is packed as (…, R, C / 32)."""
        whole = tuple(slice(0, size) for size in self.shape(name))
        *lead, columns, rows = block or whole
        first, last = columns.start // mxfp4.BLOCK, -(-columns.stop // mxfp4.BLOCK)
        path = self._path_of[name + _PACKED[0]]
        with reading(path, "a safetensors file"):
            blocks, scales = (
                np.asarray(self._file_of[part].get_slice(part)[(*lead, rows, slice(first, last))])
                for part in (name + end for end in _PACKED)
            )
        begins = first * mxfp4.BLOCK
        wanted = slice(columns.start - begins, columns.stop - begins)
        return np.swapaxes(mxfp4.unpack(blocks, scales)[..., wanted], -1, -2)

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="np"))
            names = list(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointMismatch(f"{path}: not a readable safetensors file: {error}") from error
        self._file_of.update(dict.fromkeys(names, file))
        self._path_of.update(dict.fromkeys(names, path))


def equal_tensors(files: TensorFiles, one: str, other: str) -> bool:
    """Compare two matrices, a run of rows at a time."""
    if files.shape(one) != files.shape(other):
        return False
    num_rows, width = files.shape(one)
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        block = (slice(start, min(start + _ROWS_AT_A_TIME, num_rows)), slice(0, width))
        if not np.array_equal(files.read(one, block), files.read(other, block)):
            return False
    return True


def _find_files(directory: Path) -> list[Path]:
    """Return the safetensors files that make up a checkpoint."""
    try:
        names = weight_names(directory)
    except ValueError as error:
        raise CheckpointMismatch(str(error)) from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing == [SINGLE_FILE] == names:
        raise CheckpointMismatch(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there. Other formats are not "
            "read; transformers saves this one by save_pretrained()."
        )
    if missing:
        raise CheckpointMismatch(
            f"{directory / INDEX_FILE}: names files that are not there: {', '.join(missing)}."
        )
    return [directory / name for name in names]


MAX_FILE_BYTES = 5 * 10**9
_MAX_LISTED = 20


def load_params(
    directory: Path,
    layouts: Any,
    shapes: Any,
    shardings: Any = None,
    *,
    ignored: Iterable[str] = (),
) -> Any:
    """Read a checkpoint's tensors into a tree of arrays.

    Args:
        directory: has `model.safetensors`, or its shards and their index.
        layouts: tree of TensorLayout.
        shapes: the same tree of what is wanted, with `shape` and `dtype`.
        shardings: the same tree of `jax.sharding.Sharding`; None: all on the default device.
        ignored: names of tensors that may be there and are not read; `*` matches anything.

    Raises:
        CheckpointMismatch: missing, unexpected or mis-shaped tensors, all of them named.
    """
    leaves, layout_leaves = _paired(shapes, layouts)
    if shardings is None:
        single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        sharding_leaves: list[Any] = [single] * len(leaves)
    else:
        _, sharding_leaves = _paired(shapes, shardings)
    with TensorFiles(directory) as files:
        source_of = _match(files, layout_leaves, leaves, set(ignored))
        arrays = [
            _load_one(files, layout, leaf, sharding, source_of)
            for layout, leaf, sharding in zip(layout_leaves, leaves, sharding_leaves, strict=True)
        ]
        # The files are mapped into memory: nothing may still be reading them when they close.
        jax.block_until_ready(arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def save_params(
    directory: Path, layouts: Any, params: Any, *, max_file_bytes: int = MAX_FILE_BYTES
) -> list[Path]:
    """Write parameters as `model.safetensors`, or as shards and an index where they are larger.

    Args:
        directory: exists; files of these names in it are replaced.
        layouts: tree of TensorLayout, like `params`.

    Returns:
        the files written.
    """
    leaves, layout_leaves = _paired(params, layouts)
    plan = _plan_files(layout_leaves, leaves, max_file_bytes)
    tensors = named_tensors(layouts, params)
    written = []
    for file_name, names in plan.items():
        content = dict(itertools.islice(tensors, len(names)))
        assert list(content) == names
        # transformers refuses files that do not say what wrote them; "pt" is the layout's name.
        save_file(content, directory / file_name, metadata={"format": "pt"})
        written.append(directory / file_name)
    if len(plan) > 1:
        total_bytes = sum(leaf.nbytes for leaf in leaves)
        weight_map = {name: file_name for file_name, names in plan.items() for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(directory / INDEX_FILE, index)
        written.append(directory / INDEX_FILE)
    for stale in {*directory.glob("model*.safetensors"), directory / INDEX_FILE} - set(written):
        stale.unlink(missing_ok=True)
    return written


def named_tensors(layouts: Any, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, tensor) of every tensor that parameters make, one at a time.

    Args:
        layouts: tree of TensorLayout, like `params`.
    """
    leaves, layout_leaves = _paired(params, layouts)
    for parts in _by_tensor(layout_leaves, leaves):
        if len(parts) == 1:
            ((layout, leaf),) = parts
            yield from layout.split(np.asarray(leaf))
            continue
        splits = [layout.split(np.asarray(leaf)) for layout, leaf in parts]
        for tensors in zip(*splits, strict=True):
            yield tensors[0][0], np.concatenate([tensor for _, tensor in tensors])


def _by_tensor(layouts: list[TensorLayout], leaves: list[Any]) -> list[list[Parameter]]:
    """Bring parameters together that are parts of the same tensors, in the parts' order."""
    found: dict[str, list[Parameter]] = {}
    for layout, leaf in zip(layouts, leaves, strict=True):
        _, first = next(layout.tensor_names(leaf.shape))
        found.setdefault(first, []).append((layout, leaf))
    return [sorted(parts, key=lambda part: part[0].part or (0, 0)) for parts in found.values()]


def _paired(tree: Any, other: Any) -> tuple[list[Any], list[Any]]:
    """Return the leaves of `tree` and the parts of `other` at the same places."""
    leaves, structure = jax.tree.flatten(tree)
    definition: Any = structure
    return leaves, definition.flatten_up_to(other)


def _match(
    files: TensorFiles, layouts: list[TensorLayout], leaves: list[Any], ignored: set[str]
) -> dict[str, str]:
    """Return under which name each wanted tensor is there, or tell all that is wrong."""
    found, missing, misshaped = {}, [], []
    other_names: set[str] = set()
    for layout, leaf in zip(layouts, leaves, strict=True):
        wanted_shape = layout.tensor_shape(leaf.shape)
        for index, name in layout.tensor_names(leaf.shape):
            names = layout.names(index)
            other_names.update(names[1:])
            present = next((n for n in names if n in files.names), None)
            if present is None and layout.is_optional:
                continue
            if present is None:
                missing.append(name)
            elif files.shape(present) != wanted_shape:
                misshaped.append(f"{present} is {files.shape(present)}, expected {wanted_shape}")
            else:
                found[name] = present
    accounted = {*found.values(), *(line.split(" ")[0] for line in misshaped), *other_names}
    unexpected = sorted(
        name
        for name in files.names - accounted
        if not any(fnmatchcase(name, pattern) for pattern in ignored)
    )
    problems = [
        f"{len(lines)} {what}: {_listed(lines)}"
        for what, lines in (
            ("missing", missing),
            ("of another shape", misshaped),
            ("not of this model", unexpected),
        )
        if lines
    ]
    if problems:
        raise CheckpointMismatch(
            f"{files.directory}: the tensors do not fit the model's config.json. "
            f"{'; '.join(problems)}."
        )
    return found


def _load_one(
    files: TensorFiles,
    layout: TensorLayout,
    leaf: Any,
    sharding: jax.sharding.Sharding,
    source_of: Mapping[str, str],
) -> jax.Array:
    """Read one parameter, each distinct shard once."""
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read_tensor(name: str, part: tuple[slice, ...]) -> np.ndarray:
        if name in source_of:
            return files.read(source_of[name], part)
        return np.zeros([one.stop - one.start for one in part], leaf.dtype)

    def read_block(block: tuple[slice, ...] | None) -> np.ndarray:
        assert block is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(block, leaf.shape, strict=True))
        if bounds not in blocks:
            values = layout.read_block(leaf.shape, block, read_tensor)
            blocks[bounds] = np.ascontiguousarray(values, dtype=leaf.dtype)
        return blocks[bounds]

    return jax.make_array_from_callback(leaf.shape, sharding, read_block)


def _plan_files(
    layouts: list[TensorLayout], leaves: list[Any], max_file_bytes: int
) -> dict[str, list[str]]:
    """Spread the tensors over files in their order: file name to tensor names."""
    files: list[list[str]] = [[]]
    file_bytes = 0
    for (layout, leaf), *_ in _by_tensor(layouts, leaves):
        num_bytes = math.prod(layout.tensor_shape(leaf.shape)) * leaf.dtype.itemsize
        for _, name in layout.tensor_names(leaf.shape):
            if files[-1] and file_bytes + num_bytes > max_file_bytes:
                files.append([])
                file_bytes = 0
            files[-1].append(name)
            file_bytes += num_bytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": names
        for number, names in enumerate(files, start=1)
    }


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
    return ", ".join(lines[:_MAX_LISTED]) + more
