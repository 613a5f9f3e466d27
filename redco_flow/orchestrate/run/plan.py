"""Decide, before anything starts, what each stage of a pipeline will do and why.

A stage whose fingerprint has a published result is reused; one that has none runs; one whose
inputs are not there yet waits, for its fingerprint is known only when they are. Reads results,
writes nothing, imports neither Prefect nor JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redco_flow.errors import UsageError
from redco_flow.hub import is_commit
from redco_flow.orchestrate.pins.aliases import AliasPin
from redco_flow.orchestrate.pins.hub import HubPin
from redco_flow.orchestrate.run.ingredients import Sources, stage_ingredients
from redco_flow.spec.load import InputRef, Origin, ResolvedPipeline, ResolvedStage
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.deletions import deletion_text, find_deletion
from redco_flow.tracking.results import (
    ABSENT,
    Difference,
    StageResult,
    differences,
    faults_of,
    find_damage,
    find_result,
    fingerprint,
    latest_result,
    read_result,
)
from redco_flow.tracking.workspace import Workspace

_MAX_VALUE_CHARACTERS = 60
_SHORT_COMMIT = 12


def reason_to_run(
    resolved: ResolvedPipeline,
    stage: str,
    ingredients: Mapping[str, Any],
    fingerprint: str,
    workspace: Workspace,
) -> str:
    """Return why `stage` runs, given that its fingerprint has no usable result."""
    if (standing := read_result(workspace, fingerprint)) is not None:
        return _why_not_reused(workspace, standing)
    if find_damage(workspace, fingerprint) is not None:
        return "its result's record is damaged"
    last = latest_result(workspace, resolved.name, stage)
    if last is None:
        return "first run"
    found = list(differences(last.ingredients, ingredients))
    if not found:
        # Fingerprints once had the path of a model's directory, whose files are digested.
        return "an earlier version of redco-flow identified its result in another way"
    # The first one explains the rest, except for what moved on the hub: that was not changed here.
    told = [found[0], *(one for one in found[1:] if _is_move(one))]
    return "; ".join(describe(one, stage, resolved.origins) for one in told)


def _why_not_reused(workspace: Workspace, result: StageResult) -> str:
    store = ArtifactStore(workspace)
    for artifact in filter(None, map(store.find, result.outputs.values())):
        if (deletion := find_deletion(artifact)) is not None:
            return f"{artifact.kind} {deletion_text(deletion)}"
    if not all(map(store.is_whole, result.outputs.values())):
        return "artifact missing"
    faults = faults_of(workspace, result)
    return f"damaged: {faults[0]}" if faults else "artifact missing"


def describe(difference: Difference, stage: str, origins: Mapping[str, Origin]) -> str:
    """Return a difference for people, with the place in the file for a setting."""
    section, _, key = difference.key.partition(".")
    if section == "code":
        verb = {True: "is gone", False: "changed"}[difference.new == ABSENT]
        return f"code {key} {'is new' if difference.old == ABSENT else verb}"
    if section in ("data", "inputs"):
        what = "data" if section == "data" else "input"
        return f"{what} {key} changed" if key else f"{what} changed"
    change = f"{_shown(difference.old)} → {_shown(difference.new)}"
    location = _location(key, stage, origins)
    return f"{key or section}: {change}" + (f" ({location})" if location else "")


def _is_move(difference: Difference) -> bool:
    """Whether a revision on the hub has become another commit."""
    return difference.key.startswith("settings.") and all(
        isinstance(value, str) and is_commit(value) for value in (difference.old, difference.new)
    )


def _location(key: str, stage: str, origins: Mapping[str, Origin]) -> str:
    """Return the origin of a setting: file:line, "command line" or "default"."""
    for candidate in _origin_keys(key, stage):
        origin = origins.get(candidate)
        if origin is not None:
            return f"{origin.source}:{origin.line}" if origin.line else origin.source
    return ""


def _origin_keys(key: str, stage: str) -> Iterator[str]:
    """The setting itself and, as a list or mapping may have been said whole, what holds it."""
    words = key.split(".")
    for count in range(len(words), 0, -1):
        path = ".".join(words[:count])
        yield f"stages.{stage}.{path}"
        yield path


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    if is_commit(text):
        return text[:_SHORT_COMMIT]
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"


Action = Literal["run", "reuse", "wait", "skip"]


@dataclass(frozen=True)
class StagePlan:
    """The planned action of one stage.

    Args:
        action: run; reuse a published result; wait for inputs, then run or reuse; skip, because
            `--from` or `--until` leaves it out.
        reason: for people: "first run", "learning_rate: 0.0001 → 0.0002 (x.yaml:12)".
        fingerprint: None while the inputs are not known.
        forced: run even where a result is published.
    """

    action: Action
    reason: str
    fingerprint: str | None = None
    forced: bool = False


@dataclass(frozen=True)
class Plan:
    """The planned actions of all stages, in an order in which they can run.

    Args:
        hub: at which commit of which repository of the hub.
        aliases: what they named when the run was planned.
    """

    stages: dict[str, StagePlan]
    hub: tuple[HubPin, ...] = ()
    aliases: tuple[AliasPin, ...] = ()

    @property
    def pins(self) -> tuple[HubPin | AliasPin, ...]:
        """All that stays as it was when the run was planned, whatever moves."""
        return (*self.hub, *self.aliases)

    @property
    def is_anything_new(self) -> bool:
        """Whether a stage would be computed."""
        return any(stage.action not in ("reuse", "skip") for stage in self.stages.values())

    def to_json(self) -> dict[str, Any]:
        """Return what plan.json holds."""
        stages = {name: asdict(stage) for name, stage in self.stages.items()}
        hub, aliases = ([asdict(pin) for pin in pins] for pins in (self.hub, self.aliases))
        return {"stages": stages, "hub": hub, "aliases": aliases}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """Rebuild a plan from `to_json`'s record."""
        stages = {name: StagePlan(**stage) for name, stage in record["stages"].items()}
        hub = tuple(HubPin(**pin) for pin in record.get("hub", ()))
        return cls(stages, hub, tuple(AliasPin(**pin) for pin in record.get("aliases", ())))


