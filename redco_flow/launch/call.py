"""call.json, the work order of an attempt: kind, settings, inputs; resolves upstream outputs.

Written by the orchestrator before anything is submitted, read by the worker on whatever host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.records import digest_json, list_directory, read_json, write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.results import fingerprint
from redco_flow.tracking.typed_records import check_shape
from redco_flow.tracking.workspace import Workspace

PROTOCOL = 1


@dataclass(frozen=True)
class InputReference:
    """One artifact that the stage takes in, and the stage and output it came from.

    Args:
        id, path: "" while the stage that makes it has not ended (`upstream.with_inputs`).
        stage: of a checkpoint that was promoted the alias, `@quickstart/production`; of one that
            the pipeline names by its id, this id.
    """

    id: str
    path: str
    kind: str
    stage: str
    output: str

    @property
    def is_promoted(self) -> bool:
        """Whether the pipeline names it by alias or id, so no stage of the run makes it."""
        return self.stage.startswith("@") or bool(self.id and self.stage == self.id)


@dataclass(frozen=True)
class JobResources:
    """The resources of one job.

    Args:
        processes_per_host: ranks on each host; they share its GPUs evenly.
        gpus_per_host: 0 for none.
        cpus_per_host, memory_gib, walltime_minutes: None leaves it to the machine.
        shards: parts of the stage that are tasks of their own, each of which gets all this; none:
            one job does everything.
    """

    num_hosts: int = 1
    processes_per_host: int = 1
    gpus_per_host: int = 0
    cpus_per_host: int | None = None
    memory_gib: float | None = None
    walltime_minutes: float | None = None
    shards: tuple[int, ...] = ()

    @property
    def num_processes(self) -> int:
        """Number of ranks of the job."""
        return self.num_hosts * self.processes_per_host

    @classmethod
    def of_group(
        cls, stages: Sequence[JobResources], walltime_minutes: float | None = None
    ) -> JobResources:
        """Return what one job asks for that runs these stages one after the other.

        The most of each resource that a stage asks for, and the sum of their walltimes. That all or
        none of them ask for CPUs, memory and time is checked before (`orchestrate.run.groups`).

        Args:
            walltime_minutes: the most that is asked for, unless one stage alone asks for more.
        """
        known = [one.walltime_minutes for one in stages if one.walltime_minutes is not None]
        limit = math.inf if walltime_minutes is None else max(walltime_minutes, *known, 0)
        processes = max(one.processes_per_host for one in stages)
        cpus = max((one.cpus_per_host or 0 for one in stages), default=0)
        return cls(
            num_hosts=max(one.num_hosts for one in stages),
            processes_per_host=processes,
            gpus_per_host=max(one.gpus_per_host for one in stages),
            # Shared evenly by the processes, and still enough for a stage with fewer of them.
            cpus_per_host=math.ceil(cpus / processes) * processes or None,
            memory_gib=max((one.memory_gib or 0.0 for one in stages), default=0.0) or None,
            walltime_minutes=min(sum(known), limit) if known else None,
        )

    @classmethod
    def of_pack(
        cls,
        stages: Sequence[JobResources],
        walltime_minutes: float | None,
        seconds_of_warning: int,
    ) -> JobResources:
        """Return what a packed job asks for: as `of_group`, and the time from the warning on.

        So the warning comes when all its stages have had their time.
        """
        group = cls.of_group(stages)
        if group.walltime_minutes is None:
            return group
        minutes = group.walltime_minutes + math.ceil(seconds_of_warning / 60)
        if (
            walltime_minutes is not None
        ):  # at most; but a single stage has the time that it asks for
            longest = max(one.walltime_minutes or 0 for one in stages)
            minutes = min(minutes, max(longest, walltime_minutes))
        return replace(group, walltime_minutes=minutes)


@dataclass(frozen=True)
class JobStaging:
    """Use of the nodes' own disks, as the profile describes it (`spec.profile.Staging`)."""

    directory: str
    inputs: bool
    checkpoints: bool


@dataclass(frozen=True)
class Call:
    """One stage to run once.

    Args:
        run, pipeline, stage, kind, attempt: names for the records.
        config: the stage's whole Config as JSON.
        inputs: artifacts by input slot.
        fingerprint: what determines the result; `ingredients` is what it is made of.
        workspace: an absolute path.
        origins: where each config leaf came from.
        code: the repository's commit and whether it is dirty, without the patch.
        num_cpu_devices: how many devices JAX makes of the CPU; None leaves it to JAX.
        environment: the names, never the values, of the variables that the profile sets.
        resources: read by the executor, and by the worker to look for the GPUs.
        missing_gpus: whether a stage that finds fewer GPUs than it asks for is an error or warns.
        staging: None: the stage reads from and writes to the workspace alone.
        num_shards: parts that the stage's work is cut into.
        shard: the part that this worker computes; None: all of them.
        upstream: by stage, the attempts whose results fill in the inputs without an id; of such a
            call neither the fingerprint nor the ingredients' inputs are known yet.
    """

    run: str
    pipeline: str
    stage: str
    kind: str
    attempt: int
    config: dict[str, Any]
    inputs: dict[str, list[InputReference]]
    fingerprint: str
    ingredients: dict[str, Any]
    workspace: str
    origins: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    num_cpu_devices: int | None = None
    environment: list[str] = field(default_factory=list)
    resources: JobResources = JobResources()
    missing_gpus: str = "error"
    staging: JobStaging | None = None
    num_shards: int = 1
    shard: int | None = None
    upstream: dict[str, str] = field(default_factory=dict)
    protocol: int = PROTOCOL

    @property
    def config_digest(self) -> str:
        """Return the SHA-256 of the config."""
        return digest_json(self.config)


