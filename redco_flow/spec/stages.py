"""Resolve each stage of a pipeline: kind, Config's values, references, overrides.

A stage's Config is the pipeline's sections that its kind takes, with the stage's own body laid
over them. Knows one stage at a time; how stages depend on each other is `references.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import Problem
from redco_flow.local_paths import is_file, is_folder
from redco_flow.spec.data_files import as_list, missing_file
from redco_flow.spec.document import COMMAND_LINE, Document, KeyPath, written_at
from redco_flow.spec.interpolation import find_path
from redco_flow.spec.model import (
    ContentOf,
    ContentOfFolder,
    ContentOrName,
    InWorkspace,
    field_paths,
    is_open,
    marked,
)
from redco_flow.spec.names import dotted, module_problem, shown
from redco_flow.spec.overrides import (
    KeySpace,
    Override,
    TextPath,
    apply_override,
    for_pipeline,
    read_override,
)
from redco_flow.spec.pipeline import PipelineSection
from redco_flow.spec.problems import validated
from redco_flow.spec.recipe_settings import (
    RECIPES_PACKAGE,
    kind_with_settings,
    settings_type_of,
)
from redco_flow.spec.stage_kind import InputSlot, StageConfig, StageKind, find_stage_kind


@dataclass(frozen=True)
class StageBody:
    """One stage as the pipeline writes it.

    Args:
        own: the stage's body alone.
        config: the values for the kind's Config: sections with the body laid over them.
        references: the value given for each input slot that is given one.
        declaration_problems: what is wrong with the inputs and outputs that the stage declares.
    """

    name: str
    kind: StageKind
    own: Document
    config: Document
    references: Mapping[str, Any]
    declaration_problems: tuple[Problem, ...] = ()

    def may_lack(self, slot: InputSlot) -> bool:
        """Whether the stage does without an input of this slot."""
        return slot.is_optional or self.config.get((slot.replaced_by,)) is not None

    def full_path(self, path: KeyPath) -> KeyPath:
        """Return where in the pipeline a value of the Config is said."""
        if path and path[0] in self.kind.sections and not self.own.has(path):
            return path
        return ("stages", self.name, *path)


def stage_kind_of(document: Document, stage: str) -> StageKind:
    """Return the kind of a stage that the document names, with the settings of its recipe.

    Raises:
        ValueError: there is no such kind; the message says which there are.
    """
    body = document.get(("stages", stage))
    given = body.get("kind") if isinstance(body, dict) else None
    if given is not None and not isinstance(given, str):
        raise ValueError(f"'stages.{stage}.kind' must be text, not {shown(given)}")
    try:
        return _with_settings(find_stage_kind(given or stage), document, stage)
    except ValueError as error:
        if given:
            raise ValueError(f"stage '{stage}': {error}") from error
        raise ValueError(
            f"stage '{stage}' has no 'kind', and {error} Add `kind:` to it."
        ) from error


def _with_settings(kind: StageKind, document: Document, stage: str) -> StageKind:
    """Type a kind's `settings` by the recipe that the stage or the pipeline names."""
    if "settings" not in kind.sections or "recipe" not in kind.sections:
        return kind
    body = document.get(("stages", stage))
    own = body.get("recipe") if isinstance(body, dict) else None
    default = kind.config_type.model_fields["recipe"].default
    recipe = own or document.get(("recipe",)) or default
    try:
        found = settings_type_of(recipe) if isinstance(recipe, str) else None
        return kind_with_settings(kind, found) if found else kind
    except ValueError:
        return kind  # a mistake in the recipe is reported separately


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, in the file's order.

    Args:
        bodies: of those whose kind exists.
        broken: names of the others; nothing is known of what they take or produce.
        problems: what is wrong with those.
    """

    bodies: Mapping[str, StageBody]
    broken: frozenset[str]
    problems: tuple[Problem, ...]


def read_stages(document: Document) -> Stages:
    """Return what the document says about its stages."""
    bodies: dict[str, StageBody] = {}
    problems: list[Problem] = []
    written = document.get(("stages",))
    names = list(written) if isinstance(written, dict) else []
    for name in names:
        if not isinstance(written[name], dict | None):
            continue  # the pipeline's own model says so already
        try:
            bodies[name] = _read_stage(document, name)
        except ValueError as error:
            path = ("stages", name, "kind")
            problems.append(document.origin(path).problem(str(error)))
    return Stages(bodies, frozenset(names) - frozenset(bodies), tuple(problems))


def validate_stage(body: StageBody) -> tuple[StageConfig | None, list[Problem]]:
    """Return the stage's Config, or None with what is wrong with it."""
    return validated(
        body.kind.config_type,
        body.config,
        root=f"stage '{body.name}'",
        full_path=body.full_path,
        extra_keys={(): {"kind", *(() if body.kind.declare else body.kind.inputs)}},
    )


@dataclass(frozen=True)
class CheckedStage:
    """A stage after the checks of its Config: what later checks get to see of it.

    Args:
        config: None where its values or its recipe were refused.
        has_its_files: whether all files, folders and paths that the Config names can be used.
        problems: what was refused.
    """

    config: StageConfig | None
    has_its_files: bool
    problems: tuple[Problem, ...]


