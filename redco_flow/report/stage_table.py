"""The table of stages: what became of each, how long it took, what it made, where its logs are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redco_flow.report.number_format import duration, size
from redco_flow.report.stage_facts import StageFacts
from redco_flow.report.stage_logs import LogLink, log_links
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.states import State

_SHORT_ID = 12


@dataclass(frozen=True)
class ArtifactView:
    """One artifact that a stage made.

    Args:
        output: the output's name.
        step: the training step of a checkpoint; empty for everything else.
        size: its files' size; says so if they are gone.
        path: the directory of its files.
    """

    output: str
    id: str
    step: str
    size: str
    path: str

    @property
    def short_id(self) -> str:
        """Enough of the id to name it."""
        return self.id[:_SHORT_ID]


@dataclass(frozen=True)
class StageRow:
    """One stage.

    Args:
        share: its part of the run's computing time, 0 to 100.
        source: the run that computed it, if it was reused; the logs are then that run's.
    """

    name: str
    kind: str
    state: str
    is_reused: bool
    source: str
    attempt: str
    took: str
    share: float
    artifacts: tuple[ArtifactView, ...]
    logs: tuple[LogLink, ...]
    message: str


def stage_rows(
    run: RunDirectory, stages: Iterable[StageFacts], store: ArtifactStore
) -> list[StageRow]:
    """Return a row for each stage."""
    shown = list(stages)
    total = sum(_seconds(stage) or 0.0 for stage in shown)
    return [_row(run, stage, store, total) for stage in shown]


def _row(run: RunDirectory, stage: StageFacts, store: ArtifactStore, total: float) -> StageRow:
    seconds = _seconds(stage)
    attempt = stage.last_attempt
    ended_well = stage.state == State.COMPLETED
    return StageRow(
        name=stage.name,
        kind=stage.kind,
        state=stage.state,
        is_reused=stage.is_reused,
        source=stage.maker.run.id if stage.is_reused and stage.maker else "",
        attempt=str(attempt.number) if attempt else "–",
        took=_took(stage, seconds),
        share=100.0 * (seconds or 0.0) / total if total else 0.0,
        artifacts=tuple(_artifact(store, *item) for item in stage.outputs.items()),
        logs=log_links(run, stage.maker.attempt if stage.maker else attempt),
        message="" if ended_well else str(stage.entry.get("message") or "").partition("\n")[0],
    )


def _seconds(stage: StageFacts) -> float | None:
    """What this run spent on it."""
    seconds = stage.entry.get("seconds")
    if isinstance(seconds, int | float):
        return float(seconds)
    return None


def _took(stage: StageFacts, seconds: float | None) -> str:
    if stage.is_reused and stage.result:
        return f"{duration(stage.result.seconds)}, earlier"
    return duration(seconds)


def _artifact(store: ArtifactStore, output: str, artifact_id: str) -> ArtifactView:
    found = store.find(artifact_id)
    if found is None:
        return ArtifactView(output, artifact_id, "", "deleted", "")
    held = size(found.num_bytes) if store.is_whole(artifact_id) else "damaged"
    step = found.metadata.get("step") if found.kind == "checkpoint" else None
    at = f"step {step:,}" if isinstance(step, int) else ""
    return ArtifactView(output, artifact_id, at, held, str(found.path))