def make_plan(
    resolved: ResolvedPipeline,
    workspace: Workspace,
    *,
    from_stage: str | None = None,
    until_stage: str | None = None,
    force: Sequence[str] = (),
    sources: Sources | None = None,
) -> Plan:
    """Plan a pipeline.

    Args:
        resolved: the pipeline; its stages are in topological order.
        workspace: where results are looked for.
        from_stage: leave alone what this stage does not lead to; what it needs must be there.
        until_stage: leave out what this stage does not need.
        force: stages that run even where their result is published.
        sources: code and data as they are now, shared with other plans; None means this plan's own.

    Raises:
        UsageError: an option names no stage, `from_stage` needs a result that is not there, or
            no stage is left.
    """
    _check_stages(resolved, {"--from": [from_stage], "--until": [until_stage], "--force": force})
    window = _window(resolved, from_stage, until_stage)
    if not window:
        raise UsageError(
            f"--from {from_stage} and --until {until_stage} leave no stage: '{until_stage}' does "
            f"not need the result of '{from_stage}'."
        )
    needed = _ancestors(resolved, window)
    sources = sources or Sources()
    planned: dict[str, StagePlan] = {}
    outputs: dict[str, Mapping[str, str]] = {}
    for name, stage in resolved.stages.items():
        if name not in window and name not in needed:
            planned[name] = StagePlan("skip", "left out by --from or --until")
            continue
        planned[name], result = _plan_stage(
            resolved, stage, workspace, sources, planned, outputs, forced=name in force
        )
        if result is not None:
            outputs[name] = result.outputs
        if name not in window and planned[name].action != "reuse":
            raise UsageError(
                f"--from {from_stage} needs the result of stage '{name}', which is not there "
                f"({planned[name].reason}). Leave --from out, or begin at '{name}'."
            )
    return Plan(planned)


