"""Collect what determines a stage's result: settings, input artifacts, raw data, code.

The one place where a pipeline's stage becomes `Ingredients`: `plan`, `run` and `resume` all ask
here, so that a plan cannot differ from the run. Knows nothing of what was computed before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.spec.load import ResolvedStage
from redco_flow.spec.stage_kind import StageKind, find_stage_kind
from redco_flow.tracking.code_digest import module_digests
from redco_flow.tracking.file_digests import digest_files
from redco_flow.tracking.workspace import Workspace


def stage_ingredients(
    stage: ResolvedStage, input_ids: Mapping[str, Sequence[str]], workspace: Workspace
) -> dict[str, Any]:
    """Return the stage's ingredients, ready for `tracking.fingerprint.fingerprint`.

    Args:
        stage: as the pipeline was resolved.
        input_ids: artifact ids by input slot, in the order of the pipeline's references.
        workspace: its cache remembers the digests of data files.

    Raises:
        WorkspaceError: a data file is missing or unreadable.
        UsageError: a module that the stage's code names does not exist.
    """
    kind = find_stage_kind(stage.kind)
    return {
        "kind": stage.kind,
        "settings": dict(stage.settings),
        "inputs": {slot: list(ids) for slot, ids in input_ids.items()},
        "data": _data(kind, stage, workspace),
        "code": module_digests([kind.module, *kind.code_modules(stage.config)]),
    }


def _data(kind: StageKind, stage: ResolvedStage, workspace: Workspace) -> dict[str, Any]:
    """Digests of data files by file name, and the identity of data that is no file.

    A folder's name is no part of it: the same file elsewhere is the same data.
    """
    paths = list(kind.data_files(stage.config))
    digests = digest_files(workspace, paths)
    named = {name: digests[path] for name, path in zip(_unique_names(paths), paths, strict=True)}
    return {**named, **kind.data_identity(stage.config)}


def _unique_names(paths: Sequence[Path]) -> Iterator[str]:
    """Yield each file's name; the second of a name gets `#2`, the third `#3`."""
    seen: Counter[str] = Counter()
    for path in paths:
        seen[path.name] += 1
        count = seen[path.name]
        yield f"{path.name}#{count}" if count > 1 else path.name
