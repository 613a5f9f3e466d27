"""Load a pipeline: layers, overrides, references, and every mistake at once.

Defaults, then the profile's, then the file, then the command line. Reads one file and starts
nothing; what it returns is all that planning, fingerprints and workers need to know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import Problem
from redco_flow.spec.data_files import expand_patterns, names_of
from redco_flow.spec.document import Document, Origin, leaves
from redco_flow.spec.groups import group_problems
from redco_flow.spec.interpolation import escape, interpolate
from redco_flow.spec.model import ContentOf, OnlyWhereSet, marked
from redco_flow.spec.names import dotted
from redco_flow.spec.notify import NotifySection, mail_server_problems
from redco_flow.spec.pipeline import PipelineSection, Resources
from redco_flow.spec.problems import raise_if_any, validated
from redco_flow.spec.profile import Profile, load_profile, read_stage_profile
from redco_flow.spec.references import InputRef, References, cycles_of, order_of
from redco_flow.spec.secret_check import secret_problems
from redco_flow.spec.stage_kind import StageConfig
from redco_flow.spec.stages import (
    DEFAULT_ADVICE,
    StageBody,
    check_stage,
    data_problems,
    input_problems,
    read_stages,
    recipe_problem,
    searched_problems,
    upstream_problems,
    with_overrides,
)
from redco_flow.spec.yaml import parse_file


def settings_of(config: StageConfig) -> dict[str, Any]:
    """Return the Config as plain JSON values, without what does not determine the result."""
    settings = config.model_dump(mode="json")
    del settings["resources"]
    for path, _ in (one for mark in config.LEFT_OUT for one in marked(config, mark)):
        if path[0] != "resources":
            del _holder(settings, path)[path[-1]]
    for path, value in marked(config, OnlyWhereSet):
        if not value:
            del _holder(settings, path)[path[-1]]
    for path, file in marked(config, ContentOf):
        if isinstance(file, dict):
            names = {key: one.rpartition("/")[2] for key, one in file.items()}
            _holder(settings, path)[path[-1]] = names
        elif isinstance(file, list):
            _holder(settings, path)[path[-1]] = names_of(file)
        elif file is not None:
            _holder(settings, path)[path[-1]] = file.rpartition("/")[2]
    return settings


def _holder(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for part in path[:-1]:
        values = values[part]
    return values


__all__ = [
    "InputRef",
    "Origin",
    "ResolvedPipeline",
    "ResolvedStage",
    "load_pipeline",
    "load_profile",
]

Inputs = dict[str, tuple[InputRef, ...]]


@dataclass(frozen=True)
class ResolvedStage:
    """One stage, ready to be fingerprinted and run.

    Args:
        settings: what of the Config enters the fingerprint.
        inputs: what each input slot takes, in the pipeline's order.
    """

    name: str
    kind: str
    config: StageConfig
    settings: dict[str, Any]
    resources: Resources
    inputs: Inputs


@dataclass(frozen=True)
class ResolvedPipeline:
    """A pipeline without mistakes.

    Args:
        path: the file, as given.
        stages: in an order in which they can run.
        origins: of every leaf: `stages.train.learning_rate`, `data.source_key`; a stage's copy of
            a section (`stages.train.data.source_key`) has the origin of the section.
        document: the whole pipeline, defaults included; loading it again gives the same.
        notify: whom to tell of what.
        notes: what the user should know of the overrides, the data's patterns, lengths that are
            defaults, and `notify`.
        profiles: of the stages that have one (`stages.NAME.runs_on`); known where the pipeline was
            loaded for a profile.
    """

    name: str
    path: Path
    description: str
    stages: dict[str, ResolvedStage]
    origins: dict[str, Origin]
    document: dict[str, Any]
    notify: NotifySection | None = None
    notes: tuple[str, ...] = ()
    profiles: Mapping[str, Profile] = field(default_factory=dict)

    def profile_of(self, stage: str, profile: Profile) -> Profile:
        """Return the profile of a stage.

        Args:
            profile: the run's, of stages without one.
        """
        return self.profiles.get(stage, profile)

    def stage_origins(self, stage: str) -> dict[str, Origin]:
        """Return the origins of a stage's leaves, by key of its Config or input slot."""
        prefix = f"stages.{stage}."
        return {
            key.removeprefix(prefix): origin
            for key, origin in self.origins.items()
            if key.startswith(prefix)
        }


