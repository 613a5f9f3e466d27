"""Schedules that were deleted while no Prefect server answered: their deployments go later.

A deployment whose dates never come keeps a server busy from its start on, so it is paused in our
server's database before that starts; the next process that serves schedules deletes it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from redco_flow.records import read_json_if_present, write_json
from redco_flow.tracking.locks import exclusive

FLOW = "recurring"
_FILE = "deleted-schedules.json"
_SECONDS_FOR_LOCK = 10.0
_CHOSEN = (
    "(SELECT deployment.id FROM deployment JOIN flow ON flow.id = deployment.flow_id WHERE "
    "flow.name = ? AND deployment.name = ? "
    "AND json_extract(deployment.parameters, '$.workspace') = ?)"
)
_PAUSE = (
    f"UPDATE deployment_schedule SET active = 0 WHERE deployment_id IN {_CHOSEN}",  # noqa: S608
    f"UPDATE deployment SET paused = 1 WHERE id IN {_CHOSEN}",  # noqa: S608
)


def deleted_schedules(folder: Path) -> dict[str, str]:
    """Return the workspaces of deleted schedules whose deployments are still there, by name."""
    return dict(read_json_if_present(folder / _FILE) or {})


def note_deleted(folder: Path, name: str, workspace: str) -> None:
    """Note that a schedule's deployment has to be deleted.

    Args:
        folder: of our Prefect server.
    """
    with exclusive(folder / f"{_FILE}.lock"):
        write_json(folder / _FILE, deleted_schedules(folder) | {name: workspace}, private=True)


def forget_deleted(folder: Path, name: str) -> None:
    """Note that there is nothing to delete: it was done, or the schedule was made again."""
    if name not in deleted_schedules(folder):
        return
    with exclusive(folder / f"{_FILE}.lock"):
        kept = {key: value for key, value in deleted_schedules(folder).items() if key != name}
        write_json(folder / _FILE, kept, private=True)


def pause_deleted(folder: Path) -> None:
    """Pause the noted deployments in the database of a server that does not run."""
    noted, database = deleted_schedules(folder), folder / "prefect.db"
    if not noted or not database.is_file():
        return
    # A database that cannot be changed is reported by the server.
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(database, timeout=_SECONDS_FOR_LOCK)) as connection,
        connection,
    ):
        for statement in _PAUSE:
            connection.executemany(statement, [(FLOW, *one) for one in noted.items()])
