"""Share one orchestrating process between runs: offer it a run, or accept runs that are offered.

The process of a run listens on an abstract Unix socket. Its name is a digest of all that must be
the same for two runs to share a process: workspace, directory, environment, interpreter, user and
host. A later run of the same name is offered to it before a process is started. A process whose
loaded modules have changed on disk accepts none. Each run keeps its own lease and records, so what
is killed is continued as before; the socket is gone with its process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.prefect.server import home_directory, own_api
from redco_flow.records import digest_json
from redco_flow.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from redco_flow.orchestrate.run.driver import Driver
    from redco_flow.orchestrate.run.state import LaunchRecord

_MOST_RUNS = 200  # each has some threads
_SECONDS_TO_ANSWER = 30.0
_SECONDS_TO_ASK = 5.0
_MOST_BYTES = 1 << 16
# Of the terminal that a command is typed in: nothing that a job does depends on them.
_OF_TERMINALS = {"_", "SHLVL", "OLDPWD", "PWD", "COLUMNS", "LINES", "WINDOWID", "XDG_SESSION_ID"}
_TERMINAL_PREFIXES = ("SSH_", "TERM", "TMUX", "STY", "VTE_", "LC_TERMINAL")


def shared_name(record: LaunchRecord) -> str:
    """Return the name of the process that may drive a run launched from here.

    Args:
        record: how the run is launched.
    """
    environment = {
        name: value
        for name, value in (os.environ | record.variables).items()
        if name not in _OF_TERMINALS and not name.startswith(_TERMINAL_PREFIXES)
    }
    spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "mnt")]
    # A process reports to one Prefect server, at the address with which it imported Prefect.
    own = own_api()
    server = [record.profile.get("prefect_api_url"), own and [own.url, own.auth]]
    umask = os.umask(0o077)
    os.umask(umask)
    return "redco-flow-" + digest_json(
        {
            "environment": environment,
            "workspace": record.workspace,
            "directory": record.directory,
            "server": server,
            "python": sys.executable,
            "process": [os.uname().nodename, os.getuid(), umask, *spaces],
        }
    )


def notes_of(name: str) -> Path:
    """Return the folder in which the process of this name notes the runs that it drives."""
    folder = home_directory() / "launchers" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def offer(run: RunDirectory, name: str, options: dict[str, bool]) -> bool:
    """Offer a run to the process of this name; return whether it drives the run now.

    Args:
        options: of `Driver.start`.

    Raises:
        RedcoFlowError: the process tried, and could not begin.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SECONDS_TO_ANSWER)
        try:
            connection.connect(f"\0{name}")
            if not _is_of_this_user(connection):
                return False
            request = {"run": str(run.path), "options": options}
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = _read(connection)
        except (OSError, ValueError):
            return False  # there is none, it ends just now, or it does not answer
    if error := answer.get("error"):
        raise RedcoFlowError(f"run {run.id} could not be started: {error}")
    return bool(answer.get("accepted"))


class Listener:
    """Accepts runs for a driver, in a thread.

    Args:
        name: of `shared_name`. Where another process listens already, none are accepted.
    """

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._mutex = threading.Lock()
        self._modules = _LoadedModules()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{name}")
            self._socket.listen()
        except OSError:
            self._socket.close()
            return
        threading.Thread(target=self._serve, name="offered runs", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether runs are accepted."""
        return self._socket.fileno() >= 0

    def wait(self) -> None:
        """Return when all runs have ended; from then on none are accepted."""
        while True:
            self._driver.wait()
            with self._mutex:
                if not self._driver.has_runs:
                    self._close()
                    return

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(_SECONDS_TO_ASK)
                if _is_of_this_user(connection):
                    answer = self._answer(_read(connection), connection)
                    connection.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, request: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        with self._mutex:
            if self._driver.is_stopped or self._modules.have_changed():
                self._close()  # another process may take the name
            if not self.is_open or self._driver.num_driving >= _MOST_RUNS:
                return {"accepted": False}
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if connection.recv(1, socket.MSG_PEEK) == b"":
                    return {}  # it has given up, and drives the run itself
            try:
                self._driver.start(RunDirectory(Path(request["run"])), **request["options"])
            except (RedcoFlowError, OSError) as error:
                return {"error": str(error)}
        return {"accepted": True}

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()


class _LoadedModules:
    """The source files of this process's modules, as they were when first looked at."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}
        self.have_changed()

    def have_changed(self) -> bool:
        """Whether a file differs from when it was first looked at; new modules are added."""
        importlib.invalidate_caches()
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if path and self._seen.setdefault(path, now := _signature(path)) != now:
                return True
        return False


def _signature(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's: names of sockets are free to all."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _read(connection: socket.socket) -> dict[str, Any]:
    """Read one line of JSON.

    Raises:
        OSError: there is none in time.
        ValueError: it is not an object.
    """
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(_MOST_BYTES)
        if not part or len(line) > _MOST_BYTES:
            raise OSError("the other end has closed")
        line += part
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"not an object: {found!r}")
    return found
