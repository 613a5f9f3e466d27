"""Training rows that a curation dropped: their number by reason, and a few examples.

Reads the manifest of the curation artifact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.artifacts import ArtifactStore


@dataclass(frozen=True)
class DroppedText:
    """One row that was left out.

    Args:
        what: reason, row, and of a duplicate the other row and their similarity.
        text, like_text: beginnings; the second of the row that it repeats, if it does.
    """

    what: str
    text: str
    like_text: str


@dataclass(frozen=True)
class CurationSet:
    """One curation.

    Args:
        num_rows: training rows, before.
        reasons: (reason, rows left out for it, their share in %).
    """

    stage: str
    num_rows: int
    num_kept: int
    reasons: tuple[tuple[str, int, str], ...]
    examples: tuple[DroppedText, ...]


def curation_sets(stages: Iterable[StageFacts], store: ArtifactStore) -> Iterator[CurationSet]:
    """Yield the dropped rows of each stage that made a curation artifact."""
    for stage in stages:
        for artifact in filter(None, map(store.find, stage.outputs.values())):
            if artifact.kind == "curation":
                yield _curation(stage.name, artifact.metadata)


def _curation(stage: str, metadata: Mapping[str, Any]) -> CurationSet:
    dropped, num_rows = metadata["dropped"], int(metadata["num_rows"]["train"])
    reasons = tuple(
        (str(reason), int(count), f"{100 * count / num_rows:.1f}")
        for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
    )
    examples = tuple(
        DroppedText(_what(one), str(one["text"]), str(one["like_text"]))
        for one in metadata["examples"]
    )
    return CurationSet(stage, num_rows, num_rows - sum(dropped.values()), reasons, examples)


def _what(example: Mapping[str, Any]) -> str:
    text = f"{example['reason']}: {example['row_id']}"
    if not example["like"]:
        return text
    if example["similarity"] is None:
        return f"{text}, which has words of {example['like']}"
    return f"{text}, {100 * example['similarity']:.0f}% of the shingles of {example['like']}"
