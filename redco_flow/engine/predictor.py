"""Predict with a model on a mesh: every example once, in input order.

Knows how examples become batches and batches become predictions again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.batches import Batch, CollateFn, EvalBatches, Examples
from redco_flow.engine.data.length_buckets import Bucketing
from redco_flow.engine.data.order import check_multiple, check_positive, fetch_late, put_early
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.progress import RowLines
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.engine.sharding.storage import PaddedStorage
from redco_flow.engine.step.compiled import on_unpadded_params
from redco_flow.engine.step.step import example_keys

# (params, batch, rngs [B]) -> a tree of arrays with leading dim B
PredFn = Callable[[Any, dict[str, jax.Array], jax.Array], Any]
# a tree of NumPy arrays, padding removed -> one prediction per row
OutputFn = Callable[[Any], Sequence[Any]]
# (examples done, examples in all)
ProgressFn = Callable[[int, int], None]


class ActFn(Protocol):
    """The function that `Predictor.bind` returns."""

    def __call__(self, batch: Mapping[str, Any], *, seed: int | None = None) -> Any:
        """Return predictions of a batch, as NumPy arrays."""


class Predictor:
    """A prediction function on a mesh.

    Args:
        deployer: where to run.
        collate_fn: examples -> dict of NumPy arrays whose leading dim is their number.
        pred_fn: (params, batch, rngs) -> a tree of arrays with leading dim B. Each example's key
            depends on the seed and its place in the input only.
        output_fn: that tree as NumPy arrays, padding removed -> one prediction per row; by
            default each row of the tree.
        sharding_rules: the trainer's, or `deployer.get_sharding_rules(params, function, *inputs)`;
            with one model shard not needed.
        batch_size: examples at once over all devices.
        seed: of `rngs`; the deployer's by default.

    Raises:
        ValueError: the batch does not divide; the message lists the nearest sizes that do.
    """

    def __init__(
        self,
        deployer: Deployer,
        *,
        collate_fn: CollateFn,
        pred_fn: PredFn,
        output_fn: OutputFn | None = None,
        sharding_rules: ShardingRules | None = None,
        batch_size: int,
        seed: int | None = None,
    ) -> None:
        check_positive("batch_size", batch_size)
        shards = deployer.num_data_shards
        check_multiple("batch_size", batch_size, shards, f"{shards} data shards")
        self.deployer = deployer
        self.batch_size = batch_size
        self.seed = deployer.seed if seed is None else seed
        self._collate_fn = collate_fn
        self._output_fn = output_fn or _rows_of
        self._pred_fn = pred_fn
        self._rules = sharding_rules
        self._storage: PaddedStorage | None = None

    def predict(
        self,
        examples: Examples,
        params: Any,
        *,
        bucketing: Bucketing | None = None,
        on_progress: ProgressFn | None = None,
        verb: str = "predicted",
        seed: int | None = None,
    ) -> list[Any]:
        """Return one prediction per example, in their order.

        Args:
            examples: any sequence; an empty one gives an empty list.
            params: arrays; laid out by the rules if they are not yet.
            bucketing: batch examples of like length together, by its functions instead of
                collate_fn; there is one compilation per bucket.
            on_progress: called after each batch with (examples done, examples in all).
            verb: what the lines in the log call it.
            seed: of `rngs`; the predictor's by default. Another one recompiles nothing.

        Raises:
            ValueError: pred_fn or output_fn gave another number of rows than the batch has.
            DataError: rows cannot be read or collated, or the buckets are of other examples.
        """
        if not len(examples):
            return []
        params = self._store(params)
        predictions: dict[int, Any] = {}
        lines = RowLines(verb, len(examples))
        for rows, found in fetch_late(self._dispatch(examples, params, bucketing, seed)):
            predictions.update(zip(rows.tolist(), self._outputs(found, len(rows)), strict=True))
            lines.hear_rows(len(predictions))
            if on_progress is not None:
                on_progress(len(predictions), len(examples))
        return [predictions[row] for row in range(len(examples))]

    def bind(self, params: Any) -> ActFn:
        """Lay parameters out once, and return a function that predicts a batch at once.

        For acting in an environment, where a batch is small and follows from the predictions of
        the one before: arrays go in and come out, nothing is read ahead or told to the log.

            act = predictor.bind(trainer.state["params"])
            actions = act({"observation": observations}, seed=step)

        Args:
            params: arrays. A trainer's are valid until its next step, and so is the function.

        Returns:
            (batch, seed) -> what pred_fn returns, as NumPy arrays. `batch` is as from collate_fn,
            of any number of rows: `batch_size` of them are taken at once, filled up with the
            first, so that one program does for all. Every process gives, and gets, all rows.
            `seed` is that of `rngs`, by default the predictor's.

        Raises:
            ValueError: when called: there are no rows, or arrays of different numbers of them.
        """
        stored = self._store(params)

        def act(batch: Mapping[str, Any], *, seed: int | None = None) -> Any:
            on_devices = self._put_seed(seed)
            parts = []
            for rows in _parts(_num_rows(batch), self.batch_size):
                arrays, part = self._put_rows(batch, rows)
                parts.append(jax.device_get(self._step(stored, on_devices, arrays, part)))
            joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
            return jax.tree.map(lambda array: array[: _num_rows(batch)], joined)

        return act

    def _put_rows(self, batch: Mapping[str, Any], rows: NDArray[np.int32]) -> Any:
        """Put these rows of arrays, and their numbers, on the devices."""
        process = self.deployer.data_process
        size = len(rows) // process.count
        own = rows[process.index * size : (process.index + 1) * size]
        return self.deployer.put_rows((jax.tree.map(lambda x: np.asarray(x)[own], batch), own))

    def _put_seed(self, seed: int | None) -> jax.Array:
        number = np.uint32(self.seed if seed is None else seed)
        found: jax.Array = jax.device_put(number, self.deployer.named_sharding())
        return found

    def _store(self, params: Any) -> Any:
        """Lay parameters out as the step takes them; the first ones say what it looks like."""
        rules = self._rules = self._rules or self.deployer.get_sharding_rules(params)
        params = self.deployer.shard_params(params, rules)
        if self._storage is None:
            storage = self._storage = self.deployer.params_storage(params, rules)

            pred_fn = on_unpadded_params(self._pred_fn, storage, is_trained=False)

            def step(params: Any, seed: jax.Array, batch: Any, rows: jax.Array) -> Any:
                return pred_fn(storage.unpad(params), batch, example_keys(seed, 0, rows))

            # Replicated results can be read by every process.
            everywhere = self.deployer.named_sharding()
            self._step = self.deployer.jit(step, out_shardings=everywhere)
            self._to_storage = jax.jit(storage.to_storage, out_shardings=storage.stored_sharding)
        return params if self._storage.is_exact else self._to_storage(params)

    def _dispatch(
        self, examples: Examples, params: Any, bucketing: Bucketing | None, seed: int | None
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Yield each batch's examples, without what only fills it up, and its result."""
        process = self.deployer.data_process
        source = EvalBatches(
            examples,
            self._collate_fn,
            batch_size=self.batch_size,
            bucketing=bucketing,
            process_index=process.index,
            num_processes=process.count,
        )
        on_devices = self._put_seed(seed)

        def put(batch: Batch) -> tuple[NDArray[np.int64], Any]:
            rows, mask = source.sampler.rows(batch.step)
            part = batch.rows.astype(np.int32)
            return rows[mask > 0], self.deployer.put_rows((batch.arrays, part))

        with iter(source) as batches:
            for rows, (arrays, part) in put_early(batches, put):
                yield rows, self._step(params, on_devices, arrays, part)

    def _outputs(self, found: Any, num_rows: int) -> list[Any]:
        """Return the predictions of a batch's first rows, which are those that count."""
        for leaf in jax.tree.leaves(found):
            if np.shape(leaf)[:1] != (self.batch_size,):
                raise ValueError(
                    f"pred_fn gave an array of shape {np.shape(leaf)}; its leading dim must be "
                    f"the batch's, {self.batch_size}."
                )
        outputs = list(self._output_fn(jax.tree.map(lambda x: x[:num_rows], found)))
        if len(outputs) != num_rows:
            raise ValueError(f"output_fn gave {len(outputs)} predictions for {num_rows} rows.")
        return outputs


def _num_rows(batch: Mapping[str, Any]) -> int:
    """Return the leading dim of all arrays."""
    sizes = {name: len(jax.tree.leaves(value)[0]) for name, value in batch.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(f"the arrays of a batch need one number of rows, at least 1: {sizes}.")
    return next(iter(sizes.values()))


def _parts(num_rows: int, batch_size: int) -> Iterator[NDArray[np.int32]]:
    """Yield all rows, [batch_size] at a time; the last ones are filled up with their first."""
    for start in range(0, num_rows, batch_size):
        rows = np.full(batch_size, start, np.int32)
        count = min(batch_size, num_rows - start)
        rows[:count] += np.arange(count, dtype=np.int32)
        yield rows


def _rows_of(found: Any) -> list[Any]:
    count = len(jax.tree.leaves(found)[0])
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(count)]
