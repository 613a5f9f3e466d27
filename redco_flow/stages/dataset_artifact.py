"""What stands in a dataset artifact, for the stages that read one.

`dataset.json` (the summary), Arrow files, each with one split's share of a block of the raw
rows, and `tokenizer/` in Hugging Face's format. Every text is kept beside its ids, so that a
prediction needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError
from redco_flow.recipes.text_tokenizer import TextTokenizer
from redco_flow.records import read_json
from redco_flow.stages.arrow_split import IDS, TEXT, TEXTS, ArrowSplit

FORMAT = 3
SUMMARY_FILE = "dataset.json"
TOKENIZER_FOLDER = "tokenizer"
_PADDING_MULTIPLE = 8
COLUMNS: Mapping[str, str] = {
    "row_id": TEXT,
    "source": TEXT,
    "references": TEXTS,
    "source_ids": IDS,
    "target_ids": IDS,
}


@dataclass(frozen=True)
class DatasetSummary:
    """`dataset.json`.

    Args:
        recipe: whose `encode` made the ids.
        splits: per split: rows and references, and of both sides: tokens, texts that were cut,
            and the longest in tokens.
        files: per split: its Arrow files, in order.
        skipped_rows: bad rows that the pipeline allowed to leave out, by reason.
        tokenizer: digest, vocab_size, pad_id, eos_id.
        most_frequent_target: what a model that ignores its input would say: text, count, and
            the number of training rows it was counted among.
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

    def to_json(self) -> dict[str, Any]:
        """Return the record."""
        return asdict(self)

    @property
    def is_plain_text(self) -> bool:
        """Whether the examples are texts without a source."""
        return not any(counts["longest_source"] for counts in self.splits.values())

    def padded_length(self, side: str, splits: Iterable[str] | None = None) -> int:
        """Return what batches are padded to: the longest text, rounded up to a multiple of 8.

        Args:
            side: source or target.
            splits: of these only, where the dataset has them; None: of all.
        """
        chosen = set(splits or self.splits) & set(self.splits)
        longest = max(self.splits[split][f"longest_{side}"] for split in chosen)
        return -(-longest // _PADDING_MULTIPLE) * _PADDING_MULTIPLE


@dataclass(frozen=True)
class DatasetArtifact:
    """A dataset artifact's files."""

    path: Path

    @cached_property
    def summary(self) -> DatasetSummary:
        """What `dataset.json` says.

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

    def has(self, split: str) -> bool:
        """Tell whether the dataset has such a split."""
        return split in self.summary.splits

    def split(self, name: str, columns: Sequence[str] | None = None) -> ArrowSplit:
        """Open a split.

        Raises:
            ArtifactError: the dataset has no such split.
        """
        if not self.has(name):
            raise ArtifactError(
                f"{self.path}: the dataset has no split '{name}'; it has "
                f"{', '.join(self.summary.splits)}. Give data.{name}, or hold some out with "
                f"data.{'test' if name == 'test' else 'validation'}_fraction."
            )
        return ArrowSplit([self.path / file for file in self.summary.files[name]], columns)


def split_file(split: str, block: int) -> str:
    """Return the name of the file with a split's share of a block."""
    return f"{split}-{block:05d}.arrow"
