"""Write a dataset's splits as their encoded batches come, and count what is in them.

Knows what the summary says of a split. Refuses to know where batches come from. Memory: the
distinct ones of the first training targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from redco_flow.stages.arrow_split import SplitWriter
from redco_flow.stages.data_source import SPLITS
from redco_flow.stages.dataset_artifact import COLUMNS, split_path
from redco_flow.stages.grouping import Batch

_MAX_COUNTED_TARGETS = 100_000


class EncodedSplits:
    """One file per split that has examples; a context manager.

    Args:
        folder: where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._writers: dict[str, SplitWriter] = {}
        self._counts: dict[str, Counter[str]] = {}
        self._targets: Counter[str] = Counter()
        self._num_targets = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, split: str, batch: Batch, encoded: Any) -> None:
        """Append examples with their `EncodedPairs`."""
        if split not in self._writers:
            writer = SplitWriter(split_path(self._folder, split), COLUMNS)
            self._writers[split] = self._stack.enter_context(writer)
            self._counts[split] = Counter()
        self._writers[split].write(
            {**batch, "source_ids": encoded.source_ids, "target_ids": encoded.target_ids}
        )
        _count(self._counts[split], batch, encoded)
        if split == "train" and self._num_targets < _MAX_COUNTED_TARGETS:
            self._num_targets += len(batch["references"])
            self._targets.update(references[0] for references in batch["references"])

    def num_rows(self, split: str) -> int:
        """Return how many examples of a split were written."""
        return self._counts[split]["rows"] if split in self._counts else 0

    @property
    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """What was written, by split: see `DatasetSummary.splits`."""
        return {split: dict(self._counts[split]) for split in SPLITS if split in self._counts}

    @property
    def most_frequent_target(self) -> dict[str, Any]:
        """The commonest target among the first training examples."""
        # Ties go to the smallest text, not to the first: the order of rows is no property of a
        # task.
        text, count = min(self._targets.items(), key=lambda item: (-item[1], item[0]))
        return {"text": text, "count": count, "among": self._num_targets}


def _count(counts: Counter[str], batch: Batch, encoded: Any) -> None:
    counts["rows"] += len(batch["row_id"])
    counts["references"] += sum(map(len, batch["references"]))
    for side in ("source", "target"):
        lengths = list(map(len, getattr(encoded, f"{side}_ids")))
        counts[f"{side}_tokens"] += sum(lengths)
        counts[f"cut_{side}s"] += sum(getattr(encoded, f"is_{side}_cut"))
        counts[f"longest_{side}"] = max(counts[f"longest_{side}"], *lengths)
