"""List the jobs of a sweep before there is one: those that points share, and those of packs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from redco_flow.errors import ConfigError, Problem, UsageError
from redco_flow.launch.call import JobResources
from redco_flow.orchestrate.run.calls import job_resources
from redco_flow.orchestrate.run.groups import jobs_of_groups
from redco_flow.orchestrate.run.ingredients import Sources, stage_ingredients
from redco_flow.orchestrate.run.plan import Plan, upstream_of
from redco_flow.records import digest_json
from redco_flow.spec.document import DEFAULT
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import Profile
from redco_flow.spec.sweep_points import Point
from redco_flow.tracking.results import fingerprint
from redco_flow.tracking.workspace import Workspace

_MAX_STAGES_OF_JOB = 500  # its script has about 3 kB for each, more with long paths; 4 MiB at most


@dataclass(frozen=True)
class PlannedPoint:
    """One point of a sweep, read and planned."""

    overrides: Point
    pipeline: ResolvedPipeline
    profile: Profile
    plan: Plan

    def profile_of(self, stage: str) -> Profile:
        """Return the stage's own profile, or the point's."""
        return self.pipeline.profile_of(stage, self.profile)

    def resources(self, stages: Sequence[str]) -> list[JobResources]:
        """Return what each stage's job would ask for.

        Raises:
            UsageError, DoesNotFit: as `job_resources`.
        """
        return [job_resources(self.pipeline.stages[one], self.profile_of(one)) for one in stages]


@dataclass(frozen=True)
class StageJobs:
    """The jobs that a sweep has for one stage, or for those of a group.

    Args:
        stage: or "data, train", of stages that share a job, which is each point's own.
        points: which need the stage's result and do not have it.
        jobs: what is submitted for them; less where points make the same.
        upstream: stages that the jobs wait for.
    """

    stage: str
    points: int
    jobs: int
    upstream: tuple[str, ...] = ()

    def describe(self) -> str:
        """For people: "train: 4 jobs, after preprocess"."""
        counted = "1 job" if self.jobs == 1 else f"{self.jobs} jobs"
        for_all = f", for {self.points} points" if self.points > self.jobs else ""
        after = f", after {', '.join(self.upstream)}" if self.upstream else ""
        return f"{self.stage}: {counted}{for_all}{after}"

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
            slot: [[one.artifact or keys[one.stage], one.output] for one in references]
            for slot, references in stage.inputs.items()
        }
        ingredients = fingerprint(stage_ingredients(stage, {}, workspace, sources))
        keys[name] = digest_json({"ingredients": ingredients, "inputs": taken})
    return keys


def planned_jobs(
    points: Sequence[PlannedPoint], workspace: Workspace, points_per_job: int | None = None
) -> Iterator[StageJobs]:
    """Yield what would be submitted for each stage, before there is a sweep.

    Args:
        points_per_job: as `start_sweep` takes it; the jobs of packs come last.
    """
    packed: list[list[str]] = [[] for _ in points]
    if points_per_job is not None:
        packed = packed_stages(points, workspace, points_per_job)
    yield from _jobs_of_stages(points, workspace, packed)
    if points_per_job is not None and (num_packed := sum(map(bool, packed))):
        stages = dict.fromkeys(name for names in packed for name in names)
        upstream = dict.fromkeys(
            one
            for point, names in _open(points, packed)
            for name in names
            for one in upstream_of(point.pipeline.stages[name])
            if one not in names and _is_open(point.plan, one)
        )
        num_jobs = math.ceil(num_packed / points_per_job)
        yield StageJobs(", ".join(stages), num_packed, num_jobs, tuple(upstream))


def _jobs_of_stages(
    points: Sequence[PlannedPoint], workspace: Workspace, packed: Sequence[Sequence[str]]
) -> Iterator[StageJobs]:
    """Yield the jobs that run stages of one point each."""
    sources = Sources()
    found: dict[tuple[str, ...], list[tuple[str, StageJobs]]] = {}  # by the stages of a job
    for number, point in enumerate(points):
        pipeline, plan = point.pipeline, point.plan
        keys = work_keys(pipeline, workspace, sources)
        groups = [stages for _, stages in jobs_of_groups(pipeline, point.profile, plan)]
        alone = set(pipeline.stages).difference(*groups)
        for stages in [*groups, *((name,) for name in pipeline.stages if name in alone)]:
            first = pipeline.stages[stages[0]]
            if _is_open(plan, first.name) and first.name not in packed[number]:
                key = keys[first.name] if first.config.group is None else f"point {number}"
                upstream = tuple(name for name in upstream_of(first) if _is_open(plan, name))
                made = StageJobs(", ".join(stages), 1, 1, upstream)
                found.setdefault(stages, []).append((key, made))
    order = list(dict.fromkeys(name for point in points for name in point.pipeline.stages))
    for stages in sorted(found, key=lambda stages: order.index(stages[0])):
        jobs = found[stages]
        yield replace(jobs[0][1], points=len(jobs), jobs=len({key for key, _ in jobs}))


def _is_open(plan: Plan, stage: str) -> bool:
    return plan.stages[stage].action in ("run", "wait")


def packed_stages(
    points: Sequence[PlannedPoint], workspace: Workspace, points_per_job: int
) -> list[list[str]]:
    """Return the stages of each point that run in the job of its pack.

    Those that points of several packs share are jobs of their own, as are the stages that they take
    from, which those points share, too.

    Args:
        points_per_job: the number of points of a pack; those with nothing to compute do not count.
    """
    sources, num_open = Sources(), 0
    all_keys: list[dict[str, str]] = []  # of each point's open stages
    packs: dict[str, set[int]] = {}  # by key
    for point in points:
        keys = work_keys(point.pipeline, workspace, sources)
        keys = {name: key for name, key in keys.items() if _is_open(point.plan, name)}
        all_keys.append(keys)
        for key in keys.values():
            packs.setdefault(key, set()).add(num_open // points_per_job)
        num_open += bool(keys)
    return [[name for name, key in keys.items() if len(packs[key]) == 1] for keys in all_keys]


def check_packs(
    points: Sequence[PlannedPoint],
    packed: Sequence[Sequence[str]],
    points_per_job: int,
    environ: Mapping[str, str],
) -> None:
    """Raise where the points cannot be packed into jobs.

    Args:
        packed: as of `packed_stages`.
        environ: of the commands that ask the site for its limits.

    Raises:
        ConfigError: what one job cannot run together, each stage at its place in the file.
        UsageError: no job of the profile can run several points.
        DoesNotFit: the profile's machines are too few or too small.
    """
    first = next((point.profile_of(stages[0]) for point, stages in _open(points, packed)), None)
    if first is None:
        return
    if not first.section.runs_groups:
        raise UsageError(
            f"--points-per-job has jobs of a cluster compute several points, and the executor "
            f"'{first.executor}' of profile '{first.name}' has no such jobs: leave it out."
        )
    problems: dict[Problem, None] = {}
    for point, stages in _open(points, packed):
        problems |= dict.fromkeys(_problems_of_point(point, stages, first))
    if problems:
        raise ConfigError(list(problems))
    to_pack = list(_open(points, packed))
    for start in range(0, len(to_pack), points_per_job):
        pack = to_pack[start : start + points_per_job]
        each = [one for point, names in pack for one in point.resources(names)]
        section = first.section
        resources = JobResources.of_pack(each, section.walltime_minutes, section.seconds_of_warning)
        section.check_fits(resources)
        refused, _ = section.compare_with_site(resources, {**environ, **first.environment})
        texts = [f"{'.'.join(map(str, path))}: {text}" for path, text in refused]
        if len(each) > _MAX_STAGES_OF_JOB:
            texts.append(f"it would run {len(each)} stages, and may run {_MAX_STAGES_OF_JOB}")
        if texts:
            raise UsageError(
                f"--points-per-job {points_per_job}: such a job cannot be submitted: "
                f"{'; '.join(texts)}. A smaller number asks for less."
            )


def _open(
    points: Sequence[PlannedPoint], packed: Sequence[Sequence[str]]
) -> Iterator[tuple[PlannedPoint, Sequence[str]]]:
    return ((point, stages) for point, stages in zip(points, packed, strict=True) if stages)


def _problems_of_point(
    point: PlannedPoint, stages: Sequence[str], first: Profile
) -> Iterator[Problem]:
    """Yield what keeps stages of a point from running in one job.

    Args:
        first: the profile of the first stage of the job.
    """
    each = dict(zip(stages, point.resources(stages), strict=True))
    for name, stage in point.pipeline.stages.items():
        if stage.config.group is not None and _is_open(point.plan, name):
            text = "puts it into a job with other stages of its point"
            yield _problem(point, name, "group", text)
    for name in stages:
        if point.profile_of(name) != first:
            yield _problem(point, name, "runs_on", "differs from that of other stages of the job")
        if each[name].shards:
            text = "is not 1, and the tasks of a job array are jobs of their own"
            yield _problem(point, name, "num_shards", text)
    for setting in ("cpus_per_host", "memory_gib", "walltime_minutes"):
        silent = [name for name in stages if getattr(each[name], setting) is None]
        if silent and len(silent) < len(stages):
            text = "is not set, but it is of other stages of the job"
            yield _problem(point, silent[0], f"resources.{setting}", text)


def _problem(point: PlannedPoint, stage: str, setting: str, text: str) -> Problem:
    key = f"stages.{stage}.{setting}"
    origin = point.pipeline.origins.get(key, DEFAULT)
    return origin.problem(f"--points-per-job: '{key}' {text}: leave one of the two out.")
