"""The record of the process that serves this user's schedules on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redco_flow.orchestrate.prefect.server import prefect_directory
from redco_flow.records import read_json_if_present, write_json
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now
from redco_flow.tracking.workspace import Workspace


@dataclass(frozen=True)
class Serving:
    """The content of `serve.json`.

    Args:
        process: it lives.
        since: when it began, or went on after the machine slept or no server answered: whatever
            became due later was not missed, however late its turn comes.
    """

    process: ProcessIdentity
    since: str

    @classmethod
    def find(cls) -> Serving | None:
        """Return the process that serves this user's schedules on this machine, if one does."""
        record = read_json_if_present(_serving_path())
        if record is None:
            return None
        process = ProcessIdentity.from_json(record["process"])
        since = str(record.get("since") or utc_now())  # releases before 0.2 did not say it
        return cls(process, since) if process.is_alive() else None


def note_serving() -> None:
    """Note that this process serves from now on."""
    record = {"process": ProcessIdentity.current().to_json(), "since": utc_now()}
    write_json(_serving_path(), record, private=True)


def known_workspaces() -> list[str]:
    """Return the workspaces in which this user has made schedules on this machine."""
    return list(read_json_if_present(_workspaces_path()) or ())


def note_workspace(workspace: Workspace) -> None:
    """Note that a workspace has schedules."""
    path = _workspaces_path()
    with exclusive(path.with_suffix(".lock")):
        known = set(known_workspaces())
        if str(workspace.root) not in known:
            write_json(path, sorted({*known, str(workspace.root)}), private=True)


def _serving_path() -> Path:
    return prefect_directory() / "serve.json"


def _workspaces_path() -> Path:
    return prefect_directory() / "workspaces.json"
