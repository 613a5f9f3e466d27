"""Pin the aliases and runs that a pipeline names to their current checkpoints.

The ids take the aliases' place before anything else is decided: fingerprints follow them, and a run
goes on with what it was planned with, though another checkpoint is promoted meanwhile.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, replace
from typing import Any

from redco_flow.errors import ConfigError, Problem, RedcoFlowError, UsageError
from redco_flow.spec.load import (
    InputRef,
    Origin,
    ResolvedPipeline,
    ResolvedStage,
    settings_of,
)
from redco_flow.spec.names import dotted, nearest
from redco_flow.spec.references import LAST
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.tracking.aliases import Alias, AliasName, AliasStore
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import refuse_deleted
from redco_flow.tracking.results import latest_result
from redco_flow.tracking.run_directory import find_run
from redco_flow.tracking.workspace import Workspace

_SHORT = 12
_ID = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True)
class AliasPin:
    """The checkpoint to which an alias in a stage's input resolves.

    Args:
        stage, slot: whose input, and which.
        alias: `@MODEL/ALIAS`, or another run's `RUN/STAGE`.
        checkpoint: the id that it named when the run was planned; empty where it named nothing,
            and the input, which is optional, was left out.
        since, by: when that was promoted, and by whom.
    """

    stage: str
    slot: str
    alias: str
    checkpoint: str
    since: str = ""
    by: str = ""

    def __str__(self) -> str:
        """One line for people."""
        if not self.checkpoint:
            return f"{self.stage}.{self.slot}: {self.alias} names nothing yet; it is left out"
        promoted = f", promoted by {self.by} at {self.since}" if self.since else ""
        what = "alias" if self.alias.startswith("@") else "run"
        return (
            f"{what}: {self.stage}.{self.slot}: {self.alias} is checkpoint "
            f"{self.checkpoint[:_SHORT]}{promoted}"
        )


@dataclass
class AliasPins:
    """Resolve aliases, each once for everything that one command plans."""

    _known: dict[AliasName, Alias | None] = field(default_factory=dict)

    def pinned(
        self, pipeline: ResolvedPipeline, workspace: Workspace
    ) -> tuple[ResolvedPipeline, tuple[AliasPin, ...]]:
        """Return the pipeline with checkpoints behind its aliases, and which they are.

        Raises:
            ConfigError: every alias that names nothing, or what is gone, with its place in the
                file.
        """
        problems: list[Problem] = []
        pins: list[AliasPin] = []
        stages = dict(pipeline.stages)
        document = copy.deepcopy(pipeline.document)
        for name, stage in pipeline.stages.items():
            inputs = dict(stage.inputs)
            for slot, given in stage.inputs.items():
                if not any(ref.alias for ref in given):
                    continue
                try:
                    refs = [self._last(ref, pipeline.name, name, workspace) for ref in given]
                    if self._names_nothing(stage, slot, refs[0], pipeline, workspace):
                        pins.append(AliasPin(name, slot, refs[0].alias, ""))
                        del inputs[slot], document["stages"][name][slot]
                        stage = _without_options(stage, slot, document["stages"][name])
                        continue
                    found = [self._pin(ref, pipeline.name, workspace) for ref in refs]
                except RedcoFlowError as error:
                    hint = _stage_hint(given[0].alias, pipeline)
                    problems.append(_problem(pipeline, name, slot, f"{error}{hint}"))
                    continue
                inputs[slot] = tuple(ref for ref, _ in found)
                problems += [
                    _problem(pipeline, name, slot, message)
                    for message in _misfits(stage, slot, inputs[slot], workspace)
                ]
                pins += [replace(pin, stage=name, slot=slot) for _, pin in found if pin]
                _write(document["stages"][name], slot, inputs[slot])
            stages[name] = replace(stage, inputs=inputs)
        if problems:
            raise ConfigError(problems)
        return replace(pipeline, stages=stages, document=document), tuple(pins)

    def _pin(
        self, ref: InputRef, model: str, workspace: Workspace
    ) -> tuple[InputRef, AliasPin | None]:
        """The reference with what it names; one that a run pinned before stays as it is."""
        if not ref.alias:
            return ref, None
        if not ref.alias.startswith("@"):
            return _by_id(ref, workspace) if _ID.fullmatch(ref.alias) else _of_run(ref, workspace)
        name = LAST if ref.alias == LAST else AliasName.parse(ref.alias, model)
        pin = AliasPin("", "", str(name), ref.artifact)
        if isinstance(name, AliasName) and not ref.artifact:
            alias = self._find(name, workspace)
            now = alias.current
            pin = replace(pin, checkpoint=now.checkpoint, since=now.time, by=now.by)
        if (found := ArtifactStore(workspace).find(pin.checkpoint)) is not None:
            refuse_deleted(workspace, found)
        if not ArtifactStore(workspace).is_whole(pin.checkpoint):
            raise UsageError(
                f"{name} is checkpoint {pin.checkpoint[:_SHORT]}, which is damaged, or gone from "
                f"{workspace.root}; promote another one, or `redco-flow rollback`."
            )
        return replace(ref, alias=str(name), artifact=pin.checkpoint), pin

    def _last(self, ref: InputRef, pipeline: str, stage: str, workspace: Workspace) -> InputRef:
        """Return `@last` with the checkpoint that the stage published last, if it has any."""
        if ref.alias != LAST or ref.artifact:
            return ref
        result = latest_result(workspace, pipeline, stage)
        made = result.outputs if result is not None else {}
        return replace(ref, artifact=made.get("checkpoint/last") or made.get("checkpoint", ""))

    def _names_nothing(
        self,
        stage: ResolvedStage,
        slot: str,
        ref: InputRef,
        pipeline: ResolvedPipeline,
        workspace: Workspace,
    ) -> bool:
        """Whether an optional input is of an alias that was never given, or of no run yet."""
        declared = find_stage_kind(stage.kind).inputs.get(slot)  # a script declares its own
        if declared is None or not declared.is_optional or ref.artifact:
            return False
        if not ref.alias.startswith("@"):
            return False
        name = None if ref.alias == LAST else AliasName.parse(ref.alias, pipeline.name)
        return name is None or AliasStore(workspace).find(name) is None

    def _find(self, name: AliasName, workspace: Workspace) -> Alias:
        if name not in self._known:
            self._known[name] = AliasStore(workspace).find(name)
        found = self._known[name]
        return found if found is not None else AliasStore(workspace).get(str(name))


def _by_id(ref: InputRef, workspace: Workspace) -> tuple[InputRef, None]:
    """The reference with the whole id of the checkpoint that it names by its first digits."""
    found = ArtifactStore(workspace).get(ref.alias)
    if found.kind != ref.output:
        raise UsageError(f"artifact {found.short_id} is of kind {found.kind}, not a {ref.output}.")
    refuse_deleted(workspace, found)
    return _to(found, ref, workspace), None


def _of_run(ref: InputRef, workspace: Workspace) -> tuple[InputRef, AliasPin]:
    """The reference with the id of a run's checkpoint, the newest where a stage has several."""
    find_run(workspace, ref.alias.partition("/")[0])  # raises where the run does not exist
    # Imported here: most pipelines name no other run.
    from redco_flow.orchestrate.checkpoints.export import find_checkpoint

    found = find_checkpoint(workspace, ref.alias, default="last")
    return _to(found, ref, workspace), AliasPin("", "", ref.alias, found.id)


