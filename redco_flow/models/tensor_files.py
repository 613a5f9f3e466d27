"""The safetensors files of a checkpoint directory as named tensors, read by blocks.

Knows single files and Hugging Face's sharded index.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from redco_flow.records import read_json, reading

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ROWS_AT_A_TIME = 4096
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


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
        """Every tensor's name."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, block: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a block of a tensor, all of it by default."""
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
    index = directory / INDEX_FILE
    if index.is_file():
        names = _files_in_index(index)
        missing = [n for n in names if Path(n).name != n or not (directory / n).is_file()]
        if missing:
            raise CheckpointMismatch(
                f"{index}: names files that are not there: {', '.join(missing)}."
            )
        return [directory / name for name in names]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    raise CheckpointMismatch(
        f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there. Other formats are not "
        "read; transformers saves this one by save_pretrained()."
    )


def _files_in_index(index: Path) -> list[str]:
    """Return the names of the files that an index spreads the tensors over, each once."""
    try:
        record = read_json(index)
    except ValueError as error:
        raise CheckpointMismatch(str(error)) from error
    places = record.get("weight_map") if isinstance(record, dict) else None
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointMismatch(
            f"{index}: no index of safetensors files: weight_map must name the file of each tensor."
        )
    return sorted(set(names))
