"""Trees of arrays to and from Orbax stores, leaf by leaf under its path.

A state is stored as two flat stores, `params` and `training` (all the rest), each a map from
path to array, so parameters can be read, verified and published alone and a tree's classes
(optax NamedTuples, empty states) need not be stored: they come from the tree to restore into.
`tree.json` keeps what a store cannot: shapes and dtypes for clear errors, the kinds of random
keys, and arrays without elements. Knows no commits and no retention.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from blake3 import blake3

from redco_flow.engine.checkpoint.commit import PARAMS, TRAINING, TREE_FILE
from redco_flow.engine.errors import CheckpointError
from redco_flow.engine.files import canonical_json, read_json, write_json

_NUM_MISMATCHES_IN_MESSAGE = 20
_BLOCK_BYTES = 16 << 20
_MIN_REPLICA_SLICE_BYTES = 1 << 20


@dataclass(frozen=True)
class Leaf:
    """Shape and dtype of an array or a random key, without its values.

    Args:
        shape: the logical one; a random key counts as one element.
        dtype: as NumPy or JAX prints it.
        key_impl: a random key's implementation; None for numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None

    @property
    def is_stored(self) -> bool:
        """Whether there is any element; Orbax refuses arrays that have none."""
        return 0 not in self.shape

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def make_checkpointer(*, is_alone: bool = False) -> Any:
    """Return an Orbax checkpointer that copies to the host, then writes in the background.

    Args:
        is_alone: only process 0 saves, and waits for no other.
    """
    options = ocp.options.MultiprocessingOptions()
    if is_alone:
        options = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes={0}, barrier_sync_key_prefix="first-process"
        )
    handler = ocp.CompositeCheckpointHandler(
        params=_handler(options),
        training=_handler(options),
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
    )
    return ocp.AsyncCheckpointer(handler, multiprocessing_options=options)


@dataclass(frozen=True)
class StoredState:
    """A state as it is written.

    Args:
        tree: part -> path -> leaf, for `tree.json`.
        stores: part -> path -> array, for Orbax.
    """

    tree: Mapping[str, Mapping[str, Leaf]]
    stores: Mapping[str, Mapping[str, Any]]


def as_stored(state: Any, convert: Callable[[Any], Any] = lambda leaf: leaf) -> StoredState:
    """Return what is written of a state.

    Args:
        convert: makes of an array what is stored.

    Raises:
        CheckpointError: a leaf is no array or number; the message names its path.
    """
    tree: dict[str, dict[str, Leaf]] = {}
    stores = {}
    for part, leaves in _parts(state).items():
        tree[part] = {path: describe(path, leaf) for path, leaf in leaves.items()}
        stored = {p: leaf for p, leaf in leaves.items() if tree[part][p].is_stored}
        if stored:
            stores[part] = {p: convert(_storable(leaf)) for p, leaf in stored.items()}
    return StoredState(tree, stores)


def start_save(checkpointer: Any, step_directory: Path, stored: StoredState) -> None:
    """Copy what is on devices to the host, and start writing."""
    stores = {part: ocp.args.PyTreeSave(store) for part, store in stored.stores.items()}
    checkpointer.save(step_directory, args=ocp.args.Composite(**stores))


def write_tree(step_directory: Path, stored: StoredState) -> None:
    """Keep what the leaves are beside the stores."""
    record = {
        part: {path: asdict(leaf) for path, leaf in leaves.items()}
        for part, leaves in stored.tree.items()
    }
    write_json(step_directory / TREE_FILE, record)


def restore_state(
    step_directory: Path, like: Any, *, before_reading: Callable[[], None] | None = None
) -> Any:
    """Read a whole state into the structure, shardings and kinds of `like`.

    Args:
        before_reading: is called once paths, shapes and dtypes have been found to be equal.

    Raises:
        CheckpointError: paths, shapes or dtypes differ; the message lists them.
    """
    wanted = _parts(like)
    found = _read_tree(step_directory)
    _check_same(step_directory, _prefixed(_described(wanted)), _prefixed(found))
    if before_reading is not None:
        before_reading()
    values: dict[str, Any] = {}
    for part, leaves in wanted.items():
        values |= _prefixed({part: _read_store(step_directory / part, found[part], leaves)})
    return _rebuild(like, values)


def restore_params_only(step_directory: Path, like: Any) -> Any:
    """Read a checkpoint's parameters into `like`, a tree of the parameters alone.

    Floats that are stored in another float dtype, as frozen parameters may be, are converted.

    Raises:
        CheckpointError: as `restore_state`.
    """
    found = {PARAMS: _read_tree(step_directory).get(PARAMS, {})}
    leaves = {path: _as_stored(one, found[PARAMS].get(path)) for path, one in _flat(like).items()}
    wanted = {PARAMS: leaves}
    _check_same(step_directory, _prefixed(_described(wanted)), _prefixed(found))
    values = _read_store(step_directory / PARAMS, found[PARAMS], leaves)
    return jax.tree.map(lambda x, one: x.astype(one.dtype), _rebuild(like, values), like)


