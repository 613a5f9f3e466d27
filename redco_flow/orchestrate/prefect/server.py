"""Keep one local Prefect server in the background: start it on first use, find it again, stop it.

Files in `~/.redco-flow/prefect/<host>` (0700; `REDCO_FLOW_HOME` moves it): `server.json` (process,
url, secret; 0600), `server.lock` (held while one is being started), `server.log`, Prefect's
database. One folder per host, because login nodes share a home and SQLite bears one server. A
server named by `PREFECT_API_URL` or by the profile is used, never started or stopped. Does not
import Prefect.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.prefect import serve
from redco_flow.orchestrate.prefect.api import PrefectApi, is_healthy, pause_endless_rules, ui_url
from redco_flow.records import open_no_link, read_json_if_present, write_json
from redco_flow.search_path import library_environment
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.workspace import home_directory

_ADDRESS = "127.0.0.1"
_OWN_URL = "REDCO_FLOW_OWN_PREFECT_API_URL"
_POLL_SECONDS = 0.1
_MOST_LOG_BYTES = 4 << 20


class PrefectServerError(RedcoFlowError):
    """No local Prefect server could be started; the message names the log."""


@dataclass(frozen=True)
class PrefectProcess:
    """A server that was started, and may have ended since.

    Args:
        auth: the secret that each request needs; None: none, as of older versions' servers.
    """

    url: str
    port: int
    process: ProcessIdentity
    auth: str | None = field(repr=False)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PrefectProcess:
        """Read what `to_json` made."""
        process = ProcessIdentity.from_json(record["process"])
        return cls(record["url"], record["port"], process, record.get("auth"))

    def to_json(self) -> dict[str, Any]:
        """Return a record by which any process finds the server again."""
        return {**asdict(self), "process": self.process.to_json()}

    def wait_until_healthy(self, deadline: float) -> bool:
        """Wait until the server answers (True), or has died or the deadline has passed (False)."""
        while time.monotonic() < deadline:
            if not self.process.is_alive():
                return False
            if is_healthy(self.url):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def end(self, grace_seconds: float) -> None:
        """Stop the server's whole session: SIGTERM, then SIGKILL after the grace."""
        deadline = time.monotonic() + grace_seconds
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if not self.process.is_running_here():
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)
            while self.process.is_running_here() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)


def start_lasting(
    folder: Path,
    log: BinaryIO,
    preferred_port: int,
    auth: str,
    record: Callable[[PrefectProcess], None],
) -> PrefectProcess:
    """Start a server that outlives the calling process, once it is recorded.

    Args:
        folder: Prefect's home, with its database.
        log: takes its output.
        preferred_port: the system chooses another one where this one is taken.
        auth: the secret that each request needs.
        record: writes the record by which it is found again. A caller that is killed before
            leaves no server: one without a record would keep its port and the database.

    Raises:
        PrefectServerError: there is no free port, or the process died at once.
    """
    gate, opener = os.pipe()
    try:
        with _listen(preferred_port, 0) as listener:
            started = _spawn(folder, listener, auth, stdin=gate, stdout=log, stderr=log)
        record(started)
        with contextlib.suppress(BrokenPipeError):  # it has died, which waiting for it reports
            os.write(opener, b"1")
        return started
    finally:
        os.close(gate)
        os.close(opener)


def _listen(*ports: int) -> socket.socket:
    """Take the first free port; 0 is one that the system chooses."""
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((_ADDRESS, port))
    raise PrefectServerError(f"no free port on {_ADDRESS} for the Prefect server.")


def _spawn(
    folder: Path,
    listener: socket.socket,
    auth: str,
    **streams: Any,
) -> PrefectProcess:
    """Start a server detached; `streams` are those of `subprocess.Popen`."""
    pause_endless_rules(folder)
    port = int(listener.getsockname()[1])
    url = f"http://{_ADDRESS}:{port}/api"
    process = subprocess.Popen(
        # By its path: this interpreter may have found us where another would not look.
        [sys.executable, "-P", serve.__file__, str(listener.fileno())],
        cwd=folder,
        env=_environment(folder, port, url, auth),
        pass_fds=[listener.fileno()],
        start_new_session=True,
        umask=0o077,
        **streams,
    )
    try:
        return PrefectProcess(url, port, ProcessIdentity.of(process.pid), auth)
    except ProcessLookupError:
        raise PrefectServerError("the Prefect server's process died at once.") from None


def _environment(folder: Path, port: int, url: str, auth: str) -> dict[str, str]:
    """Return the server's environment: our database, no telemetry, its own page's origin only."""
    given = library_environment()
    inherited = {key: value for key, value in given.items() if not key.startswith("PREFECT_")}
    return inherited | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_HOST": _ADDRESS,
        "PREFECT_SERVER_API_PORT": str(port),
        # Every user of this machine could read and cancel otherwise. The environment of another
        # user's process cannot be read, unlike its arguments.
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_API_AUTH_STRING": auth,
        # Any web page that the user has open could talk to the API otherwise.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ui_url(url),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_V2_ENABLED": "false",  # it asks an analytics host
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT__SERVER_FINAL": "1",
    }


_PREFERRED_PORT = 4200


@dataclass(frozen=True)
class ServerStatus:
    """The API that runs report to, and whether it answers.

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
    """Return the API that the user named: `PREFECT_API_URL`, else the profile's, else None.

    What `name_own` has set names no other API, in this process and those that it starts.
    """
    named = os.environ.get("PREFECT_API_URL")
    if named and named != os.environ.get(_OWN_URL):
        return named
    return profile_url


def name_own(url: str) -> None:
    """Point Prefect, imported later, and this process's children to our own server."""
    os.environ["PREFECT_API_URL"] = os.environ[_OWN_URL] = url


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


def stop_server(*, grace_seconds: float = 10.0) -> bool:
    """End our own server; return whether one was running. A named server is left alone."""
    with exclusive(prefect_directory() / "server.lock"):
        record = _read_record()
        if record is None or not record.process.is_alive():
            return False
        record.end(grace_seconds)
        return True


def server_status(profile_url: str | None = None) -> ServerStatus:
    """Return the API that runs report to, without starting anything."""
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
    if log.exists() and log.stat().st_size > _MOST_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    with open(log, "ab", opener=open_no_link) as output:
        port = record.port if record else _PREFERRED_PORT
        # The same as before: browsers that were let in stay so.
        auth = (record.auth if record else None) or f"redco-flow:{secrets.token_urlsafe(32)}"
        started = start_lasting(folder, output, port, auth, partial(_write_record, folder))
    if started.wait_until_healthy(deadline):
        return started.url
    started.end(grace_seconds=2.0)
    raise PrefectServerError(
        f"no Prefect server could be started; its last words are in {log}:\n{_last_lines(log)}"
    )


def _write_record(folder: Path, started: PrefectProcess) -> None:
    write_json(folder / "server.json", started.to_json(), private=True)


def _read_record() -> PrefectProcess | None:
    value: Any = read_json_if_present(_folder() / "server.json")
    return PrefectProcess.from_json(value) if value is not None else None


def _last_lines(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-10:])
    return ""
