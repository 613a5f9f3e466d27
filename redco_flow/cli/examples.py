"""`plan --show-examples`: what is learnt of a pipeline's first conversations, in colour."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import UsageError
from redco_flow.terminal_text import plain, visible
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import find_result

if TYPE_CHECKING:
    from redco_flow.cli.loading import Loaded
    from redco_flow.spec.load import ResolvedStage

_LEARNT, _READ = "bold green", "dim"


def print_examples(loaded: Loaded, number: int) -> None:
    """Print the first conversations of each stage that makes a dataset of some.

    Without colours, trained tokens are between «».

    Raises:
        UsageError: there is no such stage, or its tokenizer is not there before it has run.
    """
    from redco_flow.spec.stage_kind import find_stage_kind

    has_shown = False
    for stage in loaded.pipeline.stages.values():
        kind = find_stage_kind(stage.kind)
        try:
            shown = kind.show_examples(stage.config, _dataset_of(loaded, stage), number)
        except ValueError as error:
            raise UsageError(f"stage '{stage.name}': {error}") from error
        if shown is not None:
            _print(stage.name, shown.notes, shown.examples)
            has_shown = True
    if not has_shown:
        raise UsageError("--show-examples shows conversations, and no stage is of recipe chat.")


def _dataset_of(loaded: Loaded, stage: ResolvedStage) -> Path | None:
    fingerprint = loaded.plan.stages[stage.name].fingerprint
    result = find_result(loaded.workspace, fingerprint) if fingerprint else None
    if result is None or "dataset" not in result.outputs:
        return None
    artifact = ArtifactStore(loaded.workspace).find(result.outputs["dataset"])
    return artifact.path if artifact else None


def _print(stage: str, notes: Sequence[str], examples: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=plain(sys.stdout), soft_wrap=True, highlight=False)
    console.print(f"\n--- what {stage} lets a model learn", markup=False)
    for note in notes:
        console.print(note, markup=False)
    for pieces in examples:
        line = Text()
        for text, is_learnt in pieces:
            marked = f"«{visible(text)}»" if is_learnt and not console.color_system else text
            line.append(visible(marked), style=_LEARNT if is_learnt else _READ)
        console.print()
        console.print(line)
