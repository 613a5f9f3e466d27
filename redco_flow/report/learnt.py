"""Trained parts of a dataset's conversations (loss mask): shares, warnings, a few examples.

Reads the manifest of the dataset artifact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redco_flow.report.stage_facts import StageFacts
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.learnt_counts import learnt_notes


@dataclass(frozen=True)
class LearntSet:
    """The trained parts of one dataset.

    Args:
        notes: (split, shares and warnings).
        examples: each in pieces, and whether each piece is trained on.
    """

    stage: str
    notes: tuple[tuple[str, str], ...]
    examples: tuple[tuple[tuple[str, bool], ...], ...]


def learnt_sets(stages: Iterable[StageFacts], store: ArtifactStore) -> list[LearntSet]:
    """Return the trained parts of each dataset of conversations that a stage made."""
    found = []
    for stage in stages:
        for artifact in filter(None, map(store.find, stage.outputs.values())):
            if artifact.kind == "dataset" and "learnt" in artifact.metadata:
                splits = artifact.metadata["splits"].items()
                notes = [(name, note) for name, counts in splits for note in learnt_notes(counts)]
                examples = tuple(
                    tuple((str(text), bool(is_learnt)) for text, is_learnt in pieces)
                    for pieces in artifact.metadata["learnt"]
                )
                found.append(LearntSet(stage.name, tuple(notes), examples))
    return found