def write_call(attempt: AttemptDirectory, call: Call) -> None:
    """Write call.json; nothing is left behind if it cannot be written.

    Raises:
        UsageError: something in the call is not JSON; names each place and type.
    """
    record = asdict(call)
    faults = list(_what_is_not_json(record, ""))
    if faults:
        raise UsageError(
            f"stage '{call.stage}' cannot be submitted: {'; '.join(faults)}. A stage's config "
            f"holds texts, finite numbers, booleans, null, lists and mappings with text keys."
        )
    write_json(attempt.call_path, record)


def read_call(path: Path) -> Call:
    """Read call.json.

    Raises:
        UsageError: there is none, or it is not a call of this version of redco-flow.
    """
    try:
        return call_from_json(read_json(path))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no call; was the attempt written whole?") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not a call: {error!r}.") from error


def call_from_json(record: Any) -> Call:
    """Return the call that `write_call` wrote.

    Raises:
        UsageError: it is not a call of this version of redco-flow.
    """
    try:
        if record["protocol"] != PROTOCOL:
            raise UsageError(
                f"written for protocol {record['protocol']}, this worker speaks "
                f"{PROTOCOL}: install the same redco-flow where runs start and where they run."
            )
        inputs = {
            slot: [InputReference(**reference) for reference in references]
            for slot, references in record["inputs"].items()
        }
        resources = JobResources(**record.get("resources", {}))
        resources = replace(resources, shards=tuple(resources.shards))
        staging = record.get("staging") and JobStaging(**record["staging"])
        given = {"inputs": inputs, "resources": resources, "staging": staging}
        call = Call(**(record | given))
        check_shape(record, Call, "the call")
        return call
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        known = ", ".join(item.name for item in fields(Call))
        raise UsageError(f"not a call: {error!r}; its keys are {known}.") from error


def _what_is_not_json(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{place or 'call'}: key {key!r} is a {type(key).__name__}"
            yield from _what_is_not_json(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _what_is_not_json(item, f"{place}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{place} is {value}"
    elif not isinstance(value, str | int | float | bool | None):
        yield f"{place} is a {type(value).__name__}"


_SECONDS_BETWEEN_LOOKS = 0.5


class UpstreamMissing(RedcoFlowError):
    """A stage that the call takes from has no result that can be used; nothing has run."""


def with_inputs(call: Call, *, wait_seconds: float = 0.0) -> Call:
    """Return the call with the inputs and the fingerprint that its upstream jobs decided.

    Args:
        call: any; one whose inputs are known is returned as it is.
        wait_seconds: how long a result may take to be seen, where its job ended on another host.

    Raises:
        UpstreamMissing: a result, or the artifact that is wanted of it, is not there.
    """
    if not call.upstream:
        return call
    deadline = time.monotonic() + wait_seconds
    made = {
        stage: _outputs_of(stage, AttemptDirectory(Path(path)), deadline)
        for stage, path in call.upstream.items()
    }
    store = ArtifactStore(Workspace(Path(call.workspace)))
    inputs = {
        slot: [one if one.id else _filled_in(one, made, store) for one in references]
        for slot, references in call.inputs.items()
    }
    ids = {slot: [one.id for one in references] for slot, references in inputs.items()}
    ingredients = call.ingredients | {"inputs": ids}
    return replace(
        call,
        inputs=inputs,
        ingredients=ingredients,
        fingerprint=fingerprint(ingredients),
        upstream={},
    )


def _outputs_of(stage: str, attempt: AttemptDirectory, deadline: float) -> Mapping[str, str]:
    """Artifact ids by output name, of an attempt that has completed."""
    while (result := attempt.read_result()) is None:
        if time.monotonic() > deadline or attempt.cause not in (None, Cause.COMPLETED):
            raise UpstreamMissing(
                f"stage '{stage}' has no result in {attempt.path}: it did not complete, or this "
                f"host does not see the workspace. Nothing ran; `redco-flow resume` tries again."
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        list_directory(attempt.path)
    return result["outputs"]


def _filled_in(
    reference: InputReference, made: Mapping[str, Mapping[str, str]], store: ArtifactStore
) -> InputReference:
    outputs = made[reference.stage]
    if reference.output not in outputs:
        raise UpstreamMissing(
            f"output '{reference.output}' is taken from stage '{reference.stage}', which made "
            f"only: {', '.join(sorted(outputs)) or 'nothing'}. Nothing ran."
        )
    artifact = store.find(outputs[reference.output])
    if artifact is None:
        raise UpstreamMissing(
            f"{reference.kind} {outputs[reference.output]}, made by stage '{reference.stage}', is "
            f"gone from the workspace. Nothing ran; `redco-flow resume` computes it again."
        )
    return replace(reference, id=artifact.id, path=str(artifact.path), kind=artifact.kind)
