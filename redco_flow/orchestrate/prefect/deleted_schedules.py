"""Schedules in the records and the database of a Prefect server that does not answer.

The deployments of deleted schedules are deleted later, by the next process that serves schedules. A
rule whose dates never come keeps a server busy from its start on, so it is switched off in our
server's database before that starts.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from redco_flow.records import read_json_if_present, write_json
from redco_flow.spec.recurrence import next_dates
from redco_flow.tracking.locks import exclusive

FLOW = "recurring"
_FILE = "deleted-schedules.json"
_SECONDS_FOR_LOCK = 10.0
_RULES = (
    "SELECT id, json_extract(schedule, '$.rrule'), json_extract(schedule, '$.timezone') "
    "FROM deployment_schedule WHERE active AND json_extract(schedule, '$.rrule') IS NOT NULL"
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


def pause_endless_rules(folder: Path) -> None:
    """Switch off the rules without dates in the database of a server that does not run."""
    database = folder / "prefect.db"
    if not database.is_file():
        return
    # A database that cannot be changed is reported by the server.
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(database, timeout=_SECONDS_FOR_LOCK)) as connection,
        connection,
    ):
        for id_, rule, timezone in connection.execute(_RULES).fetchall():
            if not next_dates(rule, timezone or "UTC"):
                connection.execute("UPDATE deployment_schedule SET active = 0 WHERE id = ?", [id_])
