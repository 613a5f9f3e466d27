"""Ask whether the trainings of a plan fit their devices: one process with JAX for each.

Its answers are lines of JSON (`stages.train.fit`). A compiler that crashes, or needs more memory
than planning may take, ends that process alone. An answer is kept in the workspace's cache, by
all that it depends on: settings, data, code, target, variables and versions. Settings that are left
to a search (`mesh: auto`) are decided by an answer before a run has a directory: the run's record
has them as if they were written, so that whatever continues it takes the same.
"""

from __future__ import annotations

import copy
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from redco_flow import search_path
from redco_flow.errors import ConfigError, RedcoFlowError, UsageError, WorkspaceError
from redco_flow.launch.redaction import redact_text
from redco_flow.launch.worker_process import SHARE_OF_GPU, SHARE_VARIABLES
from redco_flow.orchestrate.run.ingredients import Sources, stage_ingredients
from redco_flow.orchestrate.run.plan import Plan
from redco_flow.records import digest_json, read_json_if_present, write_json
from redco_flow.spec.document import Origin
from redco_flow.spec.load import ResolvedPipeline, ResolvedStage
from redco_flow.spec.profile import Profile
from redco_flow.spec.secrets import secret_values
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.calibrations import read_calibrations
from redco_flow.tracking.code_digest import module_digests
from redco_flow.tracking.results import find_result
from redco_flow.tracking.workspace import Workspace

_EXAMPLES = "such as h100x8, a100-40gx4 or v5p:2x2x2"
_MOST_GIB = 12.0
_SECONDS_BETWEEN_LOOKS = 0.5
_DATASET = "dataset"
_OF_THE_JOB = {"resources", "runs_on", "group"}  # of which the target is what a program knows
_OF_A_SEARCH = ("chosen", "candidates", "search_notes", "devices", "choice")
# What a profile may set of the compiler, for the worker and here.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *SHARE_VARIABLES)

_PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_")
_PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc", "nvidia-nvvm", "numpy", "transformers", "tokenizers",
)  # fmt: skip

Progress = Callable[[str, float], None]
"""(what is being done, seconds since the beginning)."""


class CannotFit(RedcoFlowError):
    """Whether a stage fits cannot be said; the message says why."""

    exit_code = 2


class PlannerDied(CannotFit):
    """The process with the compiler ended without an answer."""

    exit_code = 1


@dataclass(frozen=True)
class Planned:
    """A pipeline with its plan, which trainings are planned for.

    Args:
        sources: the code and data that the plan is of.
        target: the devices; None: those of each stage's profile.
    """

    pipeline: ResolvedPipeline
    profile: Profile
    workspace: Workspace
    plan: Plan
    sources: Sources
    target: str | None


def trainings_of(
    pipeline: ResolvedPipeline, plan: Plan, *, to_run: bool = False
) -> list[ResolvedStage]:
    """Return the stages that train, of those in the plan, or of those that will run."""
    return [
        stage
        for name, stage in pipeline.stages.items()
        if find_stage_kind(stage.kind).fit_module
        and (action := plan.stages[name].action) != "skip"
        and (action in ("run", "wait") or not to_run)
    ]


