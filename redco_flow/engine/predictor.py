"""Predict with a model on a mesh: every example once, in input order.

Knows how examples become batches and batches become predictions again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.batches import Batch, CollateFn, EvalBatches, Examples
from redco_flow.engine.data.layout import check_multiple, check_positive, fetch_late, put_early
from redco_flow.engine.data.length_buckets import Bucketing
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
# (examples, seed of rngs) -> one prediction per example
ActFn = Callable[..., list[Any]]
# (examples done, examples in all)
ProgressFn = Callable[[int, int], None]


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
            seed: of `rngs`; the predictor's by default. Another one compiles nothing anew.

        Raises:
            ValueError: pred_fn or output_fn gave another number of rows than the batch has.
            DataError: rows cannot be read or collated, or the buckets are of other examples.
        """
        if not len(examples):
            return []
        params = self._store(params)
        predictions: dict[int, Any] = {}
        lines = RowLines(verb, len(examples))
        source = self._source(examples, bucketing)
        with iter(source) as batches:
            for rows, found in fetch_late(self._dispatch(source, batches, params, seed)):
                predictions.update(zip(rows.tolist(), self._outputs(found, len(rows)), strict=True))
                lines.hear_rows(len(predictions))
                if on_progress is not None:
                    on_progress(len(predictions), len(examples))
        return [predictions[row] for row in range(len(examples))]

    def bind(self, params: Any) -> ActFn:
        """Lay parameters out once, and return a function that predicts with them at once.

        For acting in an environment, where every batch is small and follows from the last one's
        predictions: a call reads in this thread, starts none, and writes no lines to the log. It
        compiles for `batch_size` alone, up to which fewer examples are filled.

            act = predictor.bind(trainer.state["params"])
            actions = act(observations, seed=step)

        Args:
            params: arrays. A trainer's are valid until its next step, and so is the function.

        Returns:
            (examples, seed=None) -> one prediction per example, as `predict` does, with the same
            errors.
        """
        stored = self._store(params)

        def act(examples: Examples, seed: int | None = None) -> list[Any]:
            if not len(examples):
                return []
            source = self._source(examples, None)
            batches = map(source.batch, range(len(source)))
            found = fetch_late(self._dispatch(source, batches, stored, seed))
            return [one for rows, batch in found for one in self._outputs(batch, len(rows))]

        return act

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

    def _source(self, examples: Examples, bucketing: Bucketing | None) -> EvalBatches:
        process = self.deployer.data_process
        return EvalBatches(
            examples,
            self._collate_fn,
            batch_size=self.batch_size,
            bucketing=bucketing,
            process_index=process.index,
            num_processes=process.count,
        )

    def _dispatch(
        self, source: EvalBatches, batches: Iterable[Batch], params: Any, seed: int | None
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Yield each batch's examples, without what only fills it up, and its result."""
        number = np.uint32(self.seed if seed is None else seed)
        on_devices = jax.device_put(number, self.deployer.named_sharding())

        def put(batch: Batch) -> tuple[NDArray[np.int64], Any]:
            rows, mask = source.sampler.rows(batch.step)
            part = batch.rows.astype(np.int32)
            return rows[mask > 0], self.deployer.put_rows((batch.arrays, part))

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


def _rows_of(found: Any) -> list[Any]:
    count = len(jax.tree.leaves(found)[0])
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(count)]
