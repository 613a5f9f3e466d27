"""A Prefect API by its address: health check, requests, addresses of its pages, login.

Does not import Prefect: a health check is one HTTP request, and most runs make none.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.records import read_json_if_present, write_json
from redco_flow.tracking.locks import exclusive

LOGIN_PATH = "/redco-flow/login"
"""A page of our own server that lets a browser in; `prefect.serve` serves it."""

FLOW = "recurring"
_FILE = "deleted-schedules.json"
_SECONDS_FOR_LOCK = 10.0
_RULES = (
    "SELECT id, json_extract(schedule, '$.rrule'), json_extract(schedule, '$.timezone') "
    "FROM deployment_schedule WHERE active AND json_extract(schedule, '$.rrule') IS NOT NULL"
)


@dataclass(frozen=True)
class PrefectApi:
    """The API that a run reports to.

    Args:
        is_ours: redco-flow's own server on this host.
        auth: Prefect's authentication string, of our own servers; a named API's is in the user's
            settings.
    """

    url: str
    is_ours: bool
    auth: str | None = field(default=None, repr=False)

    @property
    def database(self) -> str:
        """A name of its database: our server's port may change, its database stays."""
        return f"local@{os.uname().nodename}" if self.is_ours else self.url


def is_healthy(api_url: str, *, timeout_seconds: float = 2.0) -> bool:
    """Ask the API's health page once; any answer below 500 means that a server is there.

    An API with a password answers 401, which is alive.
    """
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    parts = urllib.parse.urlsplit(api_url)
    connection_type = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        connection = connection_type(parts.netloc, timeout=timeout_seconds)
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}/health")
            return connection.getresponse().status < 500
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError):
        return False


def ask(api: PrefectApi, path: str, body: dict[str, Any], *, timeout_seconds: float = 5.0) -> Any:
    """Return our own server's answer to one request.

    Raises:
        OSError, ValueError, http.client.HTTPException: there is none, or it is not JSON.
    """
    from http.client import HTTPConnection

    parts = urllib.parse.urlsplit(api.url)
    token = base64.b64encode((api.auth or "").encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {token}"}
    connection = HTTPConnection(parts.netloc, timeout=timeout_seconds)
    try:
        connection.request("POST", f"{parts.path}{path}", json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status >= 300:
        raise ValueError(f"{api.url}{path} answers {response.status}")
    return json.loads(content)


def login_url(api: PrefectApi, page: str = "/") -> str:
    """Return the address that opens a page in a browser that was never there.

    What follows `#` stays in the browser: no request and no log has it.
    """
    base = ui_url(api.url)
    return f"{base}{page}" if api.auth is None else f"{base}{LOGIN_PATH}#{api.auth}&{page}"


def ui_url(api_url: str) -> str:
    """Return the address of the pages that belong to an API's address."""
    return api_url.rstrip("/").removesuffix("/api")


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
    # Imported here: a rule's types are pydantic's, which verbs of schedules need not wait for.
    import sqlite3

    from redco_flow.spec.schedule import next_dates

    # A database that cannot be changed is reported by the server.
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(database, timeout=_SECONDS_FOR_LOCK)) as connection,
        connection,
    ):
        for id_, rule, timezone in connection.execute(_RULES).fetchall():
            if not next_dates(rule, timezone or "UTC"):
                connection.execute("UPDATE deployment_schedule SET active = 0 WHERE id = ?", [id_])
