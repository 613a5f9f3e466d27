"""The dataset artifact, for the stages that read one.

`dataset.json` (the summary), Arrow files, each with one split's share of a block of the raw
rows, and `tokenizer/` in Hugging Face's format. Every text is kept beside its ids, so that a
prediction needs nothing else. A dataset for a recipe that encodes nothing has rows as they are, and
no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError
from redco_flow.metrics.confusion import ClassNames
from redco_flow.recipes.recipe import Class, TokenLengths
from redco_flow.records import read_json
from redco_flow.stages.artifacts.arrow_split import (
    BYTES,
    IDS,
    TEXT,
    TEXTS,
    Added,
    ArrowSplit,
    Examples,
    RowSplit,
)
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.tracking.dataset_rows import SUMMARY_FILE

FORMAT = 3
TOKENIZER_FOLDER = "tokenizer"
_PADDING_MULTIPLE = 8
COLUMNS: Mapping[str, str] = {
    "row_id": TEXT,
    "source": TEXT,
    "references": TEXTS,
    "source_ids": IDS,
    "target_ids": IDS,
}
SOURCE_IDS = "source_ids"
ROW_COLUMNS: Mapping[str, str] = {"row_id": TEXT, "row": BYTES}
PART = "part"


def columns_with(*, parts: bool) -> Mapping[str, str]:
    """Return the columns of encoded texts, whose rows may say their part of the data."""
    return {**COLUMNS, PART: TEXT} if parts else COLUMNS


@dataclass(frozen=True)
class DatasetSummary:
    """`dataset.json`.

    Args:
        recipe: whose `encode` made the ids.
        splits: per split: rows and references, and of both sides: tokens, texts that were cut,
            and the longest in tokens.
        files: per split: its Arrow files, in order.
        skipped_rows: rows left out, by reason: bad ones that the pipeline allows, and those of a
            curation.
        tokenizer: digest, vocab_size, pad_id, eos_id; and of one that was fetched `files`, the
            digest of what it was loaded from.
        most_frequent_target: what a model that ignores its input would say: text (or number),
            count, and the number of training rows it was counted among; empty where unknown.
        target: of rows as they are: the column that predictions are compared with, "" for none;
            None of texts.
        classes: of a recipe whose targets are classes: their names, of which the first is number 0.
        classes_are_ordered: whether the data or the pipeline give the classes in this order.
        mean_target: of the training rows, where targets are numbers.
        parts: whose rows say which part of the data they are of: the weights of a mixture, by name,
            or empty where a field of the data says it; None where the rows say nothing.
        id_columns: further columns of ids, beside those of source and target.
    """

    recipe: str
    source_prefix: str
    source_suffix: str
    max_source_length: int
    max_target_length: int
    splits: Mapping[str, Mapping[str, int]]
    files: Mapping[str, Sequence[str]]
    skipped_rows: Mapping[str, int]
    tokenizer: Mapping[str, Any]
    most_frequent_target: Mapping[str, Any]
    format: int = FORMAT
    target: str | None = None
    classes: Sequence[Class] | None = None
    classes_are_ordered: bool | None = None
    mean_target: float | None = None
    parts: Mapping[str, float] | None = None
    id_columns: Sequence[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record; that of texts says nothing of a target column, nor of classes."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @property
    def class_names(self) -> ClassNames | None:
        """The classes, in the form that metrics take; None of other targets."""
        return ClassNames.recorded(self.classes, are_ordered=self.classes_are_ordered)

    @property
    def is_of_rows(self) -> bool:
        """Whether the examples are rows as they are, without token ids."""
        return self.target is not None

    @property
    def has_ids(self) -> bool:
        """Whether the examples have token ids, those of rows as they are included."""
        counted = (key for counts in self.splits.values() for key in counts)
        return not self.is_of_rows or "longest_row" in counted

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer: that of encoded texts, or of a column of rows."""
        return bool(self.tokenizer) or not self.is_of_rows

    @property
    def are_labelled(self) -> bool:
        """Whether the targets of encoded texts are classes or numbers."""
        is_known = self.classes is not None or self.mean_target is not None
        return is_known and not self.is_of_rows

    def references_of(self, example: Mapping[str, Any]) -> list[Any]:
        """Return what an encoded example is to be answered with: texts, classes or numbers."""
        texts = example["references"]
        if not self.are_labelled:
            return list(texts)
        if self.classes is None:
            return [float(text) for text in texts]
        return [self._classes_by_text[text] for text in texts]

    @cached_property
    def _classes_by_text(self) -> dict[str, Class]:
        return {str(name): name for name in self.classes or ()}

    def lengths(self, splits: Iterable[str] | None = None) -> tuple[int, int]:
        """Return what batches are padded to: sources and targets in tokens.

        Of rows as they are the second number is of both, and of rows without token ids it is 0.

        Args:
            splits: of the sources; None: of all.
        """
        if self.is_of_rows:
            return 0, self.padded_length("row") if self.has_ids else 0
        return self.padded_length("source", splits), self.padded_length("target")

    @property
    def is_plain_text(self) -> bool:
        """Whether the examples are texts without a source."""
        return not self.is_of_rows and not any(
            counts["longest_source"] for counts in self.splits.values()
        )

    @property
    def answer_length(self) -> int:
        """The most tokens that a text to be generated has, rounded up to a multiple of 8."""
        longest = [counts.get("longest_answer", 0) for counts in self.splits.values()]
        return _rounded_up(max(longest)) or self.padded_length("target")

    def padded_length(self, side: str, splits: Iterable[str] | None = None) -> int:
        """Return what batches are padded to: the longest text, rounded up to a multiple of 8.

        Args:
            side: source or target; of rows as they are, row.
            splits: of these only, where the dataset has them; None: of all.
        """
        chosen = set(splits or self.splits) & set(self.splits)
        longest = max(self.splits[split][f"longest_{side}"] for split in chosen)
        return _rounded_up(longest)


