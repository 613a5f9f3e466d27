"""A host that has our code: ask its agent, move sets of files there and back, see one workspace.

Opening one checks the host's directory and ships the code if it is not there, by its digest.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError, some_of
from redco_flow.launch.hosts.code_snapshot import CodeSnapshot, bootstrap_program
from redco_flow.launch.hosts.config import Config, Host
from redco_flow.launch.hosts.file_sets import FileSet, put_in_place, wanted
from redco_flow.launch.hosts.ssh import (
    FROM_STDIN,
    HostRefused,
    SshConnection,
    SshSettings,
    Talk,
    connect,
    program_line,
)
from redco_flow.records import write_text
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.workspace import Workspace

_SECONDS_TO_PLACE = 3600.0


class HostConnection:
    """One host; `open` makes it usable, and again after its connection broke.

    Args:
        snapshot: the code that its agent and its ranks run.
    """

    def __init__(self, host: Host, settings: Config, snapshot: CodeSnapshot) -> None:
        self.host = host
        self.directory = ""
        self._settings = settings
        self._snapshot = snapshot
        self._connection: SshConnection | None = None
        self._code = ""
        self._is_ready = False
        self._silent_since: float | None = None
        self._silent_at = ""

    @property
    def is_open(self) -> bool:
        """Whether the host can be asked, as far as is known."""
        return self._is_ready

    def note_word(self) -> None:
        """The host has just answered."""
        self._silent_since = None

    def note_silence(self) -> str:
        """The host does not answer; return the time of day since when, for people."""
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            self._silent_at = utc_now()
        return self._silent_at

    def is_lost(self, seconds: float) -> bool:
        """Say whether the host has been silent for so long."""
        return self._silent_since is not None and time.monotonic() - self._silent_since > seconds

    @property
    def label(self) -> str:
        """The host's name in messages and records."""
        return self.host.label

    @property
    def search_variables(self) -> dict[str, str]:
        """Variables of the module search path on the host."""
        return self._snapshot.variables(self._code)

    @property
    def code(self) -> str:
        """The folder of the code there."""
        return self._code

    @property
    def workspace(self) -> Workspace:
        """The host's own workspace, for what is not shared; its paths are not for this machine."""
        return Workspace(Path(self.directory) / "workspace")

    async def open(self, connection: SshConnection | None = None) -> None:
        """Connect, and ship the code if the host has not got it.

        Args:
            connection: an open one, to use instead.

        Raises:
            HostUnreachable: there is no answer, or the connection broke.
            HostRefused: the host cannot be used as it is; says what to do.
        """
        self.close()
        settings = SshSettings(self._settings.known_hosts)
        self._connection = connection or await connect(self.host, settings)
        found = self._answer(await self._connected.run(self._bootstrap, self._program("check")))
        self.directory, self._code = found["directory"], found["code"]
        if not found["has_code"]:
            await self._ship_code()
        elif found["changed"]:
            raise HostRefused(
                f"the code on {self.label} is not what was shipped: "
                f"{some_of(found['changed'], 3)} in "
                f"{self._code} (SHA-256 differs). Nothing ran. Delete that folder there once no "
                f"job uses it, and it is uploaded again; code with any change gets its own folder."
            )
        self._is_ready = True

    def close(self) -> None:
        """Leave the host; its ranks run on."""
        self._is_ready = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def ask(self, verb: str, seconds: float = 60.0, **request: Any) -> dict[str, Any]:
        """Return the agent's answer.

        Raises:
            HostUnreachable: the connection broke, or no answer came in time.
            HostRefused: what was asked for could not be done there; has the host's words.
        """
        line = json.dumps({"verb": verb, **request}).encode() + b"\n"
        said = await self._connected.run(self._agent, line, seconds)
        return self._answer(said)

    def talk(self, verb: str, **request: Any) -> AbstractAsyncContextManager[Talk]:
        """Begin an exchange of lines with the agent."""
        return self._connected.talk(self._agent, {"verb": verb, **request})

    async def push(self, sets: Iterable[FileSet], sources: Mapping[str, Path]) -> None:
        """Copy there what is missing of the sets, going on where an earlier copy broke.

        Args:
            sources: each file here, by BLAKE3.

        Raises:
            HostUnreachable, HostRefused: as `ask`.
        """
        asked: dict[str, Any] = {
            "directory": self.directory,
            "workspace": str(self.workspace.root),
            "arrivals": f"{self.directory}/incoming",
            "sets": [one.to_json() for one in sets],
        }
        missing = (await self.ask("want", _SECONDS_TO_PLACE, **asked))["wanted"]
        for digest, offset in missing.items():
            target = f"{self.directory}/incoming/{digest}"
            await self._connected.put(sources[digest], target, offset)
        if missing:
            await self.ask("place", _SECONDS_TO_PLACE, **asked)

    async def pull(self, sets: Iterable[FileSet], workspace: Workspace) -> None:
        """Copy here what is missing of the sets, as `push`.

        Raises:
            HostUnreachable, HostRefused: as `ask`.
            ArtifactError: a file arrived damaged; the next try fetches it again.
            OSError: it cannot be written here; names the path.
        """
        sets = list(sets)
        arrivals = workspace.cache / "incoming"
        missing = wanted(workspace, arrivals, sets)
        for one in sets:
            folder = one.folder(self.workspace)
            for entry in one.files:
                if entry.blake3 in missing:
                    del missing[entry.blake3]
                    source = (folder / entry.path).as_posix()
                    await self._connected.get(source, arrivals / entry.blake3)
        put_in_place(workspace, arrivals, sets)

    async def pull_rest(self, source: str, target: Path) -> None:
        """Append to a file here what a growing one there has more.

        Raises:
            HostUnreachable, HostRefused: as `ask`.
            OSError: it cannot be written here; names the path.
        """
        await self._connected.get(source, target)

    @property
    def _connected(self) -> SshConnection:
        assert self._connection is not None
        return self._connection

    @property
    def _agent(self) -> list[str]:
        python = [*self._python, "-P", "-m", "redco_flow.launch.hosts.agent"]
        variables = [f"{name}={value}" for name, value in self.search_variables.items()]
        return ["env", *variables, *python]

    @property
    def _python(self) -> list[str]:
        """The interpreter; `~` is the home directory, where a login begins."""
        return [self._settings.python.removeprefix("~/")]

    @property
    def _bootstrap(self) -> list[str]:
        return [*self._python, "-I", *FROM_STDIN]

    def _program(self, action: str) -> bytes:
        arguments = (action, self.host.directory, self._snapshot.digest)
        return program_line(bootstrap_program(), *arguments)

    async def _ship_code(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(self._program("unpack"))
            await asyncio.to_thread(self._snapshot.write, file)
            file.seek(0)
            said = await self._connected.run(self._bootstrap, file, _SECONDS_TO_PLACE)
        answer = self._answer(said)
        if answer["changed"]:
            raise HostRefused(
                f"the code arrived on {self.label} damaged: {some_of(answer['changed'], 3)}."
            )

    def _answer(self, said: bytes) -> dict[str, Any]:
        # After whatever a login's own start-up files print.
        lines = [line for line in said.splitlines() if line.startswith(b"{")]
        if not lines:
            raise HostRefused(f"{self.label} answered {said[-500:]!r}, which is no JSON.")
        answer: dict[str, Any] = json.loads(lines[-1])
        if answer.get("type") == ArtifactError.__name__:
            raise ArtifactError(f"{self.label}: {answer['problem']}")
        if "problem" in answer:
            raise HostRefused(f"{self.label}: {answer['problem']}")
        return answer


async def is_shared(workspace: Workspace, connections: Sequence[HostConnection]) -> bool:
    """Say whether every host reads, under the same path, what is written here.

    Raises:
        HostUnreachable, HostRefused: a host does not answer.
        OSError: the workspace cannot be written; names the path.
    """
    content = secrets.token_hex(16)
    path = workspace.cache / f".seen-by-hosts-{content[:8]}"
    write_text(path, content)
    try:
        answers = await asyncio.gather(
            *(connection.ask("see", path=str(path), content=content) for connection in connections)
        )
    finally:
        path.unlink()
    return all(answer["sees"] for answer in answers)
