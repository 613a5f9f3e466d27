"""Run `redco-flow` on a cluster's login node, which has it installed, and copy code there.

Code is kept there in a folder named by its digest, below `submissions/` of the workspace.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from redco_flow.launch.hosts.code_snapshot import CodeSnapshot
from redco_flow.launch.hosts.config import Config, Host
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.ssh import (
    FROM_STDIN,
    HostRefused,
    SshConnection,
    SshSettings,
    connect,
    program_line,
)
from redco_flow.spec.ssh import LoginNode, SshTarget

# Before anything of ours is known to be there: for any Python. The current directory is no package.
_PROBE = b"""\
import sys
sys.path[:1] = []
try:
    from redco_flow import __version__ as version
except ImportError:
    version = ""
import json, os, pwd
try:
    user = pwd.getpwuid(os.getuid()).pw_name
except KeyError:
    user = str(os.getuid())
print(json.dumps({"version": version, "home": os.path.expanduser("~"), "user": user}))
"""
_STARTER = b"""\
import json, os, signal, subprocess, sys, threading
folder, variables, ends, command = json.loads(sys.argv[1])
os.chdir(folder)
os.environ.update(variables)
if not ends:
    os.execvp(command[0], command)
child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
def watch():
    os.read(0, 1)
    os.killpg(child.pid, signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
_FOLLOWING = ("attach", "logs", "status")
_NO_PROGRAM = (126, 127)  # of a shell: it cannot be executed, it is not there

Take = Callable[[bytes], None]


@dataclass(frozen=True)
class Place:
    """Code that was copied to the login node.

    Args:
        folder: the copy of the current directory.
        variables: with which Python finds the modules there that it finds here.
    """

    folder: str
    variables: dict[str, str]


class LoginSession:
    """An open connection to a login node that has redco-flow; `open_session` makes one.

    Args:
        found: the user's `home` and name there, and the `version` of redco-flow.
    """

    def __init__(
        self, node: LoginNode, connection: SshConnection, found: Mapping[str, str]
    ) -> None:
        self.node = node
        self.version = found["version"]
        self._connection = connection
        self._home, self._user = found["home"], found["user"]

    @property
    def workspace(self) -> str:
        """The absolute path of the workspace there."""
        return _below(self._home, self.node.workspace)

    async def stream(
        self, words: Sequence[str], output: Take, errors: Take, place: Place | None = None
    ) -> int:
        """Run a command line of redco-flow; return its exit code.

        Args:
            words: the verb and its arguments.
            output, errors: take each line of standard output and of standard error as it comes.
            place: where it runs; None: in the home directory.

        Raises:
            HostUnreachable: the connection broke.
        """
        place = place or Place(self._home, {})
        variables = {"REDCO_FLOW_WORKSPACE": self.workspace} | place.variables
        command = [_below(self._home, self.node.python), "-P", "-m", "redco_flow.cli.main", *words]
        ends = words[0] in _FOLLOWING  # with the connection, not when it has something to print
        said = program_line(_STARTER, json.dumps([place.folder, variables, ends, command]))
        return await self._connection.stream(
            _python(self.node), output, errors, said, keeps_open=ends
        )

    async def call(self, words: Sequence[str], place: Place | None = None) -> tuple[int, str, str]:
        """Run a command line to its end; return its exit code, output and error output.

        Raises:
            HostUnreachable: the connection broke.
        """
        output: list[bytes] = []
        errors: list[bytes] = []
        code = await self.stream(words, output.append, errors.append, place)
        return code, _text(output), _text(errors)

    async def ship(self, snapshot: CodeSnapshot, own: str) -> Place:
        """Copy code there, unless it is there already; return its place.

        Args:
            own: the current directory's folder in the snapshot.

        Raises:
            HostUnreachable: the connection broke; an incomplete copy is not used.
            HostRefused: it cannot be written there, or what is there was changed.
        """
        target = self.node.model_dump(mode="json", include=set(SshTarget.model_fields))
        host = Host(**target, directory=f"{self.workspace}/submissions/{self._user}")
        settings = Config().model_copy(update={"python": self.node.python})  # or a name in PATH
        copied = HostConnection(host, settings, snapshot)
        await copied.open(self._connection)
        return Place(f"{copied.code}/{own}", copied.search_variables)

    async def get(self, source: str, target: Path) -> None:
        """Copy a file from there to a new one here.

        Raises:
            HostUnreachable, HostRefused, OSError: as of `SshConnection.get`.
        """
        await self._connection.get(source, target)


@contextlib.asynccontextmanager
async def open_session(node: LoginNode, version: str) -> AsyncIterator[LoginSession]:
    """Connect for the duration of the `with`.

    Args:
        version: of redco-flow here, to be installed where there is none.

    Raises:
        HostUnreachable: there is no answer.
        HostRefused: a key is not accepted, or redco-flow is not installed there; says what to do.
    """
    connection = await connect(node, SshSettings(node.known_hosts))
    try:
        output: list[bytes] = []
        errors: list[bytes] = []
        said = program_line(_PROBE)
        code = await connection.stream(_python(node), output.append, errors.append, said)
        answers = [line for line in output if line.startswith(b"{")]
        if code in _NO_PROGRAM:
            raise HostRefused(
                f"{node.label} has no {node.python}: name the interpreter there that has "
                f"redco-flow by `python` under `ssh:` of a profile."
            )
        if code != 0 or not answers:
            raise HostRefused(
                f"{node.label}: {node.python} ended with code {code}: "
                f"{_text(errors).strip()[-500:] or 'it said nothing'}"
            )
        found = json.loads(answers[-1])
        if not found["version"]:
            raise HostRefused(
                f"{node.label}: {node.python} has no redco-flow: install it there with `"
                f"{node.python} -m pip install redco-flow=={version}`, or name the interpreter "
                f"that has it by `python` under `ssh:` of a profile."
            )
        yield LoginSession(node, connection, found)
    finally:
        connection.close()


def _python(node: LoginNode) -> list[str]:
    """Return a command that runs the program on its standard input."""
    return [node.python.removeprefix("~/"), *FROM_STDIN]  # a login begins in the home directory


def _below(home: str, path: str) -> str:
    """Return the path with its `~` replaced; a program's name as it is."""
    return str(PurePosixPath(home) / path[2:]) if path.startswith("~/") else path


def _text(lines: Sequence[bytes]) -> str:
    return b"".join(lines).decode("utf-8", "replace")