def _rounded_up(length: int) -> int:
    return -(-length // _PADDING_MULTIPLE) * _PADDING_MULTIPLE


@dataclass(frozen=True)
class DatasetArtifact:
    """A dataset artifact's files.

    Args:
        added: by split, further columns that other stages made of its rows as they are.
    """

    path: Path
    added: Mapping[str, Added] = field(default_factory=dict)

    @cached_property
    def summary(self) -> DatasetSummary:
        """The content of `dataset.json`.

        Raises:
            ArtifactError: there is none, or it is of another version.
        """
        try:
            record = read_json(self.path / SUMMARY_FILE)
            if record["format"] != FORMAT:
                raise ArtifactError(
                    f"{self.path}: dataset format {record['format']}; this version reads {FORMAT}: "
                    "preprocess again."
                )
            return DatasetSummary(**record)
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{self.path}: no dataset of redco-flow: {error}") from error

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the ids."""
        return TextTokenizer.load(self.path / TOKENIZER_FOLDER)

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer; empty if there is none."""
        return self.tokenizer.digest if self.summary.has_tokenizer else ""

    def texts(self, source_length: int, target_length: int) -> TokenLengths | None:
        """Tokenizer and lengths for which a recipe of texts is built; None for other rows."""
        if not self.summary.has_tokenizer:
            return None
        return TokenLengths(self.tokenizer, source_length, target_length)

    def has(self, split: str) -> bool:
        """Tell whether the dataset has such a split."""
        return split in self.summary.splits

    def split(self, name: str, columns: Sequence[str] | None = None) -> Examples:
        """Open a split.

        Args:
            columns: which to read of encoded texts; rows have those of their recipe.

        Raises:
            ArtifactError: the dataset has no such split.
        """
        if not self.has(name):
            raise ArtifactError(
                f"{self.path}: the dataset has no split '{name}'; it has "
                f"{', '.join(self.summary.splits)}. Give data.{name}, or hold some out with "
                f"data.{'test' if name == 'test' else 'validation'}_fraction."
            )
        paths = [self.path / file for file in self.summary.files[name]]
        return (
            RowSplit(ArrowSplit(paths), self.added.get(name))
            if self.summary.is_of_rows
            else ArrowSplit(paths, columns)
        )


def split_file(split: str, block: int) -> str:
    """Return the name of the file with a split's share of a block."""
    return f"{split}-{block:05d}.arrow"