@dataclass(frozen=True)
class PipelineFile:
    """A pipeline's file as it was when it was read.

    Args:
        document: its content, as far as it can be read.
        problems: the mistakes found in reading it.
    """

    path: Path
    document: Document
    problems: tuple[Problem, ...]

    @classmethod
    def read(cls, path: str | Path) -> PipelineFile:
        """Read the file once, for all that is to be made of it."""
        document, problems = parse_file(Path(path))
        return cls(Path(path), document, tuple(problems))


def load_pipeline(
    file: str | Path | PipelineFile,
    overrides: Sequence[str] = (),
    profile: Profile | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    looks_into_data: bool = False,
) -> ResolvedPipeline:
    """Read a pipeline with the command line's overrides over it and the profile's defaults under.

    Args:
        file: its path, or what was read of it before.
        overrides: `key=value` and `~key`; those that begin with `profile.` are the profile's.
        looks_into_data: whether mistakes are reported, too, that the head of each data file shows,
            and settings of one stage that do not go with another's.

    Raises:
        ConfigError: every mistake in the file, the overrides and the profile's defaults.
    """
    file = file if isinstance(file, PipelineFile) else PipelineFile.read(file)
    document, problems = _layers(file, profile)
    overridden = with_overrides(document, overrides)
    document = overridden.document
    problems += overridden.problems
    document, bad_references = interpolate(document, environ)
    expanded = expand_patterns(document)
    document = expanded.document
    refused = [*bad_references, *expanded.problems, *secret_problems(document)]
    positions = {(p.source, p.line, p.column) for p in refused if p.line}
    loading = _Loading(file.path, document, Path(profile.workspace) if profile else None)
    profiles = loading.stage_profiles(profile) if profile else {}
    if looks_into_data:
        loading.look_into_data()
    # What is refused for itself is not also of a wrong type.
    problems += [p for p in loading.problems if (p.source, p.line, p.column) not in positions]
    raise_if_any(problems + refused)
    return replace(
        loading.resolved(),
        profiles=profiles,
        notes=(
            *overridden.notes,
            *expanded.notes,
            *loading.notes,
            *loading.unset_variables(environ),
        ),
    )


def check_for_elsewhere(file: PipelineFile, overrides: Sequence[str], profile: Profile) -> str:
    """Return a pipeline's name, after the checks that need nothing of the machine that runs it.

    Files and variables of the environment that are missing here may be there.

    Args:
        overrides: as of `load_pipeline`.

    Raises:
        ConfigError: every mistake that shows here.
    """
    document, problems = _layers(file, profile)
    overridden = with_overrides(document, overrides)
    document, references = interpolate(overridden.document, os.environ)
    loading = _Loading(file.path, document, None)
    refused = [*problems, *overridden.problems, *references, *secret_problems(document)]
    positions = {(p.source, p.line, p.column) for p in references if p.line}
    refused += [p for p in loading.problems if (p.source, p.line, p.column) not in positions]
    raise_if_any([problem for problem in refused if not problem.is_of_machine])
    return loading.pipeline.name if loading.pipeline else file.path.stem


def _layers(file: PipelineFile, profile: Profile | None) -> tuple[Document, list[Problem]]:
    """Return the file over the profile's defaults; nothing else is said of an unreadable file."""
    document, problems = file.document, list(file.problems)
    if document.values is None:
        raise_if_any(problems)
        document = Document({}, document.origins)
    if not isinstance(document.values, dict):
        message = "a pipeline must be a mapping of keys to values: name, data, stages, …"
        raise_if_any([*problems, document.origin(()).problem(message)])
    if profile is not None:  # without one it is a run's own record, which has them from a profile
        problems += mail_server_problems(document)
        document = profile.defaults_under(document).merged(document)
    return document, problems


