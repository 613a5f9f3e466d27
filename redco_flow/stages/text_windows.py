"""Rows of which several examples were made, because their text is longer than an example may be."""

from __future__ import annotations

from collections import Counter

from redco_flow.recipes.encoded_pairs import Windows
from redco_flow.stages.grouping import Batch


def in_windows(batch: Batch, windows: Windows) -> Batch:
    """Return one example per window; the second one of a row is "row#2"."""
    seen: Counter[int] = Counter()
    row_ids = []
    for row in windows.text_of:
        seen[row] += 1
        row_id = batch["row_id"][row]
        row_ids.append(row_id if seen[row] == 1 else f"{row_id}#{seen[row]}")
    return {
        "row_id": row_ids,
        "source": [batch["source"][row] for row in windows.text_of],
        "references": [[text] for text in windows.texts],
    }
