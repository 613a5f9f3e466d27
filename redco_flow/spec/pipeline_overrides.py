"""Lay the command line's overrides over a pipeline's document.

Which keys exist depends on the stages and their kinds, which an override may itself change: the
keys are collected anew for each override, in the order of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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

_NEW_STAGE = re.compile(r"stages\.([^.]+)(\.kind)?")


def with_overrides(document: Document, overrides: Sequence[str]) -> tuple[Document, list[Problem]]:
    """Return the document with the overrides over it, and what is wrong with them."""
    problems: list[Problem] = []
    for text in for_pipeline(overrides):
        override, more = read_override(text)
        problems += more
        if override is None:
            continue
        try:
            document = apply_override(document, override, _find(document, override))
        except ValueError as error:
            problems.append(COMMAND_LINE.problem(str(error)))
    return document, problems


def _find(document: Document, override: Override) -> TextPath:
    new = _NEW_STAGE.fullmatch(override.key)
    if new and not override.is_deletion and (new.group(2) or isinstance(override.value, dict)):
        return ("stages", new.group(1), *(["kind"] if new.group(2) else []))
    if override.is_deletion and (written := find_path(document.values, override.key)):
        return tuple(map(str, written))  # whatever is written can go, a mistake too
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
        (space.hidden if path[0] in kind.sections else space.settings).add(full)
        if is_open(info.annotation):
            space.open_paths.add(full)