def _as_stored(leaf: Any, stored: Leaf | None) -> Any:
    """An abstract leaf in the float dtype that it is stored in, if it and that are floats."""
    if stored is None or stored.key_impl or stored.dtype == str(leaf.dtype):
        return leaf
    dtype = jnp.dtype(stored.dtype)
    if not all(jnp.issubdtype(one, jnp.floating) for one in (leaf.dtype, dtype)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=getattr(leaf, "sharding", None))


def parameter_digests(step_directory: Path, part: str = PARAMS) -> dict[str, str]:
    """Return path -> BLAKE3 of each parameter: its shape, its dtype and its bytes in C order.

    Equal parameters have equal digests, whatever mesh they were saved from and however Orbax laid
    them into files. Reads one block after the other, on this process alone and without any
    device; compares no file with its commit.

    Args:
        part: `training` digests what a state has besides its parameters.

    Raises:
        CheckpointError: a parameter cannot be read; the message names it.
    """
    leaves = _read_tree(step_directory).get(part, {})
    store = (step_directory / part).absolute()
    return {path: _digest_stored(store, path, leaf) for path, leaf in sorted(leaves.items())}


@dataclass(frozen=True)
class StoredArray:
    """An array of a committed checkpoint; `np.asarray` reads it, without any device.

    Args:
        store: the directory of the store that it is in.
        path: its path there.
        leaf: what it is.
        dtype: what it is read as: its own, or another float.
    """

    store: Path
    path: str
    leaf: Leaf
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.leaf.shape

    @property
    def nbytes(self) -> int:
        """Bytes of what is read."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Read it whole.

        Raises:
            CheckpointError: it cannot be read; the message names it.
        """
        del copy  # what is read is always new
        return self._read().astype(dtype or self.dtype, copy=False)

    def _read(self) -> np.ndarray[Any, Any]:
        if not self.leaf.is_stored:
            return np.zeros(self.shape, self.dtype)
        try:
            found: np.ndarray[Any, Any] = _open_stored(self.store, self.path).read().result()
        except (ValueError, OSError) as error:
            raise _unreadable(self.store, self.path, error) from error
        return found


def stored_arrays(step_directory: Path) -> dict[str, StoredArray]:
    """Return all arrays of a checkpoint, by their path in the whole state; none is read yet.

    Compares no file with its commit. Random keys are left out.
    """
    arrays: dict[str, StoredArray] = {}
    for part, leaves in _read_tree(step_directory).items():
        store = (step_directory / part).absolute()
        numbers = {path: leaf for path, leaf in leaves.items() if leaf.key_impl is None}
        found = {
            path: StoredArray(store, path, leaf, jnp.dtype(leaf.dtype))
            for path, leaf in numbers.items()
        }
        arrays |= _prefixed({part: found})
    return arrays


def describe(path: str, leaf: Any) -> Leaf:
    """Say what a leaf is: an array, a number, or an abstract one.

    Raises:
        CheckpointError: it is something else; the message names its path.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        # Only an array tells its implementation; of an abstract one the dtype is enough.
        impl = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else None
        return Leaf(tuple(leaf.shape), str(dtype), impl)
    if dtype is None:
        leaf = np.asarray(leaf)
    if leaf.dtype.kind in "OUSMm":
        raise CheckpointError(
            f"{path}: a checkpoint holds arrays and numbers, this is a {type(leaf).__name__} of "
            f"{leaf.dtype}; keep it in the cursor, or leave it out of the state."
        )
    return Leaf(tuple(leaf.shape), str(leaf.dtype))


def _handler(options: Any = None) -> Any:
    options = options or ocp.options.MultiprocessingOptions()
    # zarr3 without compression: float weights shrink by a few per cent and cost seconds.
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        use_compression=False,
        multiprocessing_options=options,
        type_handler_registry=_type_handlers(),
    )


def _type_handlers() -> Any:
    # By default Orbax compiles and runs a slice of each replicated array on every device.
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_MIN_REPLICA_SLICE_BYTES
    )
    numpy_handler = ocp.type_handlers.NumpyHandler
    # What `_storable` returns no one changes. TODO(orbax>=0.12): every version has this argument.
    has_copy_argument = "deepcopy_host_arrays" in inspect.signature(numpy_handler).parameters
    host_arrays = numpy_handler(**({"deepcopy_host_arrays": False} if has_copy_argument else {}))
    return ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, host_arrays), (jax.Array, arrays)
    )


def _flat(tree: Any) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = _path(keys)
        if path in leaves:
            raise CheckpointError(f"{path}: two leaves of the state have this path.")
        leaves[path] = leaf
    return leaves


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/") or "value"


def _parts(state: Any) -> dict[str, dict[str, Any]]:
    if isinstance(state, Mapping) and PARAMS in state:
        rest = {key: value for key, value in state.items() if key != PARAMS}
        return {PARAMS: _flat(state[PARAMS]), TRAINING: _flat(rest)}
    return {TRAINING: _flat(state)}


def _described(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Leaf]]:
    return {
        part: {path: describe(path, leaf) for path, leaf in leaves.items()}
        for part, leaves in parts.items()
    }


def _prefixed(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the parts into one map by the whole state's paths."""
    return {
        f"{PARAMS}/{path}" if part == PARAMS else path: value
        for part, leaves in parts.items()
        for path, value in leaves.items()
    }


