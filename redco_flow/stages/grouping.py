"""Put rows with the same source together: one example with several references.

Evaluation data often has one row per reference; scored row by row, a good text would be
compared with one reference only. Memory: one hash and the row numbers of each distinct source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from redco_flow.stages.arrow_split import BATCH_ROWS, ArrowSplit
from redco_flow.stages.text_pairs import PairBatch

Batch = dict[str, list[Any]]


def ungrouped(batch: PairBatch) -> Batch:
    """Return a batch of examples with one reference each."""
    return {
        "row_id": batch["row_id"],
        "source": batch["source"],
        "references": [[target] for target in batch["target"]],
    }


def grouped(rows: ArrowSplit) -> Iterator[Batch]:
    """Yield batches of examples, one per distinct source, in the order of their first rows.

    An example's id is that of its first row; its references stand in row order, each once.
    """
    groups: dict[bytes, list[int]] = {}
    index = 0
    for batch in rows.batches():
        for source in batch["source"]:
            groups.setdefault(hashlib.sha256(source.encode()).digest(), []).append(index)
            index += 1
    members = list(groups.values())
    for start in range(0, len(members), BATCH_ROWS):
        yield _examples(rows, members[start : start + BATCH_ROWS])


def _examples(rows: ArrowSplit, members: list[list[int]]) -> Batch:
    batch: Batch = {"row_id": [], "source": [], "references": []}
    for indices in members:
        group = rows.__getitems__(indices)
        batch["row_id"].append(group[0]["row_id"])
        batch["source"].append(group[0]["source"])
        batch["references"].append(list(dict.fromkeys(row["target"] for row in group)))
    return batch
