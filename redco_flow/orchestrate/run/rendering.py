"""Render what would be submitted for each stage of a plan, without submitting it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from redco_flow.errors import UsageError
from redco_flow.launch.executor import StageToRender, make_chaining_executor, make_executor
from redco_flow.orchestrate.run.calls import job_resources
from redco_flow.orchestrate.run.groups import jobs_of_groups, refuse_inner_outputs
from redco_flow.orchestrate.run.launcher import render_launcher_job
from redco_flow.orchestrate.run.plan import Plan, upstream_of
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.spec.load import ResolvedPipeline, ResolvedStage
from redco_flow.spec.profile import LOCAL_LAUNCHER, Profile
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace


def rendered_submissions(
    resolved: ResolvedPipeline,
    profile: Profile,
    workspace: Workspace,
    plan: Plan,
    environment: Mapping[str, str],
    *,
    ahead: bool = False,
    after_others: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield each stage that would run and what would be submitted for it; first, the launcher.

    Neither the run's id nor those of jobs are known yet: `RUN` and `JOB_OF_<stage>` replace
    them.

    Args:
        ahead: as jobs that wait for each other.
        after_others: with `ahead`: as a sweep's, whose jobs wait for those of other points too.

    Raises:
        UsageError: something in it cannot be submitted, or not ahead.
    """
    if ahead:
        _refuse_forced(plan)
    jobs = {stages[0]: stages for _, stages in jobs_of_groups(resolved, profile, plan)}
    job_of = {name: first for first, stages in jobs.items() for name in stages}
    run = workspace.runs / f"{resolved.name}-RUN"
    if profile.launcher != LOCAL_LAUNCHER:
        record = LaunchRecord.of_this_process(
            workspace.root, profile, ahead=ahead, stage_profiles=resolved.profiles
        )
        yield "the job that drives the run", render_launcher_job(RunDirectory(run), record)
    for name, stage in plan.stages.items():
        if stage.action not in ("run", "wait"):
            continue
        of_stage = resolved.profile_of(name, profile)
        if (first := job_of.get(name, name)) != name:
            yield name, f"stage '{name}' runs in the job of stage '{first}'"
            continue

        in_job = [resolved.stages[one] for one in jobs.get(name, [name])]
        rendered, *then = [stage_to_render(run, one, of_stage) for one in in_job]
        if ahead and then:
            refuse_inner_outputs(resolved, jobs[name])
        if not ahead and not then:
            yield name, make_executor(of_stage, environment).render(*rendered)
            continue
        waits_for = ["JOB_OF_ANOTHER_POINT"] if after_others else []
        waits_for += [
            f"JOB_OF_{one}"
            for one in (upstream_of(resolved.stages[name]) if ahead else ())
            if plan.stages[one].action != "reuse"
        ]
        chaining = make_chaining_executor(of_stage, environment)
        yield name, chaining.render_after(*rendered, waits_for, then)


def stage_to_render(run: Path, stage: ResolvedStage, profile: Profile) -> StageToRender:
    """Return the first attempt of a stage in a run that need not exist."""
    attempt = AttemptDirectory(run / "stages" / stage.name / "attempts" / "1")
    return StageToRender(attempt, f"{run.name} {stage.name} 1", job_resources(stage, profile))


def _refuse_forced(plan: Plan) -> None:
    forced = [name for name, stage in plan.stages.items() if stage.forced]
    if forced:
        raise UsageError(
            f"--force {forced[0]} and --ahead do not go together: whether there is an old result "
            f"to put aside is known only when the stage begins. Leave one of them out."
        )