def check_stage(body: StageBody, workspace: Path | None) -> CheckedStage:
    """Check a stage's values, then the recipe, the files and the paths that they name."""
    config, wrong_values = validate_stage(body)
    if config is None:
        return CheckedStage(None, has_its_files=False, problems=tuple(wrong_values))
    recipe = _placed(body, _recipe_problems(body, config))
    files = _placed(body, _path_problems(config, workspace), is_of_machine=True)
    return CheckedStage(None if recipe else config, not files, (*recipe, *files))


def _placed(
    body: StageBody, found: Iterable[tuple[KeyPath, str]], *, is_of_machine: bool = False
) -> list[Problem]:
    """Return (path in the Config, message) as problems with their place in the file."""
    return [
        body.config.origin(path).problem(
            f"'{dotted(body.full_path(path))}': {message}", is_of_machine=is_of_machine
        )
        for path, message in found
    ]


def data_problems(body: StageBody, config: StageConfig) -> list[Problem]:
    """Return what a quick look into the stage's data shows to be wrong."""
    return _placed(body, body.kind.data_problems(config))


def input_problems(body: StageBody, config: StageConfig) -> list[Problem]:
    """Return what is wrong with which inputs a stage is given, as its settings are."""
    return _placed(body, body.kind.input_problems(config, body.references))


def searched_problems(body: StageBody, config: StageConfig) -> list[Problem]:
    """Return which written settings another key leaves to a search."""
    found = body.kind.searched_settings(config).items()
    return _placed(
        body,
        [
            ((name,), f"`{key}: {getattr(config, key)}` chooses it: leave one of the two out")
            for key, settings in found
            for name in settings
            if body.config.has((name,))
        ],
    )


DEFAULT_ADVICE = "; it is the default, and an error only where the data need it"


def upstream_problems(
    body: StageBody,
    config: StageConfig,
    upstream: Mapping[str, tuple[StageBody, StageConfig]],
    outputs: Mapping[str, str],
) -> Iterator[tuple[Problem, bool]]:
    """Yield which settings of upstream stages do not go with this stage's, and if they are written.

    Of a default nothing says that it is needed.

    Args:
        outputs: which output of its upstream stage each slot takes.
    """
    configs = {slot: config for slot, (_, config) in upstream.items()}
    for slot, path, message in body.kind.upstream_problems(config, configs, outputs):
        producer, _ = upstream[slot]
        if not path:
            for problem in _placed(body, [(body.kind.slot_path(slot), message)]):
                yield problem, True
            continue
        for problem in _placed(producer, [(path, message)]):
            yield problem, producer.config.has(path)


def _recipe_problems(body: StageBody, config: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    recipe = getattr(config, "recipe", None) if "recipe" in body.kind.sections else None
    if isinstance(recipe, str) and (problem := recipe_problem(recipe)):
        yield ("recipe",), problem


def _path_problems(config: StageConfig, workspace: Path | None) -> Iterator[tuple[KeyPath, str]]:
    folders = {path for path, _ in marked(config, ContentOfFolder)}
    names = {path for path, file in marked(config, ContentOrName) if "/" not in str(file)}
    for path, value in marked(config, ContentOf):
        if path in names:
            continue
        for file in [] if isinstance(value, dict) else as_list(value):
            if path not in folders and not is_file(file):
                yield path, missing_file(file)
            if path in folders and not is_folder(file):
                yield path, missing_file(file, "folder")
    for path, relative in marked(config, InWorkspace):
        if relative is not None and workspace is not None:
            try:
                inside(workspace, relative)
            except ValueError as error:
                yield path, str(error)


def recipe_problem(recipe: str) -> str | None:
    """Say why there is no such recipe, or None where there is one; nothing is imported."""
    return module_problem(RECIPES_PACKAGE, recipe, what="recipe", defines=("build", "loss_fn"))


def _read_stage(document: Document, name: str) -> StageBody:
    kind = stage_kind_of(document, name)
    own = document.section(("stages", name))
    if own.values is None:
        own = Document({}, own.origins)
    for slot_name, slot in kind.inputs.items():
        own = _without_options(own, slot_name, slot)
    problems: tuple[Problem, ...] = ()
    if kind.declare is not None:
        kind, problems = _with_declaration(document, name, kind, own)
    paths = {slot: kind.slot_path(slot) for slot in kind.inputs}
    references = {slot: own.get(path) for slot, path in paths.items() if own.has(path)}
    config = Document({}, {(): own.origin(())})
    for section in kind.sections:
        if document.get((section,)) is not None:
            config = config.with_part((section,), document.section((section,)))
        elif section != "recipe":  # a recipe has no default, the other sections' keys have
            config = config.with_part((section,), written_at({}, own.origin(())))
    body = own.without(("kind",))
    for path in paths.values():
        body = body.without(path)
    return StageBody(name, kind, own, config.merged(body), references, problems)


def _without_options(own: Document, name: str, slot: InputSlot) -> Document:
    """Return a stage's body with a slot's reference alone, and its options as the settings."""
    written = own.get((name,))
    known = {slot.kind, *slot.options}
    if not isinstance(written, dict) or slot.kind not in written or not set(written) <= known:
        return own
    for key, setting in slot.options.items():
        if key in written:
            own = own.with_part((setting,), own.section((name, key)))
    return own.with_part((name,), own.section((name, slot.kind)))


def _with_declaration(
    document: Document, name: str, kind: StageKind, own: Document
) -> tuple[StageKind, tuple[Problem, ...]]:
    """Return the kind with the inputs and outputs of this stage, and what is wrong with them."""
    assert kind.declare is not None
    declared = kind.declare(own.values, [one for one in document.get(("stages",)) if one != name])
    problems = (
        own.origin(path).problem(f"'{dotted(('stages', name, *path))}': {message}")
        for path, message in declared.problems
    )
    kind = replace(kind, inputs=declared.inputs, outputs=declared.outputs)
    return kind, tuple(problems)


def inside(root: Path, relative: str) -> Path:
    """Return `root/relative`, a path inside of `root`.

    Raises:
        ValueError: the path is absolute, climbs out by `..`, or passes a symbolic link that
            leads out of `root`.
    """
    path = Path(relative)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"{relative!r} leads out of the workspace {root}; give a relative path without '..'"
        )
    if not (root / path).resolve().is_relative_to(root.resolve()):
        raise ValueError(
            f"{relative!r} passes a symbolic link that leads out of the workspace {root}; remove "
            f"the link or choose another path"
        )
    return root / path


