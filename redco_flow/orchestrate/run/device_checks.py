"""Check, before anything is submitted, that a plan's stages fit the profile's devices and limits.

GPUs that a stage asks for, the shards and batches that are cut over devices, and the limits of the
cluster's site (walltime, nodes, memory, job arrays). What only JAX knows is checked by the stage
itself, before its work begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from redco_flow.errors import DoesNotFit, Problem, RedcoFlowError
from redco_flow.launch.call import JobResources
from redco_flow.orchestrate.prefect.server import external_url
from redco_flow.orchestrate.run.calls import job_resources
from redco_flow.orchestrate.run.groups import jobs_of_groups, resources_of_job
from redco_flow.orchestrate.run.plan import Plan
from redco_flow.spec.document import DEFAULT, Origin
from redco_flow.spec.find import FLOW_FILE, bundled_behind
from redco_flow.spec.load import ResolvedPipeline, ResolvedStage
from redco_flow.spec.names import dotted
from redco_flow.spec.profile import LOCAL_LAUNCHER, Profile
from redco_flow.spec.stage_kind import find_stage_kind

_GPUS = ("resources", "gpus_per_host")
_HOSTS = ("resources", "num_hosts")
_WALLTIME = ("resources", "walltime_minutes")
_OF_THE_PROFILE = " (it is the profile's: the executor's walltime_minutes or options)"

_SEVERAL_WRITERS = (
    "the stage runs as {} processes, each of which writes its part of a checkpoint into one "
    "directory, and no node sees another one's disk: have it write to the workspace, by "
    "profile.staging.checkpoints=false or, for this stage, runs_on: {{staging: {{checkpoints: "
    "false}}}}"
)


def check_devices(
    resolved: ResolvedPipeline, profile: Profile, plan: Plan, environ: Mapping[str, str]
) -> list[str]:
    """Raise where a stage that will run, or may, can never have its resources under the profile.

    Args:
        environ: of this process; a profile's `environment` is laid over it.

    Returns:
        notes for people: limits that are not known, or that have a stage wait.

    Raises:
        DoesNotFit: every such stage, with the place of its setting in the file.
    """
    notes: list[str] = []
    problems = [
        problem
        for name, stage in resolved.stages.items()
        if plan.stages[name].action in ("run", "wait")
        for problem in _stage_problems(
            resolved, stage, resolved.profile_of(name, profile), environ, notes
        )
    ]
    for group, stages in jobs_of_groups(resolved, profile, plan):
        problems += _group_problems(resolved, profile, environ, group, stages, notes)
    notes += _on_cpus_beside_gpus(resolved, profile, plan)
    problems += launcher_problems(profile, environ)
    if problems:
        raise DoesNotFit("\n".join(map(str, sorted(set(problems)))))
    return list(dict.fromkeys(notes))


def launcher_problems(
    profile: Profile, environ: Mapping[str, str], directory: Path = Path()
) -> Iterator[Problem]:
    """Yield what the job that drives the run, where it is one, can never have or do.

    Args:
        directory: where the job starts.
    """
    if profile.launcher == LOCAL_LAUNCHER:
        return
    section, resources = profile.section.for_launcher()
    refused, _ = section.compare_with_site(resources, {**environ, **profile.environment})
    for path, message in refused:
        text = f"the job that drives the run ('launcher'): {dotted(path)}: {message}"
        yield Origin(f"profile {profile.name}").problem(text)
    own_flow = bundled_behind("flows", FLOW_FILE, directory)
    if own_flow is not None and external_url(profile.prefect_api_url) is None:
        yield Origin(str(own_flow[0])).problem(
            f"a flow of your own needs a Prefect server, which launcher {profile.launcher} would "
            f"start on the job's node: name a server by PREFECT_API_URL (in a profile: "
            f"prefect_api_url), or use --launcher {LOCAL_LAUNCHER}"
        )


def _on_cpus_beside_gpus(resolved: ResolvedPipeline, profile: Profile, plan: Plan) -> Iterator[str]:
    """Note stages that would compute without GPUs although others of the pipeline have some."""
    computing = [
        stage
        for name, stage in resolved.stages.items()
        if plan.stages[name].action in ("run", "wait")
        and find_stage_kind(stage.kind).runs_on_several_processes
        and resolved.profile_of(name, profile).section.gives_requested_gpus
    ]
    with_gpus = [one.name for one in computing if one.resources.gpus_per_host]
    for stage in computing if with_gpus else ():
        if not stage.resources.gpus_per_host:
            yield (
                f"stage '{stage.name}' computes on CPUs, while '{with_gpus[0]}' asks for GPUs; "
                f"for GPUs, set stages.{stage.name}.resources.gpus_per_host"
            )


def _stage_problems(
    resolved: ResolvedPipeline,
    stage: ResolvedStage,
    profile: Profile,
    environ: Mapping[str, str],
    notes: list[str],
) -> Iterator[Problem]:
    def at(path: tuple[str, ...], message: str) -> Problem:
        key = f"stages.{stage.name}.{dotted(path)}"
        origin = resolved.origins.get(key, DEFAULT)
        return origin.problem(f"'{key}': {message}")

    try:
        resources = job_resources(stage, profile)
    except RedcoFlowError as error:
        yield at(_GPUS if stage.resources.gpus_per_host else _HOSTS, str(error))
        return
    kind = find_stage_kind(stage.kind)
    stages_checkpoints = profile.staging is not None and profile.staging.checkpoints
    if stages_checkpoints and "checkpoint" in kind.outputs and resources.num_processes > 1:
        yield at(_HOSTS, _SEVERAL_WRITERS.format(resources.num_processes))
    environ = {**environ, **profile.environment}
    refused, said = profile.section.compare_with_site(resources, environ)
    notes += said
    for path, message in refused:
        is_profiles = path == _WALLTIME and stage.resources.walltime_minutes is None
        yield at(path, message + (_OF_THE_PROFILE if is_profiles else ""))
    gpus = profile.section.num_gpus_of_host(environ)
    is_short = gpus is not None and gpus < resources.gpus_per_host
    if is_short and profile.missing_gpus == "error":
        yield at(_GPUS, _missing_gpus(resources.gpus_per_host, gpus, profile))
        return
    num_devices = _num_devices(resources, profile, gpus)
    if num_devices is not None:
        hint = ""
        if gpus == 0:
            hint = f" (profile.num_cpu_devices is {profile.num_cpu_devices})"
        for path, message in kind.device_problems(stage.config, num_devices):
            yield at(path, f"{message}{hint}")


def _group_problems(
    resolved: ResolvedPipeline,
    profile: Profile,
    environ: Mapping[str, str],
    group: str,
    stages: Sequence[str],
    notes: list[str],
) -> Iterator[Problem]:
    """Yield what the site never allows the job of a group, at the group of its first stage."""
    key = f"stages.{stages[0]}.group"
    origin, of_stage = resolved.origins.get(key, DEFAULT), resolved.profile_of(stages[0], profile)
    try:
        resources = resources_of_job(resolved, profile, stages)
    except RedcoFlowError as error:
        yield origin.problem(f"'{key}': {error}")
        return
    refused, said = of_stage.section.compare_with_site(
        resources, {**environ, **of_stage.environment}
    )
    notes += said
    each = {name: job_resources(resolved.stages[name], of_stage) for name in stages}
    for setting in ("cpus_per_host", "memory_gib", "walltime_minutes"):
        asked = [name for name in stages if getattr(each[name], setting) is not None]
        silent = [name for name in stages if name not in asked]
        if asked and silent:
            first, other = (f"stages.{one[0]}.resources.{setting}" for one in (asked, silent))
            yield resolved.origins.get(first, origin).problem(
                f"'{first}': '{silent[0]}' runs in the same job (group '{group}') and asks for no "
                f"{setting}: set {other}, or leave it out of all stages of the group"
            )
    if (minutes := resources.walltime_minutes) is not None:
        total = sum(one.walltime_minutes or 0 for one in each.values())
        limited = f"; its stages ask for {total:g} in all" if total > minutes else ""
        notes.append(f"the job of group '{group}' gets {minutes:g} minutes{limited}")
    for path, message in refused:
        yield origin.problem(f"'{key}': the job of group '{group}': {dotted(path)}: {message}")


def _missing_gpus(asked: int, found: int | None, profile: Profile) -> str:
    gpus = "1 GPU" if asked == 1 else f"{asked} GPUs"
    return (
        f"the stage asks for {gpus}, and this machine, where profile '{profile.name}' runs it, has "
        f"{found or 'none'}. Choose a profile whose machines have them (-p PROFILE), set it to "
        "what there is, or compute without: profile.missing_gpus=warn"
    )


def _num_devices(resources: JobResources, profile: Profile, gpus: int | None) -> int | None:
    """The devices that JAX will find in all of a stage's processes; None where that is unknown."""
    if gpus == 0:
        return profile.num_cpu_devices * resources.num_processes
    if not resources.gpus_per_host or profile.missing_gpus == "warn":
        return None
    of_host = resources.gpus_per_host if profile.section.gives_requested_gpus else gpus
    return of_host and of_host * resources.num_hosts
