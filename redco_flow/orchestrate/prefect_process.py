"""One Prefect server's process: start it, wait until it answers, end it.

Its port is taken before it starts and never given up while it lives, so what answers there is
this process and no other. Knows no files but its log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate import prefect_serving
from redco_flow.orchestrate.prefect_api import is_healthy, ui_url
from redco_flow.search_path import library_environment
from redco_flow.tracking.process_identity import ProcessIdentity

_ADDRESS = "127.0.0.1"
_POLL_SECONDS = 0.1


class PrefectServerError(RedcoFlowError):
    """No local Prefect server could be started; the message names the log."""


@dataclass(frozen=True)
class PrefectProcess:
    """A server that was started, and may have ended since.

    Args:
        auth: what it asks of everybody; None: nothing, as older versions' servers do.
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
            if not self.process.is_alive():
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)
            while self.process.is_alive() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)


def start_lasting(folder: Path, log: BinaryIO, preferred_port: int, auth: str) -> PrefectProcess:
    """Start a server that outlives the calling process.

    Args:
        folder: Prefect's home, with its database.
        log: takes its output.
        preferred_port: the system chooses another one where this one is taken.
        auth: what it asks of everybody who comes.

    Raises:
        PrefectServerError: there is no free port, or the process died at once.
    """
    with _listen(preferred_port, 0) as listener:
        return _spawn(folder, listener, auth, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def start_short_lived(folder: Path, auth: str) -> PrefectProcess:
    """Start a server without pages that ends with the calling process, whatever ends that.

    It writes to the caller's own standard error.

    Raises:
        PrefectServerError: as `start_lasting`.
    """
    short_lived = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_SERVER_UI_ENABLED": "false"}
    # The writing end is never closed: the kernel does that when this process is gone.
    lifeline, _ = os.pipe()
    try:
        with _listen(0) as listener:
            return _spawn(
                *(folder, listener, auth, "--until-input-ends"),
                environment=short_lived,
                stdin=lifeline,
                stdout=sys.stderr.fileno(),
                stderr=sys.stderr.fileno(),
            )
    finally:
        os.close(lifeline)


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
    *options: str,
    environment: Mapping[str, str] | None = None,
    **streams: Any,
) -> PrefectProcess:
    """Start a server in a session of its own.

    Args:
        environment: added to what every server of ours gets.
        streams: as `subprocess.Popen` takes them.
    """
    port = int(listener.getsockname()[1])
    url = f"http://{_ADDRESS}:{port}/api"
    process = subprocess.Popen(
        # By its path: this interpreter may have found us where another would not look.
        [sys.executable, "-P", prefect_serving.__file__, str(listener.fileno()), *options],
        cwd=folder,
        env=_environment(folder, port, url, auth) | dict(environment or {}),
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
        # Every user of this machine could read and cancel otherwise. What belongs to another
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
