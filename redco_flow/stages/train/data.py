"""Read examples of a training as rows of batches: padded, bucketed, packed or windows.

Everything here follows from the dataset and the settings, by the lengths of the examples alone,
so every process and every attempt arranges them alike.
Dims in this file: N examples, D dims of a row (1 for one sequence, 2 for source and target).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from redco_flow.engine.data.batches import CollateFn, Examples, read_rows
from redco_flow.engine.data.length_buckets import Bucketing, choose_buckets
from redco_flow.engine.data.order import BatchSampler, Mixture, Part, RowOrder
from redco_flow.engine.data.packing import PackedExamples
from redco_flow.engine.errors import DataError
from redco_flow.recipes.recipe import Recipe
from redco_flow.stages.artifacts.arrow_split import ArrowSplit
from redco_flow.stages.artifacts.arrow_split import Examples as Split
from redco_flow.stages.artifacts.dataset import PART, DatasetArtifact, DatasetSummary
from redco_flow.stages.length_bucketing import lengths_of
from redco_flow.stages.train.config import Config

if TYPE_CHECKING:
    from redco_flow.recipes.recipe import Lengths


class TokenStream:
    """The tokens of many texts one after the other, read where they are asked for.

    Args:
        chunks: int32 arrays, mapped ones too.
    """

    def __init__(self, chunks: Iterable[NDArray[np.int32]]) -> None:
        self._chunks = [chunk for chunk in chunks if len(chunk)]
        self._ends = np.cumsum([0, *map(len, self._chunks)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return a copy of the tokens from `start` to `stop`, which are in the stream."""
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        parts = []
        for chunk, begin in zip(self._chunks[first:], self._ends[first:], strict=False):
            if begin >= stop:
                break
            parts.append(chunk[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True)
class Span:
    """A part of a stream: tokens that windows may have together.

    Args:
        weight: share of the windows that are drawn, where parts are mixed.
    """

    name: str
    start: int
    num_tokens: int
    weight: float = 1.0


class TokenWindows(Sequence[dict[str, Any]]):
    """Windows as examples.

    Args:
        length: tokens that a window predicts; it holds one more, which stands before them.
        at_every_token: whether a window begins at each token that has `length` ones behind it;
            else at each `length`-th, so that windows share no token but that one, and the last
            window of a span may be shorter.

    Raises:
        DataError: a span has no room for a window.
    """

    def __init__(
        self, stream: TokenStream, spans: Sequence[Span], length: int, *, at_every_token: bool
    ) -> None:
        self._stream, self._spans, self._length = stream, tuple(spans), length
        self._stride = 1 if at_every_token else length
        least = length + 1 if at_every_token else 2
        for span in spans:
            if span.num_tokens < least:
                raise DataError(
                    f"{span.name} has {span.num_tokens} tokens, and a window takes {least} at "
                    "least: lower batching.window_length."
                )
        # The last token begins no window.
        room = [span.num_tokens - (length if at_every_token else 1) for span in spans]
        self._ends = np.cumsum([0, *(-(-tokens // self._stride) for tokens in room)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}.")
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        span = self._spans[number]
        start = span.start + self._stride * (int(index) - int(self._ends[number]))
        ids = self._stream.read(start, min(start + self._length + 1, span.start + span.num_tokens))
        return {
            "row_id": f"window at token {start}",
            "source_ids": ids[:1],
            "target_ids": ids[1:],
        }

    @property
    def num_predicted(self) -> int:
        """Tokens that an epoch of windows predicts, where they do not overlap."""
        return sum(span.num_tokens - 1 for span in self._spans)

    def parts(self) -> list[Part]:
        """Return which windows are of which span; an epoch has each token about once."""
        return [
            Part(
                span.name,
                start=int(start),
                num_rows=int(end - start),
                epoch_length=-(-(span.num_tokens - 1) // self._length),
                weight=span.weight,
            )
            for span, start, end in zip(self._spans, self._ends, self._ends[1:], strict=False)
        ]


def stream_of(examples: Iterable[Mapping[str, Any]]) -> TokenStream:
    """Return the tokens of examples of plain texts, in their order."""
    return TokenStream(example["target_ids"] for example in examples)


logger = logging.getLogger(__name__)

COLUMNS = ("row_id", "source_ids", "target_ids")
_WIDTH_MULTIPLE = 8


def columns_of(summary: DatasetSummary) -> tuple[str, ...]:
    """Return what training reads of an encoded example: labels too, where there are some."""
    labels = ("references",) if summary.are_labelled else ()
    return (*COLUMNS, *(summary.id_columns or ()), *labels)


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
        order: in which examples are drawn; None: each once per epoch.
    """

    examples: Examples
    validation: Examples | None
    collate_fn: CollateFn
    bucketing: Bucketing | None
    padding: float
    order: RowOrder | None = None

    def steps_per_epoch(self, config: Config) -> int:
        """Return how many steps count as an epoch."""
        return self.sampler(config).steps_per_epoch

    def sampler(self, config: Config) -> BatchSampler:
        """Return the rows of each training batch."""
        buckets = self.bucketing.buckets if self.bucketing else None
        size = config.global_batch_size
        return BatchSampler(len(self.examples), size, config.seed, buckets, self.order)

    def row_settings(self, config: Config) -> dict[str, Any]:
        """Return the settings that decide which examples or tokens each row has, as JSON."""
        found = config.batching.model_dump(mode="json", exclude={"num_buckets"})
        if isinstance(self.examples, PackedExamples):
            found["packed_length"] = self.examples.row_length
        return found

    def first_batch(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return one example as the recipe collates it by itself."""
        (found,) = read_rows(self.examples, np.zeros(1, np.int64))
        return recipe.collate_fn(found[:1] if isinstance(found, list) else [found])

    def widest_batch(self) -> Mapping[str, Any]:
        """Return one example collated as wide as a training batch can be."""
        collate_fn = self.bucketing.collate_fns[-1] if self.bucketing else self.collate_fn
        return collate_fn(read_rows(self.examples, np.zeros(1, np.int64)))


@dataclass(frozen=True)
class _Lengths:
    """Required widths of a row for each example, (N, D)."""

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
        DataError: an example is longer than a packed row, or a split shorter than a window.
        ValueError: the recipe does not pack, or windows are to be cut from pairs.
    """
    split = dataset.split("train", columns_of(dataset.summary))
    if not recipe.has_widths:
        _no_weights(config)
        return TrainingData(split, validation, recipe.collate_fn, None, 0.0)
    parts = _mixed_parts(dataset, config)
    if config.batching.type == "windows":
        return _windows(split, dataset.summary, parts, validation, recipe, config)
    lengths = _Lengths(
        recipe.widths_of(split.lengths), recipe.widths_of(partial(lengths_of, validation or ()))
    )
    batching = config.batching
    if batching.type == "packed":
        arranged = _packed(split, parts, validation, lengths, recipe, config)
    elif batching.type == "bucketed":
        if parts:
            raise ValueError(
                "batches of a mixture hold examples of every length, which buckets keep apart: use "
                "batching.type padded or packed."
            )
        arranged = _bucketed(split, validation, lengths, recipe, config)
    else:
        arranged = _padded(split, parts, validation, lengths, recipe, config)
    logger.info("batches are %s: %.1f%% of them is padding", batching.type, 100 * arranged.padding)
    return arranged


@dataclass(frozen=True)
class _MixedPart:
    """Training rows that stand side by side, and their weight."""

    name: str
    num_rows: int
    weight: float


def _no_weights(config: Config) -> None:
    """Refuse weights of a dataset that is no mixture."""
    if config.mixture_weights:
        raise ValueError(
            "mixture_weights are of the datasets of a data.mixture, and the dataset is of one."
        )


def _mixed_parts(dataset: DatasetArtifact, config: Config) -> list[_MixedPart]:
    """Return the parts of a mixture in the order of their rows; none where nothing is mixed."""
    weights = dataset.summary.parts
    if not weights:
        _no_weights(config)
        return []
    asked = config.mixture_weights or weights
    if set(asked) != set(weights):
        raise ValueError(
            f"mixture_weights names {', '.join(asked)}, and the mixture is of "
            f"{', '.join(weights)}: give each of them a weight."
        )
    split = dataset.split("train", [PART])
    assert isinstance(split, ArrowSplit), "rows as they are have no parts"
    runs = split.runs(PART)
    assert len({name for name, _ in runs}) == len(runs), "a part's rows stand side by side"
    if missing := [name for name in weights if name not in dict(runs)]:
        raise ValueError(f"the mixture's part '{missing[0]}' has no training rows.")
    return [_MixedPart(name, count, asked[name]) for name, count in runs]


def _mixture(parts: Sequence[_MixedPart], counts: Sequence[int]) -> Mixture | None:
    """Return the order of a mixture whose parts have these numbers of rows."""
    if not parts:
        return None
    starts = np.cumsum([0, *counts]).tolist()
    return Mixture(
        [
            Part(part.name, start, count, count, part.weight)
            for part, start, count in zip(parts, starts, counts, strict=False)
        ]
    )


def _spans(split: ArrowSplit, parts: Sequence[_MixedPart], num_tokens: int) -> list[Span]:
    """Return the tokens of each part of the training split."""
    if not parts:
        return [Span("the training split", 0, num_tokens)]
    tokens = np.concatenate([[0], np.cumsum(split.lengths("target_ids"))])
    rows = np.cumsum([0, *(part.num_rows for part in parts)])
    starts = tokens[rows].tolist()
    return [
        Span(part.name, start, stop - start, part.weight)
        for part, start, stop in zip(parts, starts, starts[1:], strict=False)
    ]


def _windows(
    split: Split,
    summary: DatasetSummary,
    parts: Sequence[_MixedPart],
    validation: Validation | None,
    recipe: Recipe,
    config: Config,
) -> TrainingData:
    if not summary.is_plain_text:
        raise ValueError(
            "batching.type is windows, which are cut from plain texts, and the dataset is of "
            "sources with targets: preprocess with data.text_key, or use type packed."
        )
    length, is_random = config.batching.window_length, config.batching.random_offsets
    assert length is not None  # the Config sees to it
    assert isinstance(split, ArrowSplit), "plain texts are encoded"

    stream = TokenStream(split.flat("target_ids"))
    spans = _spans(split, parts, len(stream))
    examples = TokenWindows(stream, spans, length, at_every_token=is_random)
    order = Mixture(examples.parts()) if is_random or parts else None
    of_validation = None
    if validation is not None:
        held_out = stream_of(validation)
        spans = [Span("the validation split", 0, len(held_out))]
        of_validation = TokenWindows(held_out, spans, length, at_every_token=False)
    # With the tokens that the recipe puts before each row.
    sizes = {"source_ids": [1], "target_ids": [length]}
    longest = int(recipe.widths_of(lambda name: np.array(sizes[name]))[0, 0])
    width = -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    collate_fn = recipe.collate_wide([width])
    padding = 1 - length / width
    if not is_random:
        num_rows = _num_rows(len(examples), config.global_batch_size)
        padding = 1 - examples.num_predicted / (num_rows * width)
    logger.info("%d tokens in windows of %d", len(stream), length)
    return TrainingData(examples, of_validation, collate_fn, None, padding, order)


def _num_rows(num_examples: int, batch_size: int) -> int:
    """Rows of an epoch's batches, of which the last is filled up."""
    return -(-num_examples // batch_size) * batch_size


def _padded(
    split: Split,
    parts: Sequence[_MixedPart],
    validation: Validation | None,
    lengths: _Lengths,
    recipe: Recipe,
    config: Config,
) -> TrainingData:
    collate_fn = recipe.collate_wide(lengths.widths.tolist())
    num_rows = _num_rows(len(split), config.global_batch_size)
    share = lengths.padding(num_rows * int(lengths.widths.sum()))
    order = _mixture(parts, [part.num_rows for part in parts])
    return TrainingData(split, validation, collate_fn, None, share, order)


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
    parts: Sequence[_MixedPart],
    validation: Validation | None,
    lengths: _Lengths,
    recipe: Recipe,
    config: Config,
) -> TrainingData:
    if recipe.collate_packed is None:
        raise ValueError(f"recipe '{config.recipe}' cannot put several examples into one row.")
    width = config.batching.packed_length or int(lengths.widths[0])
    num_examples = [part.num_rows for part in parts]
    rows = PackedExamples(split, lengths.train[:, 0], width, parts=num_examples)
    packed_validation = None
    if validation is not None:
        packed_validation = PackedExamples(validation, lengths.validation[:, 0], width)
    share = lengths.padding(_num_rows(len(rows), config.global_batch_size) * width)
    order = _mixture(parts, rows.rows_per_part)
    return TrainingData(rows, packed_validation, recipe.collate_packed(width), None, share, order)
