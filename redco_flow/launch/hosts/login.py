"""Run `redco-flow` on a cluster's login node, which has it installed, and copy code there.

Code is kept there in a folder named by its digest, below `submissions/` of the workspace.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from redco_flow.launch.hosts.code_snapshot import CodeSnapshot
from redco_flow.launch.hosts.config import Config, Host
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.ssh import HostRefused, SshConnection, SshSettings, connect
from redco_flow.spec.ssh import LoginNode, SshTarget

# Before anything of ours is known to be there: for any Python. The current directory is no package.
_PROBE = """\
import sys
sys.path[:1] = []
try:
    from redco_flow import __version__ as version
except ImportError:
    version = ""
import json, os
print(json.dumps({"version": version, "home": os.path.expanduser("~")}))
"""
_IN_FOLDER = 'cd "$0" && exec "$@"'
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
        home: the user's home directory there.
        version: of redco-flow there.
    """

    def __init__(self, node: LoginNode, connection: SshConnection, home: str, version: str) -> None:
        self.node = node
        self.version = version
        self._connection = connection
        self._home = home

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
        known = {"REDCO_FLOW_WORKSPACE": self.workspace} | place.variables
        variables = [f"{name}={value}" for name, value in known.items()]
        program = [_below(self._home, self.node.python), "-P", "-m", "redco_flow.cli.main", *words]
        command = ["sh", "-c", _IN_FOLDER, place.folder, "env", *variables, *program]
        return await self._connection.stream(command, output, errors)

    async def call(self, words: Sequence[str], place: Place | None = None) -> tuple[int, str, str]:
        """Run a command line to its end; return its exit code, output and error output.

        Raises:
            HostUnreachable: the connection broke.
        """
        output: list[bytes] = []
        errors: list[bytes] = []
        code = await self.stream(words, output.append, errors.append, place)
        return code, _text(output), _text(errors)

    async def ship(self, snapshot: CodeSnapshot, own: str, user: str, cache: Path) -> Place:
        """Copy code there, unless it is there already; return its place.

        Args:
            own: the current directory's folder in the snapshot.
            user: has a folder of this name for code there.
            cache: a folder here, for the archive.

        Raises:
            HostUnreachable: the connection broke; an incomplete copy is not used.
            HostRefused: it cannot be written there, or what is there was changed.
        """
        target = self.node.model_dump(mode="json", include=set(SshTarget.model_fields))
        host = Host(**target, directory=f"{self.workspace}/submissions/{user}")
        settings = Config().model_copy(update={"python": self.node.python})  # or a name in PATH
        copied = HostConnection(host, settings, snapshot)
        await copied.open(cache, self._connection)
        (cache / f"{snapshot.digest}.tar.gz").unlink(missing_ok=True)
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
        program = node.python.removeprefix("~/")  # a login begins in the home directory
        code = await connection.stream([program, "-c", _PROBE], output.append, errors.append)
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
        yield LoginSession(node, connection, found["home"], found["version"])
    finally:
        connection.close()


def _below(home: str, path: str) -> str:
    """Return the path with its `~` replaced; a program's name as it is."""
    return str(PurePosixPath(home) / path[2:]) if path.startswith("~/") else path


def _text(lines: Sequence[bytes]) -> str:
    return b"".join(lines).decode("utf-8", "replace")