def _stage_hint(alias: str, pipeline: ResolvedPipeline) -> str:
    """Name the stage that a reference to a run may be a misspelling of."""
    hint = nearest(alias.partition("/")[0], pipeline.stages)
    return "" if alias.startswith("@") or hint == "." else f" Of this pipeline's stages{hint}"


def _to(found: Artifact, ref: InputRef, workspace: Workspace) -> InputRef:
    if not ArtifactStore(workspace).is_whole(found.id):
        raise UsageError(f"checkpoint {found.short_id} is damaged: `redco-flow verify` says where.")
    return replace(ref, alias=found.id, artifact=found.id)


def _misfits(
    stage: ResolvedStage, slot: str, refs: tuple[InputRef, ...], workspace: Workspace
) -> list[str]:
    """Return why the stage's settings do not fit the checkpoint in a slot."""
    check, store = find_stage_kind(stage.kind).artifact_problems, ArtifactStore(workspace)
    found = (store.get(ref.artifact) for ref in refs if ref.artifact)
    return [message for one in found for message in check(stage.config, slot, one.metadata)]


def _without_options(stage: ResolvedStage, slot: str, body: dict[str, Any]) -> ResolvedStage:
    """Return a stage as if the options next to a reference had not been written."""
    fields = type(stage.config).model_fields
    options = find_stage_kind(stage.kind).inputs[slot].options.values()
    defaults = {setting: fields[setting].default for setting in options}
    config = stage.config.model_copy(update=defaults)
    body |= defaults
    return replace(stage, config=config, settings=settings_of(config))


def _problem(pipeline: ResolvedPipeline, name: str, slot: str, error: Exception | str) -> Problem:
    path = find_stage_kind(pipeline.stages[name].kind).slot_path(slot)
    origin = pipeline.origins.get(dotted(("stages", name, *path)), Origin("default"))
    return origin.problem(f"'{slot}' of stage '{name}': {error}")


def _write(body: dict[str, Any], slot: str, refs: tuple[InputRef, ...]) -> None:
    """Put the references into a stage's body, where the slot is written there."""
    holder: Any = body if slot in body else body["inputs"]
    texts = [ref.text() for ref in refs]
    holder[slot] = texts if isinstance(holder[slot], list) else texts[0]
