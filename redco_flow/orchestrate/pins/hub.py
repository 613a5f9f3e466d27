"""Pin what a pipeline takes from the Hugging Face hub to commits, before anything else is decided.

The commits become the pipeline's `revision` keys: fingerprints, the run's records, and the calls of
its stages have them, so that every stage reads one state of a repository, however often the run is
resumed. Without the hub the commit that the cache holds is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from redco_flow import hub
from redco_flow.errors import ConfigError, Problem, RedcoFlowError
from redco_flow.local_paths import expanded, is_folder
from redco_flow.records import read_json
from redco_flow.spec.data_files import missing_file
from redco_flow.spec.document import DEFAULT
from redco_flow.spec.hub_reference import HubReference
from redco_flow.spec.load import Origin, ResolvedPipeline, ResolvedStage, settings_of
from redco_flow.spec.names import dotted
from redco_flow.spec.pipeline import ModelSection
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.spec.stages import DEFAULT_ADVICE
from redco_flow.tracking.run_directory import RunDirectory, list_runs
from redco_flow.tracking.workspace import Workspace

_SECTIONS = (("model",), ("data",), ("data", "tokenizer"))
_SHORT = 12
_RUNS_LOOKED_AT = 200

_Key = tuple[hub.Kind, str, str | None]


@dataclass(frozen=True)
class HubPin:
    """One repository of the hub at the commit that a run takes.

    Args:
        asked: the branch, tag or commit that the pipeline names.
        cached: empty where the hub was asked; else why it was not, and the cache was.
        before: the commit of the last run that named the same; empty where there was none.
        note: what of it is not read, and the key to change that.
    """

    kind: hub.Kind
    name: str
    asked: str
    commit: str
    cached: str = ""
    before: str = ""
    note: str = ""

    def __str__(self) -> str:
        """One line for people."""
        moved = f", was {self.before[:_SHORT]}" if self.before not in ("", self.commit) else ""
        cached = f" (from the cache: {self.cached})" if self.cached else ""
        note = f"\n  note: {self.note}" if self.note else ""
        commit = self.commit[:_SHORT]
        return f"hub: {self.kind} {self.name}, {self.asked}: {commit}{moved}{cached}{note}"


@dataclass
class HubPins:
    """Resolve names on the hub to commits, each once for everything that one command plans."""

    _answers: dict[_Key, tuple[HubPin, hub.Snapshot] | hub.HubError] = field(default_factory=dict)
    _unreachable: hub.HubUnreachable | None = None

    def pinned(
        self, pipeline: ResolvedPipeline, workspace: Workspace
    ) -> tuple[ResolvedPipeline, tuple[HubPin, ...]]:
        """Return the pipeline with commits for revisions, and what they are.

        Args:
            workspace: its runs know which commits were taken before.

        Raises:
            ConfigError: every repository and model directory that cannot be used, with its place
                in the file.
        """
        problems: list[Problem] = []
        pins: dict[HubPin, None] = {}
        stages: dict[str, ResolvedStage] = {}
        pinning = _Pinning(pipeline)
        for name, stage in pipeline.stages.items():
            commits: dict[tuple[str, ...], HubPin] = {}
            for one in find_stage_kind(stage.kind).hub_references(stage.config):
                try:
                    found = self._find(one, workspace)
                except hub.HubError as error:
                    key = dotted((*one.section, one.key))
                    origin = pipeline.origins.get(f"stages.{name}.{key}", Origin("default"))
                    problems.append(origin.problem(f"'{key}': {error}"))
                    continue
                if found is not None:
                    commits[one.section] = found
                    pins[found] = None
            stages[name] = pinning.stage(stage, commits)
        if problems:
            raise ConfigError(problems)
        pinned = replace(
            pipeline, stages=stages, origins=pinning.origins, document=pinning.document
        )
        return replace(pinned, notes=(*pinned.notes, *_check_models(pinned, pins))), tuple(pins)

    def _find(self, one: HubReference, workspace: Workspace) -> HubPin | None:
        """The commit; None for a local directory."""
        if one.is_local:
            _check_directory(one)
            return None
        key = (one.kind, one.name, one.revision)
        if key not in self._answers:
            try:
                self._answers[key] = self._ask(*key, workspace)
            except hub.HubError as error:
                self._answers[key] = error
        answer = self._answers[key]
        if isinstance(answer, hub.HubError):
            raise answer
        pin, snapshot = answer
        missing = one.missing(snapshot.files, snapshot.folder)
        if missing and pin.cached:
            reason = hub.HubUnreachable(pin.cached)
            raise hub.HubError(hub.not_cached(one.kind, one.name, one.revision, reason))
        if problem := missing or one.model_problem(snapshot.config):
            at = f"at {pin.asked} ({pin.commit[:_SHORT]})"
            raise hub.HubError(f"{one.kind} '{one.name}' {at} {problem}")
        return replace(pin, note=one.unread_splits(snapshot.card))

    def _ask(
        self, kind: hub.Kind, name: str, revision: str | None, workspace: Workspace
    ) -> tuple[HubPin, hub.Snapshot]:
        hub.check_name(kind, name)  # the cache has no folder for another, and would raise
        asked = revision or "main"
        before = _last_commit(workspace, kind, name, asked)
        try:
            if self._unreachable is not None:
                raise self._unreachable
            snapshot = hub.look_up(kind, name, revision)
        except hub.HubUnreachable as error:
            if not isinstance(error, hub.HubFailing):
                self._unreachable = error
            cached = _cached(kind, name, revision, before)
            if cached is None:
                raise hub.HubError(hub.not_cached(kind, name, revision, error)) from error
            pin = HubPin(kind, name, asked, cached.commit, str(error), before[1])
            return pin, cached
        return HubPin(kind, name, asked, snapshot.commit, "", before[1]), snapshot


class _Pinning:
    """Writes commits into a pipeline's stages, document and origins."""

    def __init__(self, pipeline: ResolvedPipeline) -> None:
        self.document: dict[str, Any] = copy.deepcopy(pipeline.document)
        self.origins = dict(pipeline.origins)

    def stage(
        self, stage: ResolvedStage, commits: Mapping[tuple[str, ...], HubPin]
    ) -> ResolvedStage:
        """Return the stage at the commits, by section; note them for the file as well."""
        values = stage.config.model_dump(mode="json")
        own = self.document["stages"][stage.name]
        for section in _SECTIONS:
            mapping = _at(values, section)
            if mapping is None or "revision" not in mapping:
                continue
            pin = commits.get(section)
            if pin is not None:
                mapping["revision"] = pin.commit
                origin = Origin(f"{pin.asked} on the hub")
                self.origins[dotted(("stages", stage.name, *section, "revision"))] = origin
            # What a stage says of a section itself lies over the top of the file, and its revision
            # is of another name there: it is written out, even where there is none.
            if section[0] in own:
                _below(own, section)["revision"] = mapping["revision"]
            elif pin is not None:
                _below(self.document, section)["revision"] = pin.commit
                self.origins[dotted((*section, "revision"))] = origin
        if not commits:
            return stage
        config = type(stage.config).from_json(values)
        return replace(stage, config=config, settings=settings_of(config))


