"""Write the work order of a worker: call.json in a new attempt's directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import Call, InputReference, JobResources, JobStaging, write_call
from redco_flow.orchestrate.run.cancel import RunContext
from redco_flow.orchestrate.run.ingredients import stage_ingredients
from redco_flow.orchestrate.run.plan import output_id
from redco_flow.runtime.process_group import shards_left
from redco_flow.spec.load import InputRef, ResolvedStage
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
        UsageError: the stage's config holds something that is not JSON, or leaves settings to a
            search.
        ArtifactError: an input has been deleted.
    """
    call = _call(context, stage, _inputs(context, stage, made, {}), ingredients, fingerprint)
    return _write(context, call)


def write_attempt_ahead(
    context: RunContext,
    stage: ResolvedStage,
    made: Mapping[str, Mapping[str, str]],
    upstream: Mapping[str, AttemptDirectory],
) -> AttemptDirectory:
    """Make the stage's next attempt before all of its inputs are made; nothing is submitted.

    Args:
        made: outputs (artifact id by name) of upstream stages that have them.
        upstream: the attempts that will make the others' outputs, by stage.

    Raises:
        UsageError: the stage's config holds something that is not JSON, or leaves settings to a
            search.
        ArtifactError: an input has been deleted.
    """
    paths = {name: str(attempt.path) for name, attempt in upstream.items()}
    ingredients = stage_ingredients(stage, {}, context.workspace)
    call = _call(context, stage, _inputs(context, stage, made, paths), ingredients, "")
    return _write(context, replace(call, upstream=paths))


def _write(context: RunContext, call: Call) -> AttemptDirectory:
    attempt = context.run.new_attempt(call.stage)
    write_call(attempt, replace(call, attempt=attempt.number))
    return attempt


def _call(
    context: RunContext,
    stage: ResolvedStage,
    inputs: dict[str, list[InputReference]],
    ingredients: dict[str, Any],
    fingerprint: str,
) -> Call:
    for key in find_stage_kind(stage.kind).searched_settings(stage.config):
        raise UsageError(
            f"stage '{stage.name}': the result that this run was to reuse has been deleted, so "
            f"'{key}' was not decided when the run started; start another one (`redco-flow run`)."
        )
    origins = context.pipeline.stage_origins(stage.name)
    profile = context.profile_of(stage.name)
    resources, num_shards = job_resources(stage, profile), 1
    if resources.shards:
        num_shards = len(resources.shards)
        work_dir = context.workspace.work_directory(fingerprint)
        resources = replace(resources, shards=shards_left(work_dir, num_shards))
    return Call(
        run=context.run.id,
        pipeline=context.pipeline.name,
        stage=stage.name,
        kind=stage.kind,
        attempt=0,
        config=stage.config.model_dump(mode="json", exclude={"runs_on", "group"}),
        inputs=inputs,
        fingerprint=fingerprint,
        ingredients=ingredients,
        workspace=str(context.workspace.root),
        origins={key: asdict(one) for key, one in origins.items()},
        code=context.code,
        num_cpu_devices=profile.num_cpu_devices,
        environment=sorted(profile.environment),
        resources=resources,
        missing_gpus=profile.missing_gpus,
        staging=JobStaging(**profile.staging.model_dump()) if profile.staging else None,
        num_shards=num_shards,
    )


def job_resources(stage: ResolvedStage, profile: Profile) -> JobResources:
    """Return what the stage's job asks for: the pipeline's wishes, the profile's defaults.

    Args:
        profile: the stage's (`ResolvedPipeline.profile_of`).

    Raises:
        UsageError: several hosts for a kind that runs in one process.
        DoesNotFit: the profile's machines are too few or too small.
    """
    asked = stage.resources
    kind = find_stage_kind(stage.kind)
    several = kind.runs_on_several_processes
    num_shards = getattr(stage.config, "num_shards", 1) if kind.runs_in_shards else 1
    is_grouped = stage.config.group is not None and profile.section.runs_groups
    is_array = num_shards > 1 and profile.section.runs_arrays and not is_grouped
    if asked.num_hosts > 1 and not several:
        raise UsageError(
            f"stage '{stage.name}': kind {stage.kind} runs in one process and its "
            f"resources.num_hosts is {asked.num_hosts}; set it to 1."
        )
    resources = JobResources(
        num_hosts=asked.num_hosts,
        processes_per_host=profile.section.processes_per_host if several else 1,
        gpus_per_host=asked.gpus_per_host,
        cpus_per_host=asked.cpus_per_host,
        memory_gib=asked.memory_gib,
        walltime_minutes=asked.walltime_minutes or profile.section.walltime_minutes,
        shards=tuple(range(num_shards)) if is_array else (),
    )
    profile.section.check_fits(resources)
    return resources


def _inputs(
    context: RunContext,
    stage: ResolvedStage,
    made: Mapping[str, Mapping[str, str]],
    upstream: Collection[str],
) -> dict[str, list[InputReference]]:
    store = ArtifactStore(context.workspace)

    def reference(ref: InputRef) -> InputReference:
        if ref.stage in upstream:
            return InputReference("", "", ref.output.partition("/")[0], ref.stage, ref.output)
        artifact = store.get(output_id(stage, ref, made))
        producer = ref.alias or ref.stage
        return InputReference(artifact.id, str(artifact.path), artifact.kind, producer, ref.output)

    return {slot: [reference(ref) for ref in refs] for slot, refs in stage.inputs.items()}
