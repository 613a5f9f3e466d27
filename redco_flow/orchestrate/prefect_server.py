"""Keep one local Prefect server in the background: start it on first use, find it again, stop it.

What stands under `~/.redco-flow/prefect/<host>` (0700; `REDCO_FLOW_HOME` moves it): `server.json`
(process, url), `server.lock` (held while somebody starts one), `server.log`, Prefect's database.
One folder per host, because login nodes share a home and SQLite bears one server. A server named
by `PREFECT_API_URL` or by the profile belongs to somebody else: it is used, never started or
stopped. Knows no run and does not import Prefect: a health check is one HTTP request.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.records import read_json_if_present, write_json
from redco_flow.tracking.file_lock import exclusive
from redco_flow.tracking.process_identity import ProcessIdentity

_ADDRESS = "127.0.0.1"
_PREFERRED_PORT = 4200
_POLL_SECONDS = 0.1
_STARTS_BEFORE_GIVING_UP = 3  # the port we found free may be taken before the server binds it


class PrefectServerError(RedcoFlowError):
    """No local Prefect server could be started; the message names the log."""


@dataclass(frozen=True)
class PrefectApi:
    """The API that a run reports to.

    Args:
        url: None means a short-lived one that Prefect starts inside the run's own process.
        is_ours: redco-flow's own server on this host, or the short-lived one.
    """

    url: str | None
    is_ours: bool

    @property
    def database(self) -> str:
        """Which database stands behind it: our server's port may change, its database stays."""
        return f"local@{os.uname().nodename}" if self.is_ours else str(self.url)


@dataclass(frozen=True)
class ServerStatus:
    """Where runs report to, and whether somebody answers there.

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


@dataclass(frozen=True)
class _Record:
    """What `server.json` says of the server that was started last."""

    url: str
    port: int
    process: ProcessIdentity


def home_directory() -> Path:
    """Return `REDCO_FLOW_HOME` or `~/.redco-flow`."""
    given = os.environ.get("REDCO_FLOW_HOME")
    return Path(given).absolute() if given else Path.home() / ".redco-flow"


def prefect_directory() -> Path:
    """Return the directory of our server's files, created for this user alone.

    Prefect's database is readable by everybody otherwise, and its API has no password.
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
    if record and record.process.is_alive() and is_healthy(record.url):
        return record.url
    with exclusive(prefect_directory() / "server.lock"):
        return _find_or_start(time.monotonic() + timeout_seconds)


def stop_server(*, grace_seconds: float = 10.0) -> bool:
    """End our own server; return whether one was running. A named server is left alone."""
    with exclusive(prefect_directory() / "server.lock"):
        record = _read_record()
        if record is None or not record.process.is_alive():
            return False
        _end(record, grace_seconds)
        return True


def server_status(profile_url: str | None = None) -> ServerStatus:
    """Tell where runs report to, without starting anything."""
    if named := external_url(profile_url):
        return ServerStatus(named, is_healthy(named), ours=False, pid=None)
    record = _read_record()
    if record is None or not record.process.is_alive():
        return ServerStatus(record.url if record else None, healthy=False, ours=True, pid=None)
    return ServerStatus(record.url, is_healthy(record.url), ours=True, pid=record.process.pid)


def ui_url(api_url: str) -> str:
    """Return the address of the pages that belong to an API's address."""
    return api_url.rstrip("/").removesuffix("/api")


def is_healthy(api_url: str, *, timeout_seconds: float = 2.0) -> bool:
    """Ask the API's health page once; any answer below 500 means that somebody is there.

    An API with a password answers 401, which is alive.
    """
    parts = urllib.parse.urlsplit(api_url)
    connection_type = (
        http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    )
    try:
        connection = connection_type(parts.netloc, timeout=timeout_seconds)
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}/health")
            return connection.getresponse().status < 500
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _find_or_start(deadline: float) -> str:
    """Return our server's URL while holding the start lock."""
    record = _read_record()
    if record and record.process.is_alive():
        # Its launcher may have died between starting it and seeing it answer.
        if _wait_until_healthy(record, deadline):
            return record.url
        _end(record, grace_seconds=2.0)
    preferred = record.port if record else _PREFERRED_PORT
    for _ in range(_STARTS_BEFORE_GIVING_UP):
        started = _spawn(_choose_port(preferred))
        if started and _wait_until_healthy(started, deadline):
            return started.url
        if started:
            _end(started, grace_seconds=2.0)
        if time.monotonic() >= deadline:
            break
    log = prefect_directory() / "server.log"
    raise PrefectServerError(
        f"no Prefect server could be started; its last words are in {log}:\n{_last_lines(log)}"
    )


def _spawn(port: int) -> _Record | None:
    """Start a server in a session of its own and record it before it answers."""
    folder = prefect_directory()
    url = f"http://{_ADDRESS}:{port}/api"
    arguments = [sys.executable, "-m", "uvicorn", "--factory", "--no-access-log"]
    arguments += ["--host", _ADDRESS, "--port", str(port), "--timeout-keep-alive", "5"]
    arguments += ["--log-level", "warning", "prefect.server.api.server:create_app"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=_server_environment(folder, port, url),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
        )
    try:
        record = _Record(url, port, ProcessIdentity.of(process.pid))
    except ProcessLookupError:
        return None
    write_json(
        folder / "server.json", {"url": url, "port": port, "process": record.process.to_json()}
    )
    return record


def _server_environment(folder: Path, port: int, url: str) -> dict[str, str]:
    """Return the server's environment: our database, no telemetry, its own page's origin only."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return inherited | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_HOST": _ADDRESS,
        "PREFECT_SERVER_API_PORT": str(port),
        # Any web page that the user has open could talk to the API otherwise.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ui_url(url),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_V2_ENABLED": "false",  # it asks an analytics host
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT__SERVER_FINAL": "1",
    }


def _choose_port(preferred: int) -> int:
    """Return the preferred port if nobody has it, else one that the system gives."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_ADDRESS, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise PrefectServerError(f"no free port on {_ADDRESS} for the Prefect server.")


def _wait_until_healthy(record: _Record, deadline: float) -> bool:
    """Wait until the server answers (True), or has died or the deadline has passed (False)."""
    while time.monotonic() < deadline:
        if not record.process.is_alive():
            return False
        if is_healthy(record.url):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _end(record: _Record, grace_seconds: float) -> None:
    """Stop the server's whole session: SIGTERM, then SIGKILL after the grace."""
    deadline = time.monotonic() + grace_seconds
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        if not record.process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record.process.pid, signal_number)
        while record.process.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _read_record() -> _Record | None:
    value: Any = read_json_if_present(_folder() / "server.json")
    if value is None:
        return None
    return _Record(value["url"], value["port"], ProcessIdentity.from_json(value["process"]))


def _last_lines(path: Path, count: int = 10) -> str:
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    return ""
