"""Lay the command line's overrides over a pipeline's document.

Which keys exist depends on the stages and their kinds, which an override may itself change: the
keys are collected anew for each override, in the order of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from redco_flow.errors import Problem
from redco_flow.spec.document import COMMAND_LINE, Document
from redco_flow.spec.fields import field_paths, is_open
from redco_flow.spec.interpolation import find_path
from redco_flow.spec.overrides import (
    KeySpace,
    Override,
    TextPath,
    apply_override,
    for_pipeline,
    read_override,
)
from redco_flow.spec.pipeline import PipelineSection
from redco_flow.spec.stage_body import stage_kind_of

# What one stage needs says nothing of the others: each is asked for by its full name.
_RESOURCES = "resources"
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
    for path, info in field_paths(kind.config_type):
        full = (*root, *path)
        if path[0] in kind.sections:
            space.hidden.add(full)
        else:
            space.settings.add(full)
            if path[0] != _RESOURCES:
                space.meanings[full] = _meaning(path, info)
        if is_open(info.annotation):
            space.open_paths.add(full)


def _meaning(path: TextPath, info: FieldInfo) -> tuple[TextPath, str]:
    """Return what a stage's setting means: its place in the Config, its type and its default."""
    return path, repr(info)
