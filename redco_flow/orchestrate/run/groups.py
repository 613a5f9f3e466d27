"""Stages that share one job: which run in it after another one, their attempts, their resources.

Of a stage that is submitted, the rest of its group is submitted with it, as calls whose inputs the
stages before them make in the same job (`launch.call.with_inputs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from redco_flow.errors import UsageError
from redco_flow.launch.call import JobResources
from redco_flow.orchestrate.run.attempts import StageAttempts, end_attempt
from redco_flow.orchestrate.run.calls import job_resources, write_attempt_ahead
from redco_flow.orchestrate.run.cancel import RunContext
from redco_flow.orchestrate.run.plan import Plan, upstream_of
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory, Cause, State


def rest_of_group(
    resolved: ResolvedPipeline, profile: Profile, plan: Plan, stage: str
) -> tuple[str, ...]:
    """Return the stages that run after `stage` in its job, in their order.

    A stage that is forced begins a job of its own: whether an old result is to be put aside is
    known only when it begins.

    Args:
        profile: the run's.
    """
    group = resolved.stages[stage].config.group
    if group is None or not resolved.profile_of(stage, profile).section.runs_groups:
        return ()
    rest: list[str] = []
    members = [name for name, one in resolved.stages.items() if one.config.group == group]
    for name in members[members.index(stage) + 1 :]:
        if plan.stages[name].action == "skip" or plan.stages[name].forced:
            break
        rest.append(name)
    return tuple(rest)


def jobs_of_groups(
    resolved: ResolvedPipeline, profile: Profile, plan: Plan
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of a group and the stages of a job of it, for each job that has several."""
    taken: set[str] = set()
    for name, one in plan.stages.items():
        if name in taken or one.action not in ("run", "wait"):
            continue
        if rest := rest_of_group(resolved, profile, plan, name):
            taken.update(rest)
            yield str(resolved.stages[name].config.group), (name, *rest)


def resources_of_job(
    resolved: ResolvedPipeline, profile: Profile, stages: Collection[str]
) -> JobResources:
    """Return what the job asks for that runs these stages of a group.

    Raises:
        DoesNotFit: the profile's machines are too few or too small.
    """
    of_stage = resolved.profile_of(next(iter(stages)), profile)
    each = [job_resources(resolved.stages[name], of_stage) for name in stages]
    resources = JobResources.of_group(each, of_stage.section.walltime_minutes)
    of_stage.section.check_fits(resources)
    return resources


def refuse_inner_outputs(resolved: ResolvedPipeline, stages: Collection[str]) -> None:
    """Raise where a stage outside of a group's job would have to wait for a stage within it.

    Jobs that are submitted ahead wait for whole jobs.

    Raises:
        UsageError: names both stages.
    """
    *inner, last = stages
    for name, stage in resolved.stages.items():
        upstream = upstream_of(stage)
        found = [one for one in upstream if one in inner]
        if found and name not in stages and last not in upstream:
            raise UsageError(
                f"stage '{name}' takes from '{found[0]}', after which '{last}' runs in the same "
                f"job (group '{stage_group(resolved, last)}'); with --ahead it can only wait for "
                f"the whole job. Leave --ahead out, or take '{found[0]}' out of the group."
            )


def stage_group(resolved: ResolvedPipeline, stage: str) -> str:
    """Return the name of a stage's group."""
    return str(resolved.stages[stage].config.group)


def write_rest(
    context: RunContext, attempts: StageAttempts, attempt: AttemptDirectory
) -> list[AttemptDirectory]:
    """Make attempts of the stages that run after an attempt in its job; nothing is submitted.

    They become current, so each stage follows its own; what earlier jobs had for them is ended.
    """
    attempts.current[attempt.stage] = attempt
    found = []
    for name in rest_of_group(context.pipeline, context.profile, context.plan, attempt.stage):
        if name not in attempts.stages:  # it stays as it is
            break
        earlier = context.run.latest_attempt(name)
        if earlier is not None:
            end_attempt(earlier, f"stage {attempt.stage}, before it in the same job, runs again")
        waits_for = attempts.open_upstream(name)
        if not waits_for:  # it begins a job of its own
            break
        stage = context.pipeline.stages[name]
        found.append(write_attempt_ahead(context, stage, attempts.made, waits_for))
        attempts.current[name] = found[-1]
    return found


def next_in_job(
    context: RunContext, attempts: StageAttempts, stage: str
) -> AttemptDirectory | None:
    """Return the attempt that the job of a completed stage runs now or next, if there is one.

    A short stage may have ended before the launcher has seen the end of the stage before it.
    """
    for name in rest_of_group(context.pipeline, context.profile, context.plan, stage):
        attempt = attempts.current.get(name)
        if attempt is None or attempt.cause is None:
            return attempt
        if attempt.cause is not Cause.COMPLETED:
            return None
    return None


def note_rest(
    context: RunContext, attempt: AttemptDirectory, rest: Collection[AttemptDirectory]
) -> None:
    """Write into the run's state that the stages wait for their turn in the attempt's job."""
    before, job_id = attempt.stage, (attempt.read_job() or {}).get("job_id")
    for one in rest:
        job = f"job {job_id}" if job_id else f"the job of {attempt.stage}, not submitted yet,"
        fields = {"attempt": one.number, "message": f"{job} runs it after {before}"}
        fields |= {"job_id": job_id} if job_id else {}
        context.state_store.set_stage(one.stage, State.WAITING, event="job_submitted", **fields)
        before = one.stage
