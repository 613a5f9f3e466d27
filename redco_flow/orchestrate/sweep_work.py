"""Which stages of a sweep's points make the same, and how many jobs it has for each stage.

Pure apart from the digests of data files; the same for a sweep that is only shown and for one
that is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redco_flow.orchestrate.ingredients import Sources, stage_ingredients
from redco_flow.orchestrate.planning import Plan, upstream_of
from redco_flow.records import digest_json
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class StageJobs:
    """The jobs that a sweep has for one stage.

    Args:
        points: which need the stage's result and do not have it.
        jobs: what is submitted for them; less where points make the same.
        upstream: stages that the jobs wait for.
    """

    stage: str
    points: int
    jobs: int
    upstream: tuple[str, ...] = ()

    def describe(self) -> str:
        """For people: "train: 4 jobs, behind preprocess"."""
        counted = "1 job" if self.jobs == 1 else f"{self.jobs} jobs"
        for_all = f", for {self.points} points" if self.points > self.jobs else ""
        behind = f", behind {', '.join(self.upstream)}" if self.upstream else ""
        return f"{self.stage}: {counted}{for_all}{behind}"

    def to_json(self) -> dict[str, Any]:
        """Return the same as a record."""
        return asdict(self)


def work_keys(
    pipeline: ResolvedPipeline, workspace: Workspace, sources: Sources | None = None
) -> dict[str, str]:
    """Return a key for each stage: of two stages with one key, one result serves both.

    Unlike a fingerprint it is known before the stages that it takes from have run.

    Args:
        sources: code and data as they are now, shared by a sweep's points.

    Raises:
        WorkspaceError: a data file is missing or unreadable.
    """
    keys: dict[str, str] = {}
    for name, stage in pipeline.stages.items():
        taken = {
            slot: [[keys[one.stage], one.output] for one in references]
            for slot, references in stage.inputs.items()
        }
        ingredients = stage_ingredients(stage, {}, workspace, sources)
        keys[name] = digest_json({"ingredients": ingredients, "inputs": taken})
    return keys


def planned_jobs(
    points: Sequence[tuple[ResolvedPipeline, Plan]], workspace: Workspace
) -> Iterator[StageJobs]:
    """Yield what would be submitted for each stage, before there is a sweep."""
    sources = Sources()
    keys = [work_keys(pipeline, workspace, sources) for pipeline, _ in points]
    for stage in dict.fromkeys(name for pipeline, _ in points for name in pipeline.stages):
        needing = [
            number
            for number, (pipeline, plan) in enumerate(points)
            if stage in pipeline.stages and _is_open(plan, stage)
        ]
        if needing:
            pipeline, plan = points[needing[0]]
            upstream = [n for n in upstream_of(pipeline.stages[stage]) if _is_open(plan, n)]
            jobs = {keys[number][stage] for number in needing}
            yield StageJobs(stage, len(needing), len(jobs), tuple(upstream))


def _is_open(plan: Plan, stage: str) -> bool:
    """Whether the stage is to have a job."""
    return plan.stages[stage].action in ("run", "wait")
