"""The record of the process that serves this user's schedules, of all hosts that share the home."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.orchestrate.prefect.server import external_url, prefect_directory
from redco_flow.records import read_json_if_present, write_json
from redco_flow.tracking.file_lock import LockRequest
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
        """Return the process that serves this user's schedules, here or on another host."""
        record = _read()
        try:
            serving = cls(ProcessIdentity.from_json(record["process"]), str(record["since"]))
        except (KeyError, TypeError, ValueError):
            return None  # there is no record, or it is damaged
        if not serving.is_elsewhere:
            return serving if serving.process.is_alive() else None
        if (lock := LockRequest(lock_path()).try_once()) is None:
            return serving
        lock.release()
        return None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is a process of another host or container, which cannot be seen from here."""
        return not self.process.is_visible


def refuse_if_served_elsewhere() -> None:
    """Refuse to change schedules here that another host serves with a Prefect server there.

    Raises:
        UsageError: names that host.
    """
    serving = Serving.find()
    if serving is not None and serving.is_elsewhere and external_url() is None:
        raise UsageError(
            f"schedules are served by {serving.process}, whose Prefect server cannot be reached "
            f"from here: change them there, or end it there with `redco-flow serve --stop`."
        )


def note_serving() -> None:
    """Note that this process serves from now on."""
    process = ProcessIdentity.current().to_json()
    _write({"process": process, "since": utc_now()})


def note_look() -> None:
    """Note that whatever is due by now was found; a later process makes up for the rest."""
    _write({"looked": utc_now()})


def last_look() -> datetime | None:
    """Return when `note_look` was called last, by this process or one before."""
    try:
        looked = datetime.fromisoformat(_read()["looked"])
    except (KeyError, TypeError, ValueError):
        return None
    return looked if looked.tzinfo else looked.replace(tzinfo=UTC)


def _read() -> dict[str, Any]:
    """Return the record; an empty one where it is damaged."""
    try:
        record = read_json_if_present(_serving_path())
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _write(part: dict[str, Any]) -> None:
    write_json(_serving_path(), _read() | part, private=True)


def known_workspaces() -> list[str]:
    """Return the workspaces in which this user has made schedules."""
    of_0_2_0 = prefect_directory() / "workspaces.json"  # one of each host
    paths = (_workspaces_path(), of_0_2_0)
    return sorted({root for path in paths for root in read_json_if_present(path) or ()})


def note_workspace(workspace: Workspace) -> None:
    """Note that a workspace has schedules."""
    path = _workspaces_path()
    with exclusive(path.with_suffix(".lock")):
        known = set(known_workspaces())
        if str(workspace.root) not in known:
            write_json(path, sorted({*known, str(workspace.root)}), private=True)


def lock_path() -> Path:
    """Return the lock that the process that serves holds."""
    return prefect_directory().with_name("serve.lock")


def _serving_path() -> Path:
    return prefect_directory().with_name("serve.json")


def _workspaces_path() -> Path:
    return prefect_directory().with_name("workspaces.json")
