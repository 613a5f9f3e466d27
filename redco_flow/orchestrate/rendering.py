"""What a run would submit, as text, before there is a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from redco_flow.launch.executor import make_executor
from redco_flow.orchestrate.calls import job_resources
from redco_flow.orchestrate.planning import Plan
from redco_flow.spec.load import ResolvedPipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace


def rendered_submissions(
    resolved: ResolvedPipeline,
    profile: Profile,
    workspace: Workspace,
    plan: Plan,
    environment: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Yield each stage that would run and what would be submitted for it.

    The run's id is not known yet: `RUN` stands in its place.

    Raises:
        UsageError: something in it cannot be submitted.
    """
    executor = make_executor(profile, environment)
    run = workspace.runs / f"{resolved.name}-RUN"
    for name, stage in plan.stages.items():
        if stage.action not in ("run", "wait"):
            continue
        resources = job_resources(resolved.stages[name], profile)
        attempt = AttemptDirectory(run / "stages" / name / "attempts" / "1")
        yield name, executor.render(attempt, f"{run.name} {name} 1", resources)
