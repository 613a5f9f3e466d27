"""What a pipeline says about each stage: its kind, its Config's values, its references.

A stage's Config is the pipeline's sections that its kind takes, with the stage's own body laid
over them. Knows one stage at a time; how stages depend on each other is `references.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from redco_flow.errors import Problem
from redco_flow.spec.document import Document, Path, is_inside, written_at
from redco_flow.spec.fields import marked
from redco_flow.spec.mistakes import validated
from redco_flow.spec.model import ContentOf, InWorkspace
from redco_flow.spec.modules import module_problem
from redco_flow.spec.stage_kind import StageConfig, StageKind, find_stage_kind
from redco_flow.spec.wording import dotted, shown

RECIPES_PACKAGE = "redco_flow.recipes"


@dataclass(frozen=True)
class StageBody:
    """One stage as the pipeline writes it.

    Args:
        own: the stage's body alone.
        config: the values for the kind's Config: sections with the body laid over them.
        references: the value given for each input slot that is given one.
    """

    name: str
    kind: StageKind
    own: Document
    config: Document
    references: Mapping[str, Any]

    def full_path(self, path: Path) -> Path:
        """Return where in the pipeline a value of the Config is said."""
        if path and path[0] in self.kind.sections and not self._is_own(path):
            return path
        return ("stages", self.name, *path)

    def _is_own(self, path: Path) -> bool:
        value = self.own.values
        for part in path:
            if not is_inside(value, part):
                return False
            value = value[part]
        return True


def stage_kind_of(document: Document, stage: str) -> StageKind:
    """Return the kind of a stage that the document names.

    Raises:
        ValueError: there is no such kind; the message says which there are.
    """
    body = document.get(("stages", stage))
    given = body.get("kind") if isinstance(body, dict) else None
    if given is not None and not isinstance(given, str):
        raise ValueError(f"'stages.{stage}.kind' must be text, not {shown(given)}")
    try:
        return find_stage_kind(given or stage)
    except ValueError as error:
        if given:
            raise ValueError(f"stage '{stage}': {error}") from error
        raise ValueError(
            f"stage '{stage}' has no 'kind', and its name is none: {error} Add `kind:` to it."
        ) from error


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
        extra_keys={(): {"kind", *body.kind.inputs}},
    )


def surroundings_problems(
    body: StageBody, config: StageConfig, workspace: FilePath | None
) -> Iterator[Problem]:
    """Yield what is wrong with the recipe, the data files and the paths that a Config names."""
    for path, message in _surroundings(body, config, workspace):
        full = dotted(body.full_path(path))
        yield body.config.origin(path).problem(f"'{full}': {message}")


def data_problems(body: StageBody, config: StageConfig) -> Iterator[Problem]:
    """Yield what a quick look into the stage's data shows to be wrong."""
    for path, message in body.kind.data_problems(config):
        full = dotted(body.full_path(path))
        yield body.config.origin(path).problem(f"'{full}': {message}")


def _surroundings(
    body: StageBody, config: StageConfig, workspace: FilePath | None
) -> Iterator[tuple[Path, str]]:
    recipe = getattr(config, "recipe", None) if "recipe" in body.kind.sections else None
    if isinstance(recipe, str) and (problem := recipe_problem(recipe)):
        yield ("recipe",), problem
    for path, file in marked(config, ContentOf):
        if file is not None and not FilePath(file).is_file():
            yield path, f"there is no file {shown(file)}"
    for path, relative in marked(config, InWorkspace):
        if relative is not None and workspace is not None:
            try:
                inside(workspace, relative)
            except ValueError as error:
                yield path, str(error)


def recipe_problem(recipe: str) -> str | None:
    """Say why there is no such recipe, or None where there is one; nothing is imported."""
    return module_problem(RECIPES_PACKAGE, recipe, what="recipe", defines="build")


def _read_stage(document: Document, name: str) -> StageBody:
    kind = stage_kind_of(document, name)
    own = document.section(("stages", name))
    if own.values is None:
        own = Document({}, own.origins)
    references = {slot: own.values[slot] for slot in kind.inputs if slot in own.values}
    config = Document({}, {(): own.origin(())})
    for section in kind.sections:
        if document.get((section,)) is not None:
            config = config.with_part((section,), document.section((section,)))
        elif section != "recipe":  # a recipe has no default, the other sections' keys have
            config = config.with_part((section,), written_at({}, own.origin(())))
    body = own.without(("kind",))
    for slot in kind.inputs:
        body = body.without((slot,))
    return StageBody(name, kind, own, config.merged(body), references)


def inside(root: FilePath, relative: str) -> FilePath:
    """Return `root/relative`, a path inside of `root`.

    Raises:
        ValueError: the path is absolute, climbs out by `..`, or passes a symbolic link that
            leads out of `root`.
    """
    path = FilePath(relative)
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