# What one stage needs says nothing of the others: each is asked for by its full name.
_OF_ONE_STAGE = ("resources", "runs_on")
_NEW_STAGE = re.compile(r"stages\.([^.]+)(\.kind)?")


@dataclass(frozen=True)
class Overridden:
    """A document with the command line's overrides over it.

    Args:
        problems: what is wrong with the overrides.
        notes: which settings a key set, where it set several.
    """

    document: Document
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def with_overrides(document: Document, overrides: Sequence[str]) -> Overridden:
    """Lay the overrides over a document, in their order."""
    problems: list[Problem] = []
    notes: list[str] = []
    given: set[TextPath] = set()
    for text in for_pipeline(overrides):
        override, more = read_override(text)
        problems += more
        if override is None:
            continue
        try:
            paths = _find(document, override)
        except ValueError as error:
            problems.append(COMMAND_LINE.problem(str(error)))
            continue
        for path in paths:
            document = apply_override(document, override, path)
            if path in given:
                notes.append(
                    f"note: '{'.'.join(path)}' is given more than once on the command line; the "
                    "last value counts"
                )
            given.add(path)
        if len(paths) > 1:
            what = "deletes" if override.is_deletion else "sets"
            notes.append(f"'{override.key}' {what} {', '.join(map('.'.join, paths))}")
    return Overridden(document, tuple(problems), tuple(notes))


def _find(document: Document, override: Override) -> list[TextPath]:
    new = _NEW_STAGE.fullmatch(override.key)
    if new and not override.is_deletion and (new.group(2) or isinstance(override.value, dict)):
        return [("stages", new.group(1), *(["kind"] if new.group(2) else []))]
    if override.is_deletion and (written := find_path(document.values, override.key)):
        return [tuple(map(str, written))]  # whatever is written can go, a mistake too
    return key_space(document).find(override.key)


def key_space(document: Document) -> KeySpace:
    """Return every setting of the pipeline that the document describes."""
    space = KeySpace()
    for path, info in field_paths(PipelineSection):
        if path != ("stages",):
            space.settings.add(path)
            if is_open(info.annotation):
                space.open_paths.add(path)
    stages = document.get(("stages",))
    for name in stages if isinstance(stages, dict) else ():
        _add_stage(space, document, name)
    return space


def _add_stage(space: KeySpace, document: Document, name: str) -> None:
    root = ("stages", name)
    space.settings |= {root, (*root, "kind")}
    try:
        kind = stage_kind_of(document, name)
    except ValueError:
        space.open_paths.add(root)  # that there is no such kind is said elsewhere
        return
    space.settings |= {(*root, slot) for slot in kind.inputs}
    for slot, declared in kind.inputs.items():
        if isinstance(document.get((*root, slot)), dict):  # {checkpoint: …, optimizer: …}
            space.hidden |= {(*root, slot, key) for key in (declared.kind, *declared.options)}
    fields = kind.config_type.model_fields
    # What would take an input's place, such as `pretrained`, in a file that does not have it.
    replacing = {slot.replaced_by for slot in kind.inputs.values()}
    replacing = {key for key in replacing if not document.has((*root, key))}
    for path, info in field_paths(kind.config_type):
        full = (*root, *path)
        # `optimizer` is the stage's, and never `keep.optimizer`.
        is_of_section = path[0] in kind.sections or (len(path) > 1 and path[-1] in fields)
        if is_of_section or path[0] in replacing:
            space.hidden.add(full)
        else:
            space.settings.add(full)
            if path[0] not in _OF_ONE_STAGE:
                space.meanings[full] = (path, repr(info))
        if is_open(info.annotation):
            space.open_paths.add(full)