def upstream_of(stage: ResolvedStage) -> tuple[str, ...]:
    """Return the names of the stages whose outputs this one takes in, each once."""
    taken = (ref for refs in stage.inputs.values() for ref in refs)
    return tuple(dict.fromkeys(ref.stage for ref in taken if not ref.alias))


def input_ids(
    stage: ResolvedStage, outputs: Mapping[str, Mapping[str, str]]
) -> dict[str, list[str]]:
    """Return the stage's artifact ids by input slot.

    Args:
        outputs: of every upstream stage: artifact id by output name.

    Raises:
        UsageError: an upstream stage did not make the output that is referred to.
    """
    return {
        slot: [output_id(stage, ref, outputs) for ref in refs]
        for slot, refs in stage.inputs.items()
    }


def output_id(stage: ResolvedStage, ref: InputRef, outputs: Mapping[str, Mapping[str, str]]) -> str:
    """Return the id of the artifact that a reference of `stage` means.

    Raises:
        UsageError: the producer did not make it.
    """
    if ref.alias:
        assert ref.artifact  # `alias_pins` sees to it before anything is planned
        return ref.artifact
    made = outputs[ref.stage]
    if ref.output not in made:
        raise UsageError(
            f"stage '{stage.name}' takes '{ref.output}' of stage '{ref.stage}', which made only: "
            f"{', '.join(sorted(made)) or 'nothing'}."
        )
    return made[ref.output]


def _plan_stage(
    resolved: ResolvedPipeline,
    stage: ResolvedStage,
    workspace: Workspace,
    sources: Sources,
    planned: Mapping[str, StagePlan],
    outputs: Mapping[str, Mapping[str, str]],
    *,
    forced: bool,
) -> tuple[StagePlan, StageResult | None]:
    """Plan one stage; the result is given where it can be reused."""
    running = [name for name in upstream_of(stage) if planned[name].action != "reuse"]
    if running:
        names = ", ".join(running)
        verb = "runs" if len(running) == 1 else "run"
        return StagePlan("wait", f"upstream {names} {verb}", forced=forced), None
    ingredients = stage_ingredients(stage, input_ids(stage, outputs), workspace, sources)
    digest = fingerprint(ingredients)
    if forced:
        return StagePlan("run", "forced", digest, forced=True), None
    result = find_result(workspace, digest)
    if result is not None:
        return StagePlan(
            "reuse", f"unchanged since {result.run or 'an earlier run'}", digest
        ), result
    reason = reason_to_run(resolved, stage.name, ingredients, digest, workspace)
    return StagePlan("run", reason, digest), None


def _window(
    resolved: ResolvedPipeline, from_stage: str | None, until_stage: str | None
) -> frozenset[str]:
    window = frozenset(resolved.stages)
    if from_stage is not None:
        window &= _descendants(resolved, from_stage) | {from_stage}
    if until_stage is not None:
        window &= _ancestors(resolved, frozenset({until_stage})) | {until_stage}
    return window


def _ancestors(resolved: ResolvedPipeline, names: frozenset[str]) -> frozenset[str]:
    found: set[str] = set()
    for name in reversed(resolved.stages):
        if name in names or name in found:
            found.update(upstream_of(resolved.stages[name]))
    return frozenset(found)


def _descendants(resolved: ResolvedPipeline, name: str) -> frozenset[str]:
    found = {name}
    for candidate, stage in resolved.stages.items():
        if found.intersection(upstream_of(stage)):
            found.add(candidate)
    return frozenset(found - {name})


def _check_stages(resolved: ResolvedPipeline, options: Mapping[str, Sequence[str | None]]) -> None:
    wrong = [
        f"{option} {name}"
        for option, names in options.items()
        for name in names
        if name is not None and name not in resolved.stages
    ]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)}: pipeline '{resolved.name}' has no such stage; its stages: "
            f"{', '.join(resolved.stages)}."
        )
