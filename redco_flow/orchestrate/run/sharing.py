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
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.prefect.server import own_api
from redco_flow.records import digest_json
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import home_directory

if TYPE_CHECKING:
    from redco_flow.orchestrate.run.driver import Driver
    from redco_flow.orchestrate.run.state import LaunchRecord

_MOST_RUNS = 200  # each has some threads
_SECONDS_TO_ANSWER = 30.0
_SECONDS_TO_ASK = 5.0
_MOST_BYTES = 1 << 16
_BEGAN_AT = time.time_ns()  # this module is among the first that a process imports
# Of the terminal that a command is typed in: nothing that a job does depends on them.
_OF_TERMINALS = {
    "_", "SHLVL", "OLDPWD", "PWD", "COLUMNS", "LINES", "WINDOWID", "XDG_SESSION_ID",
    "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "STY", "TMUX", "TMUX_PANE", "VTE_VERSION",
    "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "COLORTERM", "LC_TERMINAL",
    "LC_TERMINAL_VERSION",
}  # fmt: skip


def shared_name(record: LaunchRecord) -> str:
    """Return the name of the process that may drive a run launched from here.

    Args:
        record: how the run is launched.
    """
    environment = {
        name: os.fsencode(value).hex()  # it may be no text
        for name, value in (os.environ | record.variables).items()
        if name not in _OF_TERMINALS
    }
    directory: list[Any] = [record.directory]
    # A process reports to one Prefect server, at the address with which it imported Prefect.
    own = own_api()
    server = [record.profile.get("prefect_api_url"), own and [own.url, own.auth]]
    with contextlib.suppress(OSError):  # it may be gone
        status = os.stat(record.directory)
        directory += [status.st_dev, status.st_ino]  # another one may be there later
    return "redco-flow-" + digest_json(
        {
            "environment": environment,
            "workspace": record.workspace,
            "directory": directory,
            "server": server,
            "python": sys.executable,
            "process": _of_this_process(),
        }
    )


def _of_this_process() -> list[Any]:
    """Return what a process inherits from its shell, and a job from it, beside the environment."""
    umask = os.umask(0o077)
    os.umask(umask)
    kinds = ("pid", "mnt", "net", "user")
    spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in kinds]
    limits = Path("/proc/self/limits").read_text()
    users = [os.getuid(), os.getgid(), sorted(os.getgroups())]
    cpus = sorted(os.sched_getaffinity(0))
    return [os.uname().nodename, users, umask, spaces, limits, cpus]


def notes_of(name: str) -> Path:
    """Return the folder in which the process of this name notes the runs that it drives."""
    return home_directory() / "launchers" / name


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
        since: when this process began to import, in nanoseconds since 1970.
    """

    def __init__(self, driver: Driver, name: str, *, since: int = _BEGAN_AT) -> None:
        self._driver = driver
        self._mutex = threading.Lock()
        self._modules = _LoadedModules(since)
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
                    try:
                        answer = self._answer(_read(connection), connection)
                    except Exception:  # noqa: BLE001 (of another version; the next ones are heard)
                        answer = {"accepted": False}
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

    def __init__(self, since: int) -> None:
        self._since = since
        self._seen: dict[str, tuple[int, ...]] = {}
        self.have_changed()

    def have_changed(self) -> bool:
        """Whether a file may differ from what was imported; new modules are added."""
        importlib.invalidate_caches()
        return any(
            self._has_changed(path)
            for module in list(sys.modules.values())
            if (path := getattr(module, "__file__", None))
        )

    def _has_changed(self, path: str) -> bool:
        try:
            status = os.stat(path)
        except OSError:
            now: tuple[int, ...] = ()
        else:
            now = status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
            # Imported later than this began, and changed since: before or after its import.
            if path not in self._seen and status.st_ctime_ns > self._since:
                return True
        return self._seen.setdefault(path, now) != now


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's: names of sockets are free to all."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _read(connection: socket.socket) -> dict[str, Any]:
    """Read one line of JSON."""
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