def _at(values: Any, section: tuple[str, ...]) -> dict[str, Any] | None:
    for part in section:
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None


def _below(values: dict[str, Any], section: tuple[str, ...]) -> dict[str, Any]:
    """The mapping at a path, made where there is none."""
    for part in section:
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
    return values


def _check_models(pipeline: ResolvedPipeline, pins: Iterable[HubPin]) -> list[str]:
    """Compare settings with the `config.json` of the hub's models; return notes on defaults.

    A model whose `config.json` neither the hub nor its cache gives is checked by its stage.

    Raises:
        ConfigError: every written setting that a model cannot have, with its place in the file.
    """
    online = {(pin.name, pin.commit) for pin in pins if pin.kind == "model" and not pin.cached}
    problems: list[Problem] = []
    notes: list[str] = []
    for stage in pipeline.stages.values():
        model = getattr(stage.config, "model", None)
        if not isinstance(model, ModelSection) or not model.reads_weights:
            continue
        if (str(model.name_or_path), str(model.revision)) in online:
            hub.fetch_config(str(model.name_or_path), str(model.revision))
        elif not hub.is_commit(model.revision):
            continue  # no model of the hub: it was compared when the file was read
        producers = {
            slot: pipeline.stages[refs[0].stage]
            for slot, refs in stage.inputs.items()
            if len(refs) == 1 and refs[0].stage
        }
        upstream = {slot: producer.config for slot, producer in producers.items()}
        outputs = {slot: stage.inputs[slot][0].output for slot in producers}
        for slot, path, message in find_stage_kind(stage.kind).upstream_problems(
            stage.config, upstream, outputs
        ):
            if not path:
                continue  # no model is needed for it: it was compared when the file was read
            key = f"stages.{producers[slot].name}.{dotted(path)}"
            origin = pipeline.origins.get(key, DEFAULT)
            if origin == DEFAULT:
                notes.append(f"note: '{key}': {message}{DEFAULT_ADVICE}")
            else:
                problems.append(origin.problem(f"'{key}': {message}"))
    if problems:
        raise ConfigError(problems)
    return notes


def _check_directory(one: HubReference) -> None:
    folder = expanded(one.name)
    if not is_folder(folder):
        raise hub.HubError(missing_file(one.name, "directory"))
    if one.revision is not None:
        raise hub.HubError(f"'{one.name}' is a directory here; only the hub's have a 'revision'.")
    files = frozenset(path.name for path in folder.iterdir())
    if problem := one.missing(files, None) or one.model_problem(hub.config_in(folder)):
        raise hub.HubError(f"model directory '{one.name}' {problem}")


def _cached(
    kind: hub.Kind, name: str, revision: str | None, before: tuple[float, str]
) -> hub.Snapshot | None:
    """The commit of the cache that a revision last was, for other programs or for a run here."""
    if hub.is_commit(revision):
        return hub.cached_snapshot(kind, name, str(revision))
    known = [before, hub.cached_reference(kind, name, revision) or (0.0, "")]
    for _, commit in sorted(known, reverse=True):
        if hub.is_commit(commit) and (found := hub.cached_snapshot(kind, name, commit)):
            return found
    return None


def _last_commit(workspace: Workspace, kind: hub.Kind, name: str, asked: str) -> tuple[float, str]:
    """Return the time and the commit of the latest earlier pin of a name; 0 and "" if none."""
    for taken_at, pin in _earlier_pins(workspace):
        if (pin.get("kind"), pin.get("name"), pin.get("asked")) == (kind, name, asked):
            return taken_at, str(pin.get("commit", ""))
    return 0.0, ""


def _earlier_pins(workspace: Workspace) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the pins of earlier runs, the latest first; damaged records are skipped."""
    for run in islice(_runs(workspace), _RUNS_LOOKED_AT):
        try:
            written_at = run.plan_path.stat().st_mtime
            pins = read_json(run.plan_path)["hub"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if isinstance(pins, list):
            yield from ((written_at, pin) for pin in pins if isinstance(pin, dict))


def _runs(workspace: Workspace) -> Iterator[RunDirectory]:
    try:
        yield from list_runs(workspace)
    except RedcoFlowError:
        return
