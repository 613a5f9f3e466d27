"""List what a host has of an attempt, and compare the list with the launcher's workspace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypedDict

from redco_flow.launch.hosts.follow import is_mirrored
from redco_flow.records import read_json, readable_digest
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.results import find_result, read_result
from redco_flow.tracking.workspace import Workspace

_OWN = re.compile(
    r"(call|cancel|job|result)\.json|ranks/\d+/(lock|heartbeat|runner\.json)|(.*/)?\.[^/]+(/.+)?"
)
"""Files that are needed nowhere else: the host's own, the announcement of the result, writes that
were cut short."""


class Inventory(TypedDict):
    """The files of an attempt on a host.

    Args:
        records: the small JSON files that a launcher takes, by name.
        digests: BLAKE3 of each other file that may be needed elsewhere; "" if it cannot be read.
        has_result: whether it has the result of the attempt's stage.
        steps: of the stage's checkpoints.
    """

    records: dict[str, Any]
    digests: dict[str, str]
    has_result: bool
    steps: list[int]


def take_inventory(workspace: Workspace, attempt: AttemptDirectory, fingerprint: str) -> Inventory:
    """Return what is here of an attempt; `workspace` is the host's."""
    records, digests = {}, {}
    for path in sorted(attempt.path.rglob("*")):
        name = path.relative_to(attempt.path).as_posix()
        if path.is_dir() or _OWN.fullmatch(name):
            continue
        record = _record(path) if name.endswith(".json") and is_mirrored(name) else None
        if record is None:
            digests[name] = readable_digest(path)
        else:
            records[name] = record
    return {
        "records": records,
        "digests": digests,
        "has_result": read_result(workspace, fingerprint) is not None,
        "steps": workspace.committed_steps(fingerprint),
    }


def what_is_missing(
    found: Inventory, workspace: Workspace, attempt: AttemptDirectory, fingerprint: str
) -> str:
    """Say what of a host's inventory is not in the launcher's workspace; "" where all of it is."""
    records, digests = found["records"].items(), found["digests"].items()
    differing = [name for name, value in records if _record(attempt.path / name) != value]
    differing += [
        name for name, one in digests if not one or readable_digest(attempt.path / name) != one
    ]
    if differing:
        return f"its {differing[0]} is not in the launcher's workspace"
    if find_result(workspace, fingerprint) is not None:
        return ""
    if found["has_result"]:
        return "its result is not in the launcher's workspace"
    steps = workspace.committed_steps(fingerprint)
    if only_there := [step for step in found["steps"] if step not in steps]:
        return f"its checkpoint {only_there[-1]} is not in the launcher's workspace"
    return ""


def _record(path: Path) -> Any | None:
    """A record; None where there is none, or a damaged one."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None
