"""Which stages of a sweep's points make the same, and which of them stand in the queue as arrays.

Pure apart from the digests of data files; the same for a sweep that is only shown and for one
that is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redco_flow.launch.call_groups import CallGroup, QueuedCall, group_calls
from redco_flow.orchestrate.calls import job_resources
from redco_flow.orchestrate.ingredients import Sources, stage_ingredients
from redco_flow.orchestrate.planning import Plan, upstream_of
from redco_flow.records import digest_json
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class StageJobs:
    """The jobs that a sweep has for one stage.

    Args:
        num_points: which need the stage's result and do not have it.
        groups: what is submitted; its calls have the numbers of their points.
        upstream: stages that the jobs wait for.
    """

    stage: str
    num_points: int
    groups: list[CallGroup] = field(default_factory=list)
    upstream: tuple[str, ...] = ()

    def describe(self, at_once: int) -> str:
        """For people: "train: an array of 4 jobs, 2 at a time, behind preprocess"."""
        parts = [_group_text(group, at_once) for group in self.groups]
        counted = [text if count == 1 else f"{count} × {text}" for text, count in _counts(parts)]
        shared = self.num_points - sum(len(group.numbers) for group in self.groups)
        for_all = f", for {self.num_points} points" if shared else ""
        behind = f", behind {', '.join(self.upstream)}" if self.upstream else ""
        return f"{self.stage}: {' and '.join(counted)}{for_all}{behind}"

    def to_json(self, at_once: int) -> dict[str, Any]:
        """Return the same as a record: the sizes of arrays, of ordinary jobs 1."""
        sizes = [len(group.numbers) for group in self.groups]
        return {"stage": self.stage, "points": self.num_points, "jobs": sizes, "at_once": at_once}


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
    points: Sequence[tuple[ResolvedPipeline, Profile, Plan]], workspace: Workspace
) -> Iterator[StageJobs]:
    """Yield what would be submitted for each stage, before there is a sweep."""
    sources = Sources()
    keys = [work_keys(pipeline, workspace, sources) for pipeline, _, _ in points]
    ids: dict[str, str] = {}
    for stage in dict.fromkeys(name for pipeline, _, _ in points for name in pipeline.stages):
        needing = [
            number
            for number, (_, _, plan) in enumerate(points)
            if stage in plan.stages and plan.stages[stage].action in ("run", "wait")
        ]
        makers = {keys[number][stage]: number for number in reversed(needing)}
        groups = []
        for _, numbers in by_profile({n: points[n][1] for n in sorted(makers.values())}):
            calls = [_queued_call(number, stage, points, keys, ids) for number in numbers]
            groups += group_calls(calls)
        for index, group in enumerate(groups):
            for number, task in zip(group.numbers, group.tasks, strict=True):
                job_id = f"{stage}.{index}"
                ids[keys[number][stage]] = f"{job_id}_{task}" if group.is_array else job_id
        if needing:
            waits = _open_upstream(points[needing[0]], stage)
            yield StageJobs(stage, len(needing), groups, waits)


def by_profile(profiles: Mapping[int, Profile]) -> list[tuple[Profile, list[int]]]:
    """Return each profile with the numbers of the points that have it."""
    found: list[tuple[Profile, list[int]]] = []
    for number, profile in profiles.items():
        for known, numbers in found:
            if known == profile:
                numbers.append(number)
                break
        else:
            found.append((profile, [number]))
    return found


def _queued_call(
    number: int,
    stage: str,
    points: Sequence[tuple[ResolvedPipeline, Profile, Plan]],
    keys: Sequence[Mapping[str, str]],
    ids: Mapping[str, str],
) -> QueuedCall:
    pipeline, profile, _ = points[number]
    resources = job_resources(pipeline.stages[stage], profile)
    waits_for = [keys[number][one] for one in _open_upstream(points[number], stage)]
    upstream = [ids[key] for key in waits_for if key in ids]
    return QueuedCall(number, resources, tuple(upstream))


def _open_upstream(point: tuple[ResolvedPipeline, Profile, Plan], stage: str) -> tuple[str, ...]:
    pipeline, _, plan = point
    upstream = upstream_of(pipeline.stages[stage])
    return tuple(one for one in upstream if plan.stages[one].action in ("run", "wait"))


def _group_text(group: CallGroup, at_once: int) -> str:
    if group.resources.shards:
        return f"an array of {len(group.resources.shards)} shards"
    if group.is_array:
        return f"an array of {len(group.numbers)} jobs, {at_once} at a time"
    return "1 job"


def _counts(texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    for text in dict.fromkeys(texts):
        yield text, texts.count(text)