def _rebuild(like: Any, values: Mapping[str, Any]) -> Any:
    def pick(keys: Any, _leaf: Any) -> Any:
        path = _path(keys)
        # A whole state's parameters are one leaf only if "params" is itself an array.
        return values[path] if path in values else values[f"{path}/value"]

    return jax.tree_util.tree_map_with_path(pick, like)


def _storable(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf
    # A copy: the caller may write into its array while this is still being saved.
    return np.array(leaf)


def _read_tree(step_directory: Path) -> dict[str, dict[str, Leaf]]:
    record = read_json(step_directory / TREE_FILE)
    return {
        part: {
            path: Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["key_impl"])
            for path, leaf in leaves.items()
        }
        for part, leaves in record.items()
    }


def _check_same(
    step_directory: Path, wanted: Mapping[str, Leaf], found: Mapping[str, Leaf]
) -> None:
    problems = []
    for path in sorted(set(wanted) | set(found)):
        expected, stored = wanted.get(path), found.get(path)
        if stored is None:
            problems.append(f"{path}: expected {expected}, the checkpoint has none")
        elif expected is None:
            problems.append(f"{path}: not expected, the checkpoint has {stored}")
        elif (expected.shape, expected.dtype) != (stored.shape, stored.dtype):
            problems.append(f"{path}: expected {expected}, found {stored}")
    if problems:
        shown = problems[:_NUM_MISMATCHES_IN_MESSAGE]
        if len(problems) > len(shown):
            shown.append(f"… and {len(problems) - len(shown)} more")
        raise CheckpointError(
            f"{step_directory}: the checkpoint is of another model or optimizer; restore it with "
            "the configuration that wrote it.\n  " + "\n  ".join(shown)
        )


def _read_store(store: Path, leaves: Mapping[str, Leaf], like: Mapping[str, Any]) -> dict[str, Any]:
    stored = {path: leaf for path, leaf in leaves.items() if leaf.is_stored}
    values: dict[str, Any] = {}
    if stored:
        arguments = {path: _restore_args(leaf, like[path]) for path, leaf in stored.items()}
        with ocp.Checkpointer(_handler()) as reader:
            values = reader.restore(
                store,
                args=ocp.args.PyTreeRestore(item=dict.fromkeys(stored, 0), restore_args=arguments),
            )
    return {path: _as_like(values.get(path), leaf, like[path]) for path, leaf in leaves.items()}


def _digest_stored(store: Path, path: str, leaf: Leaf) -> str:
    digest = blake3(canonical_json(asdict(leaf)), max_threads=blake3.AUTO)
    try:
        for block in _stored_blocks(store, path) if leaf.is_stored else ():
            # As bytes: NumPy's buffers know no bfloat16.
            digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    except (ValueError, OSError) as error:
        raise _unreadable(store, path, error) from error
    return digest.hexdigest()


def _unreadable(store: Path, path: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{store}: parameter {path} cannot be read: {error}.")


def _open_stored(store: Path, path: str) -> Any:
    base = {"driver": "file", "path": f"{store}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore}
    return tensorstore.open(spec, open=True, read=True).result()


def _stored_blocks(store: Path, path: str) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a stored array in blocks of whole chunks along its first dim."""
    array = _open_stored(store, path)
    if not array.shape:
        yield array.read().result()
        return
    num_chunk_rows = array.chunk_layout.read_chunk.shape[0]
    chunk_bytes = num_chunk_rows * math.prod(array.shape[1:]) * array.dtype.numpy_dtype.itemsize
    num_rows = num_chunk_rows * max(1, _BLOCK_BYTES // chunk_bytes)
    for start in range(0, array.shape[0], num_rows):
        yield array[start : min(start + num_rows, array.shape[0])].read().result()


def _restore_args(leaf: Leaf, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    if sharding is None or leaf.key_impl is not None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=sharding, global_shape=leaf.shape, dtype=like.dtype
    )


def _as_like(value: Any, leaf: Leaf, like: Any) -> Any:
    """Turn what was stored into what `like` is: a number, a NumPy or JAX array, a random key.

    Args:
        value: None where the leaf has no elements and was not stored.
    """
    if leaf.key_impl is not None:
        return _as_keys(value, leaf, leaf.key_impl, like)
    if value is None:
        value = np.zeros(leaf.shape, like.dtype)
    if isinstance(like, bool | int | float | complex):
        return type(like)(value.item())
    if isinstance(like, np.ndarray | np.generic) or isinstance(value, jax.Array):
        return value
    return jax.device_put(value, like.sharding)


def _as_keys(value: Any, leaf: Leaf, impl: str, like: Any) -> Any:
    if value is None:
        keys = jnp.broadcast_to(jax.random.key(0, impl=impl), leaf.shape)
    else:
        keys = jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    return jax.device_put(keys, like.sharding)