class _Loading:
    """The parts of a pipeline that are loaded so far, and its mistakes."""

    def __init__(self, path: Path, document: Document, workspace: Path | None) -> None:
        self.path = path
        self.document = document
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.pipeline = self._validated_pipeline()
        self.stages = read_stages(document)
        self.bodies = self.stages.bodies
        self.problems += self.stages.problems
        # Each check gets only what the checks before it accepted.
        checked = {name: check_stage(body, workspace) for name, body in self.bodies.items()}
        self.configs = {name: one.config for name, one in checked.items() if one.config}
        self.readable = [name for name in self.configs if checked[name].has_its_files]
        for name, body in self.bodies.items():
            self.problems += [*body.declaration_problems, *checked[name].problems]
        self.inputs = {name: self._inputs_of(body) for name, body in self.bodies.items()}
        for name, config in self.configs.items():
            self.problems += input_problems(self.bodies[name], config)
        self.order = self._order()
        placed = {name: self.bodies[name].config for name in self.configs}
        kinds = {name: self.bodies[name].kind for name in self.configs}
        order = [name for name in self.order if name in self.configs]
        self.problems += group_problems(order, kinds, self.configs, self._upstream_names(), placed)

    def stage_profiles(self, profile: Profile) -> dict[str, Profile]:
        """Return the profiles of stages that have one, over the run's; collects their mistakes."""
        found = {}
        for name, config in self.configs.items():
            if config.runs_on:
                own = self.bodies[name].config.section(("runs_on",))
                of_stage, problems = read_stage_profile(name, own, profile)
                self.problems += problems
                if of_stage is not None:
                    found[name] = of_stage
        return found

    def look_into_data(self) -> None:
        """Collect the mistakes that data files and other stages show."""
        for name in self.readable:
            self.problems += data_problems(self.bodies[name], self.configs[name])
        for name, config in self.configs.items():
            self.problems += searched_problems(self.bodies[name], config)
            for problem, is_written in upstream_problems(
                self.bodies[name], config, *self._upstream(name)
            ):
                if is_written:
                    self.problems.append(problem)
                else:
                    self.notes.append(f"note: {problem.message}{DEFAULT_ADVICE}")

    def _upstream(
        self, name: str
    ) -> tuple[dict[str, tuple[StageBody, StageConfig]], dict[str, str]]:
        """The accepted stage that each input of one artifact comes from, and which output."""
        refs = {
            slot: refs[0]
            for slot, refs in self.inputs[name].items()
            if len(refs) == 1 and refs[0].stage in self.configs
        }
        stages = {
            slot: (self.bodies[ref.stage], self.configs[ref.stage]) for slot, ref in refs.items()
        }
        return stages, {slot: ref.output for slot, ref in refs.items()}

    def unset_variables(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Say which addresses of `notify` the environment lacks: they would get no notice."""
        notify = self.pipeline.notify if self.pipeline else None
        for name in notify.variables if notify else ():
            if not environ.get(name):
                yield f"'notify': environment variable {name} is not set: no notice is sent there"

    def resolved(self) -> ResolvedPipeline:
        """Return the pipeline; there were no problems."""
        assert self.pipeline is not None
        stages = {name: self._resolved_stage(name) for name in self.order}
        return ResolvedPipeline(
            name=self.pipeline.name,
            path=self.path,
            description=self.pipeline.description,
            stages=stages,
            origins=self._origins(),
            document=escape(self._document()),
            notify=self.pipeline.notify,
        )

    def _validated_pipeline(self) -> PipelineSection | None:
        pipeline, problems = validated(PipelineSection, self.document)
        self.problems += problems
        if pipeline is None:
            return None
        if pipeline.recipe is not None and (problem := recipe_problem(pipeline.recipe)):
            self.problems.append(self.document.origin(("recipe",)).problem(f"'recipe': {problem}"))
        return pipeline

    def _inputs_of(self, body: StageBody) -> Inputs:
        inputs: Inputs = {}
        for slot in body.kind.inputs:
            try:
                found = References(self.stages, self.configs).resolve(body.name, slot)
                if found or not body.may_lack(body.kind.inputs[slot]):
                    inputs[slot] = found
            except ValueError as error:
                origin = body.own.origin(body.kind.slot_path(slot))
                self.problems.append(origin.problem(str(error)))
        return inputs

    def _order(self) -> list[str]:
        names = list(self.bodies)
        upstream = self._upstream_names()
        for cycle in cycles_of(names, upstream):
            circle = " needs ".join(f"'{name}'" for name in [*cycle, cycle[0]])
            slots = self.inputs[cycle[0]].items()
            slot = next(s for s, refs in slots if any(ref.stage in cycle for ref in refs))
            body = self.bodies[cycle[0]]
            origin = body.own.origin(body.kind.slot_path(slot))
            self.problems.append(origin.problem(f"stages form a circle: {circle}"))
        return order_of(names, upstream)

    def _upstream_names(self) -> dict[str, set[str]]:
        return {
            name: {ref.stage for refs in inputs.values() for ref in refs if not ref.alias}
            for name, inputs in self.inputs.items()
        }

    def _resolved_stage(self, name: str) -> ResolvedStage:
        config = self.configs[name]
        return ResolvedStage(
            name=name,
            kind=self.bodies[name].kind.name,
            config=config,
            settings=settings_of(config),
            resources=config.resources,
            inputs=self.inputs[name],
        )

    def _document(self) -> dict[str, Any]:
        """The whole pipeline as plain values; a stage repeats of sections only what it changes."""
        assert self.pipeline is not None
        document = self.pipeline.model_dump(mode="json", exclude={"stages"})
        document["stages"] = {
            name: self._stage_document(body) for name, body in self.bodies.items()
        }
        return document

    def _stage_document(self, body: StageBody) -> dict[str, Any]:
        config = self.configs[body.name].model_dump(mode="json")
        values: dict[str, Any] = {"kind": body.kind.name}
        declared: dict[str, Any] = {}
        for slot, refs in self.inputs[body.name].items():
            if body.kind.declare is not None:
                of_stage = f"{refs[0].stage}/{refs[0].output}"
                declared[slot] = refs[0].text() if refs[0].alias else of_stage
                continue
            texts = [ref.text() for ref in refs]
            values[slot] = texts if body.kind.inputs[slot].many else texts[0]
        if declared:
            config["inputs"] |= declared
        for key, value in config.items():
            if key not in body.kind.sections:
                values[key] = value
            elif key in body.own.values:
                values[key] = _chosen(value, body.own.values[key])
        return values

    def _origins(self) -> dict[str, Origin]:
        assert self.pipeline is not None
        sections = self.pipeline.model_dump(mode="json", exclude={"stages"})
        origins = {dotted(leaf): self.document.leaf_origin(leaf) for leaf in leaves(sections)}
        for name, body in self.bodies.items():
            prefix = f"stages.{name}"
            for path in (("kind",), *map(body.kind.slot_path, body.kind.inputs)):
                origins[f"{prefix}.{dotted(path)}"] = body.own.leaf_origin(path)
            for leaf in leaves(self.configs[name].model_dump(mode="json")):
                origins[f"{prefix}.{dotted(leaf)}"] = body.config.leaf_origin(leaf)
        return origins


def _chosen(value: Any, written: Any) -> Any:
    """Return of a section's values those that a stage writes itself."""
    if isinstance(value, dict) and isinstance(written, dict):
        return {key: _chosen(value[key], part) for key, part in written.items() if key in value}
    return value
