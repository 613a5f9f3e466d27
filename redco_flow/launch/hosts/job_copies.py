"""What a job's life makes a copy on this host, and what not.

Inputs are copies from the start. What the job makes exists only here until its launcher has taken
it all: then its run directory, working directory, result and artifacts are copies too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import read_call
from redco_flow.launch.hosts import lease as host_lease
from redco_flow.launch.hosts.copies import Copies
from redco_flow.launch.hosts.file_sets import FileSet
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.results import read_result
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace


def expect(copies: Copies, workspace: Workspace, sets: Iterable[FileSet]) -> None:
    """Mark what the launcher brings, or would bring if it were not here."""
    for one in sets:
        thing = one.thing(workspace)
        if one.kind == "checkpoint" and thing.exists():
            copies.note_use([thing])  # beside these there may be what was not fetched
        else:
            copies.mark([thing])


def settle(directory: Path, owner: Mapping[str, Any], attempt: AttemptDirectory) -> None:
    """Mark what the job made, unless another job goes on with it; what it read was used now.

    Args:
        directory: of this host.
        owner: as of its lease.

    Raises:
        OSError: the disk is full or read-only; names the path.
    """
    if not attempt.call_path.exists():
        return  # the directory was emptied
    copies = Copies(directory)
    workspace = Workspace(directory / "workspace")
    run, fingerprint = attempt.path.parents[3], read_call(attempt.call_path).fingerprint
    with copies.locked():
        copies.note_use(host_lease.uses_of(directory, owner))
        mark_made(copies, workspace, run, fingerprint)
        copies.mark([run])


def mark_made(copies: Copies, workspace: Workspace, run: Path, fingerprint: str) -> None:
    """Mark what a job made, unless another one that is no copy yet goes on with it.

    Args:
        copies: locked.
        run: the job's run directory.
    """
    others = (one for one in workspace.runs.iterdir() if one != run and not copies.is_copy(one))
    if not any(fingerprint in _fingerprints(other) for other in others):
        copies.mark(_made(workspace, fingerprint))


def take_back(directory: Path, workspace: Workspace, fingerprint: str) -> None:
    """Note that a job begins to change what earlier ones with its fingerprint have made."""
    Copies(directory).revoke(_own(workspace, fingerprint))


def _own(workspace: Workspace, fingerprint: str) -> Iterator[Path]:
    yield workspace.work_directory(fingerprint)
    yield workspace.results / f"{fingerprint}.json"


def _made(workspace: Workspace, fingerprint: str) -> Iterator[Path]:
    yield from _own(workspace, fingerprint)
    result = read_result(workspace, fingerprint)
    for artifact_id in result.outputs.values() if result is not None else ():
        yield from workspace.artifacts.glob(f"*/{artifact_id[:SHORT_DIGITS]}")


def _fingerprints(run: Path) -> Iterator[str]:
    for path in run.glob("stages/*/attempts/*/call.json"):
        with contextlib.suppress(UsageError):  # damaged: nothing runs by it
            yield read_call(path).fingerprint
