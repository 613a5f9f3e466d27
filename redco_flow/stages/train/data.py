"""What a training reads: the examples as rows of batches, padded, in buckets or packed.

Everything here follows from the dataset and the settings, by the lengths of the examples alone,
so every process and every attempt arranges them alike.
Dims in this file: N examples, D dims of a row (1 for one sequence, 2 for source and target).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from redco_flow.engine.data.batches import CollateFn, Examples, read_rows
from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.engine.data.packing import PackedExamples
from redco_flow.recipes.recipe import Recipe
from redco_flow.stages.artifacts.dataset import (
    DatasetArtifact,
    DatasetSummary,
)
from redco_flow.stages.artifacts.dataset import Examples as Split
from redco_flow.stages.length_bucketing import lengths_of
from redco_flow.stages.train.config import Config

if TYPE_CHECKING:
    from redco_flow.recipes.recipe import Lengths


logger = logging.getLogger(__name__)

COLUMNS = ("row_id", "source_ids", "target_ids")
_WIDTH_MULTIPLE = 8


def columns_of(summary: DatasetSummary) -> tuple[str, ...]:
    """Return what training reads of an encoded example: labels too, where there are some."""
    return (*COLUMNS, "references") if summary.are_labelled else COLUMNS


Validation = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class TrainingData:
    """Rows to train and to evaluate on, and how they become arrays.

    Args:
        examples: of the training split; where packed, lists of them.
        validation: the same of the validation split; None where there is none.
        collate_fn: of both.
        bucketing: of the training's batches.
        padding: share of the positions of an epoch's batches that hold no token.
    """

    examples: Examples
    validation: Examples | None
    collate_fn: CollateFn
    bucketing: Bucketing | None
    padding: float

    def widest_batch(self) -> Mapping[str, Any]:
        """Return one example collated as wide as a training batch can be."""
        collate_fn = self.bucketing.collate_fns[-1] if self.bucketing else self.collate_fn
        return collate_fn(read_rows(self.examples, np.zeros(1, np.int64)))


@dataclass(frozen=True)
class _Lengths:
    """How wide a row each example needs, (N, D)."""

    train: Lengths
    validation: Lengths

    @property
    def widths(self) -> Lengths:
        """Of a row that every example fits, (D,)."""
        longest: Lengths = np.concatenate([self.train, self.validation]).max(axis=0)
        return -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE

    def padding(self, num_positions: int) -> float:
        """Share of an epoch's positions that the training examples do not fill."""
        return 1 - float(self.train.sum()) / num_positions


def read_training_data(
    dataset: DatasetArtifact, recipe: Recipe, config: Config, validation: Validation | None
) -> TrainingData:
    """Arrange a dataset's examples as `config.batching` says.

    Raises:
        DataError: an example is longer than a packed row.
        ValueError: the recipe does not pack.
    """
    split = dataset.split("train", columns_of(dataset.summary))
    if not recipe.has_widths:
        return TrainingData(split, validation, recipe.collate_fn, None, 0.0)
    lengths = _Lengths(
        recipe.widths_of(split.lengths), recipe.widths_of(partial(lengths_of, validation or ()))
    )
    batching = config.batching
    if batching.type == "packed":
        arranged = _packed(split, validation, lengths, recipe, config)
    elif batching.type == "bucketed":
        arranged = _bucketed(split, validation, lengths, recipe, config)
    else:
        arranged = _padded(split, validation, lengths, recipe, config)
    logger.info("batches are %s: %.1f%% of them is padding", batching.type, 100 * arranged.padding)
    return arranged


def _num_rows(num_examples: int, batch_size: int) -> int:
    """Rows of an epoch's batches, of which the last is filled up."""
    return -(-num_examples // batch_size) * batch_size


def _padded(
    split: Split,
    validation: Validation | None,
    lengths: _Lengths,
    recipe: Recipe,
    config: Config,
) -> TrainingData:
    collate_fn = recipe.collate_wide(lengths.widths.tolist())
    num_rows = _num_rows(len(split), config.global_batch_size)
    share = lengths.padding(num_rows * int(lengths.widths.sum()))
    return TrainingData(split, validation, collate_fn, None, share)


def _bucketed(
    split: Split,
    validation: Validation | None,
    lengths: _Lengths,
    recipe: Recipe,
    config: Config,
) -> TrainingData:
    num_buckets = config.batching.num_buckets
    buckets = choose_buckets(lengths.train, num_buckets, multiple=_WIDTH_MULTIPLE)
    num_batches = buckets.batches_per_bucket(config.global_batch_size)
    widths = [sum(width) for width in buckets.widths]
    num_positions = config.global_batch_size * int(np.dot(num_batches, widths))
    bucketing = Bucketing(buckets, tuple(map(recipe.collate_wide, buckets.widths)))
    collate_fn = recipe.collate_wide(lengths.widths.tolist())
    return TrainingData(split, validation, collate_fn, bucketing, lengths.padding(num_positions))


def _packed(
    split: Split,
    validation: Validation | None,
    lengths: _Lengths,
    recipe: Recipe,
    config: Config,
) -> TrainingData:
    if recipe.collate_packed is None:
        raise ValueError(f"recipe '{config.recipe}' cannot put several examples into one row.")
    width = config.batching.packed_length or int(lengths.widths[0])
    rows = PackedExamples(split, lengths.train[:, 0], width)
    packed_validation = None
    if validation is not None:
        packed_validation = PackedExamples(validation, lengths.validation[:, 0], width)
    share = lengths.padding(_num_rows(len(rows), config.global_batch_size) * width)
    return TrainingData(rows, packed_validation, recipe.collate_packed(width), None, share)
