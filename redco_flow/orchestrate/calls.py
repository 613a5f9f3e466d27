"""Write down what a worker must do: call.json in a new attempt's directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import Call, InputReference, JobResources, write_call
from redco_flow.orchestrate.planning import output_id
from redco_flow.orchestrate.run_context import RunContext
from redco_flow.spec.load import ResolvedStage
from redco_flow.spec.profile import Profile
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory


def write_attempt(
    context: RunContext,
    stage: ResolvedStage,
    made: Mapping[str, Mapping[str, str]],
    ingredients: dict[str, Any],
    fingerprint: str,
) -> AttemptDirectory:
    """Make the stage's next attempt, with its call.json; nothing is submitted.

    Args:
        made: outputs (artifact id by name) of every upstream stage.

    Raises:
        UsageError: the stage's config holds something that is not JSON.
        ArtifactError: an input has been deleted.
    """
    attempt = context.run.new_attempt(stage.name)
    origins = context.pipeline.stage_origins(stage.name)
    call = Call(
        run=context.run.id,
        pipeline=context.pipeline.name,
        stage=stage.name,
        kind=stage.kind,
        attempt=attempt.number,
        config=stage.config.model_dump(mode="json"),
        inputs=_inputs(context, stage, made),
        fingerprint=fingerprint,
        ingredients=ingredients,
        workspace=str(context.workspace.root),
        origins={key: asdict(one) for key, one in origins.items()},
        code=context.code,
        num_cpu_devices=context.profile.num_cpu_devices,
        environment=sorted(context.profile.environment),
        resources=job_resources(stage, context.profile),
    )
    write_call(attempt, call)
    return attempt


def job_resources(stage: ResolvedStage, profile: Profile) -> JobResources:
    """Return what the stage's job asks for: the pipeline's wishes, the profile's defaults.

    Raises:
        UsageError: several hosts for a kind that runs in one process.
        DoesNotFit: the profile's machines are too few or too small.
    """
    asked = stage.resources
    several = find_stage_kind(stage.kind).runs_on_several_processes
    if asked.num_hosts > 1 and not several:
        raise UsageError(
            f"stage '{stage.name}': kind {stage.kind} runs in one process and its "
            f"resources.num_hosts is {asked.num_hosts}; set it to 1."
        )
    resources = JobResources(
        num_hosts=asked.num_hosts,
        processes_per_host=profile.cluster.processes_per_host if several else 1,
        gpus_per_host=asked.gpus_per_host,
        cpus_per_host=asked.cpus_per_host,
        memory_gib=asked.memory_gib,
        walltime_minutes=asked.walltime_minutes or profile.cluster.walltime_minutes,
    )
    if profile.executor == "hosts":
        from redco_flow.launch.hosts.placement import eligible_hosts

        eligible_hosts(profile.hosts, resources)
    if profile.executor == "xmanager" and profile.xmanager.backend == "local":
        from redco_flow.launch.xmanager.work_unit import check_fits

        check_fits(resources)
    return resources


def _inputs(
    context: RunContext, stage: ResolvedStage, made: Mapping[str, Mapping[str, str]]
) -> dict[str, list[InputReference]]:
    store = ArtifactStore(context.workspace)

    def reference(producer: str, output: str) -> InputReference:
        artifact = store.get(output_id(stage, producer, output, made))
        return InputReference(artifact.id, str(artifact.path), artifact.kind, producer, output)

    return {
        slot: [reference(ref.stage, ref.output) for ref in refs]
        for slot, refs in stage.inputs.items()
    }