def fits_of(
    stages: Sequence[ResolvedStage],
    planned: Planned,
    progress: Progress | None,
    *,
    searches: bool = False,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (stage, its figures with the target) of each stage.

    Of a stage that cannot be planned, they are `error`, the message, and an `exit_code`: the
    profile does not name its devices, settings cannot be followed, or the compiler is missing or
    failed.

    Args:
        stages: some of `trainings_of`.
        progress: None: nothing is compiled, and stages without an answer in the cache are left out.
        searches: also for the fastest mesh.
    """
    for stage in stages:
        fit: dict[str, Any]
        try:
            request, variables, path = _request(stage, planned)
            shows = searches or bool(_searched(stage))
            known = _read_cached(path, with_candidates=shows)
            if known is None and progress is None:
                continue
            if known is None and progress is not None:
                known = _run_planner(stage, {**request, "searches": searches}, variables, progress)
                _keep(planned.workspace, path, known)
            fit = {"target": request["target"], **(known or {})}
        except (CannotFit, UsageError) as error:
            if progress is None:
                continue
            instead = "".join(_settings_instead(stage))
            fit = {"error": f"{error}{instead}", "exit_code": error.exit_code}
        yield stage.name, fit


def searching_stages(pipeline: ResolvedPipeline, plan: Plan) -> list[ResolvedStage]:
    """Return those of `trainings_of` that leave settings to a search."""
    return [one for one in trainings_of(pipeline, plan) if _searched(one)]


def why_nothing_to_search(
    stage: ResolvedStage, profile: Profile, environ: Mapping[str, str]
) -> str:
    """Say why a stage's settings can be as by default; empty where they are to be searched."""
    gpus = gpus_of_host(stage, profile, environ)
    if gpus == 0:
        return "all CPU devices are data shards"
    if gpus is None and profile.section.gpu_type is None:
        return "the stage requests no GPUs: all devices are data shards"
    return "there is one device" if gpus == stage.resources.num_hosts == 1 else ""


def gpus_of_host(stage: ResolvedStage, profile: Profile, environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs a stage gets of each host; None where that is not known."""
    requested, section = stage.resources.gpus_per_host, profile.section
    if section.gives_requested_gpus:
        return requested
    found = section.num_gpus_of_host({**environ, **profile.environment})
    return found if found is not None else requested or None


def refuse_unnamed_devices(
    stages: Sequence[ResolvedStage], pipeline: ResolvedPipeline, profile: Profile
) -> None:
    """Raise where settings are to be searched for devices that a stage's profile does not name.

    Raises:
        ConfigError: every such stage, with the place of the key.
    """
    problems = []
    for stage in stages:
        try:
            _devices(stage, pipeline.profile_of(stage.name, profile), None)
        except UsageError as error:
            for key, instead in zip(_searched(stage), _settings_instead(stage), strict=True):
                path = f"stages.{stage.name}.{key}"
                problems.append(pipeline.origins[path].problem(f"'{path}': {error}{instead}"))
    if problems:
        raise ConfigError(problems)


def with_settings(
    pipeline: ResolvedPipeline, name: str, chosen: Mapping[str, Any] | None, why: str
) -> ResolvedPipeline:
    """Return the pipeline with what was left to a search in one of its stages.

    Args:
        chosen: settings of the stage, of `resources` only what changes; None: all as by default.
        why: the origin of these values.
    """
    stage = pipeline.stages[name]
    chosen = dict(dict.fromkeys(_searched(stage)) if chosen is None else chosen)
    resources = chosen.pop("resources", {})
    keys = [*chosen, *(f"resources.{key}" for key in resources)]
    if resources:
        chosen["resources"] = {**stage.resources.model_dump(mode="json"), **resources}
    config = type(stage.config).from_json({**stage.config.model_dump(mode="json"), **chosen})
    document = copy.deepcopy(pipeline.document)
    document["stages"][name] |= chosen
    origins = {f"stages.{name}.{key}": Origin(why) for key in keys}
    stage = replace(stage, config=config, resources=config.resources)
    return replace(
        pipeline,
        stages={**pipeline.stages, name: stage},
        document=document,
        origins={**pipeline.origins, **origins},
    )


def keep_fit(stage: ResolvedStage, planned: Planned, fit: Mapping[str, Any]) -> None:
    """Keep figures, of a search that decided the stage's settings, as the answer for those."""
    *_, path = _request(stage, planned)
    if _read_cached(path, with_candidates=False) is None:
        _keep(planned.workspace, path, _without_search(fit))


def _without_search(fit: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's figures without those of a search that it came from."""
    return {key: value for key, value in fit.items() if key not in _OF_A_SEARCH}


def _settings_instead(stage: ResolvedStage) -> list[str]:
    """Say for each key that leaves settings to a search how to do without."""
    return [
        f" Or set {' and '.join(settings)} in place of '{key}'."
        for key, settings in _searched(stage).items()
    ]


def _searched(stage: ResolvedStage) -> Mapping[str, tuple[str, ...]]:
    return find_stage_kind(stage.kind).searched_settings(stage.config)


def search_word(stage: ResolvedStage) -> str:
    """Return the value of the key that leaves settings to a search, which says for what; or ""."""
    return next((str(getattr(stage.config, key)) for key in _searched(stage)), "")


def _request(stage: ResolvedStage, planned: Planned) -> tuple[dict[str, Any], dict[str, str], Path]:
    """Return the planner's request, its variables, and where the answer is kept."""
    of_stage = planned.pipeline.profile_of(stage.name, planned.profile)
    environment = of_stage.environment
    variables = {name: environment[name] for name in _VARIABLES if name in environment}
    ignored = set(find_stage_kind(stage.kind).fit_ignores)
    # What a search is for matters only between its answers for several numbers of devices.
    config = stage.config.model_copy(update=dict.fromkeys(_searched(stage), "auto"))
    request: dict[str, Any] = {
        "stage": stage.name,
        "config": config.model_dump(mode="json", exclude=ignored | _OF_THE_JOB),
        "inputs": sorted(slot for slot, refs in stage.inputs.items() if refs),
        "share_of_gpu": _share_of_gpu({**os.environ, **variables}),
    }
    if of_stage.devices:
        request["described"] = {
            name: facts.model_dump(mode="json", exclude_none=True)
            for name, facts in of_stage.devices.items()
        }
    if calibrations := read_calibrations(planned.workspace, of_stage.name):
        request["measured"] = {one["device_kind"]: one["figures"] for one in calibrations}
    request |= _devices(stage, of_stage, planned.target)
    request |= _data(stage, planned)
    settings = {key: value for key, value in stage.settings.items() if key not in ignored}
    path = _cached_path(replace(stage, settings=settings), planned, request, variables)
    return request, variables, path


def _cached_path(
    stage: ResolvedStage,
    planned: Planned,
    request: Mapping[str, Any],
    variables: Mapping[str, str],
) -> Path:
    """Return where the answer to a request is kept."""
    module = find_stage_kind(stage.kind).fit_module
    assert module is not None
    read = [stage]
    if "preprocessing" in request:
        read += [planned.pipeline.stages[ref.stage] for ref in stage.inputs[_DATASET] if ref.stage]
    environment = {**os.environ, **variables}
    key = {
        "request": request,
        "ingredients": [
            stage_ingredients(one, {}, planned.workspace, planned.sources) for one in read
        ],
        "planner": module_digests([module]),
        "variables": {k: v for k, v in environment.items() if k.startswith(_PREFIXES)},
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": sys.version},
    }
    return planned.workspace.cache / "fits" / f"{digest_json(key)}.json"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read_cached(path: Path, *, with_candidates: bool) -> dict[str, Any] | None:
    """Return a kept answer; None where it is damaged, or lacks the candidates of a search."""
    with suppress(OSError, ValueError):
        kept = read_json_if_present(path)
        if isinstance(kept, dict) and digest_json(kept.get("fit")) == kept.get("digest"):
            fit: dict[str, Any] = kept["fit"]
            if not with_candidates:
                return _without_search(fit)
            return fit if "candidates" in fit else None
    return None


def _keep(workspace: Workspace, path: Path, fit: Mapping[str, Any]) -> None:
    """Keep an answer, where the workspace can be written."""
    with suppress(WorkspaceError, OSError):
        Workspace.open(workspace.root)
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"fit": fit, "digest": digest_json(fit)})


def _share_of_gpu(environ: Mapping[str, str]) -> float:
    """Return the share of a GPU's memory that a stage's process takes."""
    shares = (environ[name] for name in SHARE_VARIABLES if name in environ)
    with suppress(ValueError):
        return float(next(shares, SHARE_OF_GPU))
    return float(SHARE_OF_GPU)


def _devices(stage: ResolvedStage, profile: Profile, target: str | None) -> dict[str, Any]:
    if target is not None:
        return {"target": target}
    # A plan may be made on a machine without the GPUs.
    gpus = gpus_of_host(stage, profile, os.environ) or stage.resources.gpus_per_host
    kind = profile.section.gpu_type
    if not gpus or not kind:
        raise UsageError(
            f"stage '{stage.name}': profile '{profile.name}' does not say which devices it runs "
            f"on: set their number, and `gpu_type` in the profile, or give `plan --fit` a "
            f"--target, {_EXAMPLES}."
        )
    devices = {"target": f"{kind}x{gpus * stage.resources.num_hosts}", "gpus_per_host": gpus}
    if (fabrics := profile.section.fabrics_of(stage.resources)) is None:
        return devices
    numbers, between = fabrics
    of_host = [fabric for fabric, number in enumerate(numbers) for _ in range(number)]
    link = {"between_gb_s": between.gb_s, "latency_us": between.latency_us}
    return {**devices, "fabrics": {"of_host": of_host, **link}}


def _data(stage: ResolvedStage, planned: Planned) -> dict[str, Any]:
    """Say where the dataset is, or else which stage makes it."""
    (ref,) = stage.inputs[_DATASET]
    artifact = ref.artifact
    if ref.stage and (fingerprint := planned.plan.stages[ref.stage].fingerprint):
        result = find_result(planned.workspace, fingerprint)
        artifact = "" if result is None else result.outputs.get(ref.output, "")
    if found := ArtifactStore(planned.workspace).find(artifact):
        return {"dataset": str(found.path)}
    if not ref.stage:
        raise CannotFit(f"stage '{stage.name}': the dataset {ref.text()} is not in this workspace.")
    maker = planned.pipeline.stages[ref.stage]
    return {"preprocessing": (maker.kind, maker.config.model_dump(mode="json"))}


def _run_planner(
    stage: ResolvedStage,
    request: dict[str, Any],
    variables: Mapping[str, str],
    progress: Progress,
) -> dict[str, Any]:
    module = find_stage_kind(stage.kind).fit_module
    assert module is not None
    secrets = secret_values(os.environ)
    with (
        tempfile.TemporaryFile() as log,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
    ):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            env={**os.environ, **variables, **search_path.variables(), "TMPDIR": temporary},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # its assemblers end with it
        )
        try:
            answer = _answer(process, {**request, "kernels": f"{temporary}/kernels"}, progress)
        except PlannerDied as error:
            said = redact_text(f"{error}{_end_of(log)}", secrets)
            raise PlannerDied(f"stage '{stage.name}': {said}") from error
        finally:
            if process.returncode is None:  # else its number may be another's by now
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if "error" in answer:
        said = redact_text(answer["error"], secrets)
        raise CannotFit(f"stage '{stage.name}': {said}")
    fit: dict[str, Any] = answer["fit"]
    return fit


def _answer(
    process: subprocess.Popen[bytes], request: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Return the last line of a process, and tell of the progress until then.

    Raises:
        PlannerDied: it ended before, or was ended for its memory.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    begun, doing, rest = time.monotonic(), "starting", b""
    while True:
        progress(doing, time.monotonic() - begun)
        if select.select([process.stdout], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise PlannerDied(f"the compiler's process ended{_how(process.wait())}.")
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "progress" not in message:
                    return message
                doing = message["progress"]
        if (used := _memory_gib(process.pid)) > _MOST_GIB:
            raise PlannerDied(f"the compiler needs {used:.1f} GiB, more than {_MOST_GIB:g} GiB.")


def _how(status: int) -> str:
    if status == -signal.SIGXCPU:
        return ": it used all of its CPU time"
    return f" by {signal.Signals(-status).name}" if status < 0 else f" with exit code {status}"


def _memory_gib(pid: int) -> float:
    """Return the resident memory of a process; 0 where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGESIZE") / 2**30


def _end_of(log: IO[bytes]) -> str:
    """Return the last line that the process printed."""
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" It said last: {said[:300]}" if said else ""
