"""Keep one local Prefect server in the background: start it on first use, find it again, stop it.

What stands under `~/.redco-flow/prefect/<host>` (0700; `REDCO_FLOW_HOME` moves it): `server.json`
(process, url, the secret that it asks for; 0600), `server.lock` (held while one is being started),
`server.log`, Prefect's database. One folder per host, because login nodes share a home and SQLite
bears one server. A server named by `PREFECT_API_URL` or by the profile is another's: it
is used, never started or stopped. Knows no run and does not import Prefect.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.orchestrate.prefect_api import PrefectApi, is_healthy
from redco_flow.orchestrate.prefect_process import (
    PrefectProcess,
    PrefectServerError,
    start_lasting,
    start_short_lived,
)
from redco_flow.records import read_json_if_present, write_json
from redco_flow.tracking.file_lock import exclusive
from redco_flow.writing import open_no_link

_PREFERRED_PORT = 4200


@dataclass(frozen=True)
class ServerStatus:
    """Where runs report to, and whether it answers.

    Args:
        url: the API's address, or None when no server was ever started here.
        healthy: the API answered just now.
        ours: started by redco-flow, so `stop_server` may stop it.
        pid: the process of our own server while it lives.
    """

    url: str | None
    healthy: bool
    ours: bool
    pid: int | None


def home_directory() -> Path:
    """Return `REDCO_FLOW_HOME` or `~/.redco-flow`."""
    given = os.environ.get("REDCO_FLOW_HOME")
    return Path(given).absolute() if given else Path.home() / ".redco-flow"


def prefect_directory() -> Path:
    """Return the directory of our server's files, created for this user alone.

    Prefect's database is readable by everybody otherwise.
    """
    home = home_directory()
    for folder in (home, home / "prefect", _folder()):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    return _folder()


def _folder() -> Path:
    return home_directory() / "prefect" / os.uname().nodename


def external_url(profile_url: str | None = None) -> str | None:
    """Return the API that the user named: `PREFECT_API_URL`, else the profile's, else None."""
    return os.environ.get("PREFECT_API_URL") or profile_url


def ensure_server(profile_url: str | None = None, *, timeout_seconds: float = 120.0) -> str:
    """Return the URL of a Prefect API: the one that was named, ours that runs, or ours started now.

    Two launchers that need one at the same moment start one: the second waits for the first.

    Raises:
        PrefectServerError: the named server does not answer, or ours did not start in time.
    """
    if named := external_url(profile_url):
        if not is_healthy(named, timeout_seconds=5.0):
            raise PrefectServerError(
                f"the Prefect API at {named} does not answer; check PREFECT_API_URL and the "
                "profile's prefect_api_url, or unset both to use a local server."
            )
        return named
    record = _read_record()
    if record and record.auth and record.process.is_alive() and is_healthy(record.url):
        return record.url
    with exclusive(prefect_directory() / "server.lock"):
        return _find_or_start(time.monotonic() + timeout_seconds)


def own_api() -> PrefectApi | None:
    """Return our own server where it lives, whatever API the user has named."""
    record = _read_record()
    if record is None or not record.process.is_alive():
        return None
    return PrefectApi(record.url, is_ours=True, auth=record.auth)


def api_at(url: str, profile_url: str | None = None) -> PrefectApi:
    """Return the API that `ensure_server` has returned the URL of."""
    if external_url(profile_url):
        return PrefectApi(url, is_ours=False)
    record = _read_record()
    return PrefectApi(url, is_ours=True, auth=record.auth if record else None)


def start_short_lived_server(*, timeout_seconds: float = 120.0) -> PrefectApi:
    """Return the API of a server of our database that ends with the calling process.

    Raises:
        PrefectServerError: it did not start in time; its words are on standard error.
    """
    started = start_short_lived(prefect_directory(), _new_auth())
    if not started.wait_until_healthy(time.monotonic() + timeout_seconds):
        started.end(grace_seconds=2.0)
        raise PrefectServerError("no short-lived Prefect server could be started either.")
    return PrefectApi(started.url, is_ours=True, is_short_lived=True, auth=started.auth)


def stop_server(*, grace_seconds: float = 10.0) -> bool:
    """End our own server; return whether one was running. A named server is left alone."""
    with exclusive(prefect_directory() / "server.lock"):
        record = _read_record()
        if record is None or not record.process.is_alive():
            return False
        record.end(grace_seconds)
        return True


def server_status(profile_url: str | None = None) -> ServerStatus:
    """Tell where runs report to, without starting anything."""
    if named := external_url(profile_url):
        return ServerStatus(named, is_healthy(named), ours=False, pid=None)
    record = _read_record()
    if record is None or not record.process.is_alive():
        return ServerStatus(record.url if record else None, healthy=False, ours=True, pid=None)
    return ServerStatus(record.url, is_healthy(record.url), ours=True, pid=record.process.pid)


def _find_or_start(deadline: float) -> str:
    """Return our server's URL while holding the start lock."""
    record = _read_record()
    if record and record.process.is_alive():
        # Its launcher may have died between starting it and seeing it answer. A server of an
        # older version lets every user of this machine in: it is not left open.
        if record.auth and record.wait_until_healthy(deadline):
            return record.url
        record.end(grace_seconds=2.0)
    folder = prefect_directory()
    log = folder / "server.log"
    with open(log, "wb", opener=open_no_link) as output:
        port = record.port if record else _PREFERRED_PORT
        # The same as before: browsers that were let in stay so.
        auth = (record.auth if record else None) or _new_auth()
        started = start_lasting(folder, output, port, auth)
    write_json(folder / "server.json", started.to_json(), private=True)
    if started.wait_until_healthy(deadline):
        return started.url
    started.end(grace_seconds=2.0)
    raise PrefectServerError(
        f"no Prefect server could be started; its last words are in {log}:\n{_last_lines(log)}"
    )


def _new_auth() -> str:
    return f"redco-flow:{secrets.token_urlsafe(32)}"


def _read_record() -> PrefectProcess | None:
    """Return what `server.json` says of the server that was started last."""
    value: Any = read_json_if_present(_folder() / "server.json")
    return PrefectProcess.from_json(value) if value is not None else None


def _last_lines(path: Path, count: int = 10) -> str:
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    return ""
