"""One host over SSH: run a program there, stream its lines, move files.

Knows asyncssh, which is imported when the first connection is made. Keys of hosts are never
accepted unasked, and no password is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from redco_flow.errors import ClusterUnreachable
from redco_flow.local_paths import expanded
from redco_flow.records import open_no_link
from redco_flow.spec.ssh import SshTarget

if TYPE_CHECKING:
    import asyncssh


def about_key(host: SshTarget, known: Path, reason: str) -> str:
    """Return what to tell.

    Args:
        known: the file of known keys.
        reason: SSH's own words.
    """
    address = host.address if host.port in (None, 22) else f"[{host.address}]:{host.port}"
    port = "" if host.port in (None, 22) else f"-p {host.port} "
    scan = f"ssh-keyscan {port}{host.address} >> {known}"
    if _is_listed(host, known):
        return (
            f"the host key of {host.label} has changed ({reason}): another machine may be in "
            f"between, or the machine was reinstalled. If you know why, remove the old key with "
            f"`ssh-keygen -R '{address}' -f {known}`, add the new one with `{scan}` after "
            f"comparing it with what the machine itself shows, and try again."
        )
    return (
        f"the host key of {host.label} is not known ({reason}): add it with `{scan}` after "
        f"comparing it with what the machine itself shows (ssh-keygen -lf "
        f"/etc/ssh/ssh_host_ed25519_key.pub). If it is an alias of ~/.ssh/config, "
        f"`ssh {host.address}` once asks instead."
    )


def _is_listed(host: SshTarget, known_hosts: Path) -> bool:
    import asyncssh

    try:
        found = asyncssh.read_known_hosts(str(known_hosts)).match(host.address, "", host.port or 22)
    except (OSError, ValueError):
        return False
    return any(found[:3])


_SECONDS_TO_CONNECT = 10
_SECONDS_BETWEEN_KEEPALIVES = 3
_NUM_UNANSWERED_KEEPALIVES = 3
_CHUNK_BYTES = 8 << 20


FROM_STDIN = ("-c", 'import sys;exec(getattr(sys.stdin,"buffer",sys.stdin).readline())')
"""Arguments of a Python that reads its program from standard input: nothing in them, and nothing of
the program, is special to any login shell."""


def program_line(program: bytes, *arguments: str) -> bytes:
    """Return the line with which a Python that was started by `FROM_STDIN` runs the program."""
    words = f"sys.argv[1:] = {list(arguments)!a}; exec(compile({program!a}, 'program', 'exec'))\n"
    return words.encode()


class HostUnreachable(ClusterUnreachable):
    """No connection, or it broke; whatever runs on the host runs on. Worth another try."""


class HostRefused(ClusterUnreachable):
    """The host, or this side, refuses: its key, our key, or what is installed there."""


@dataclass(frozen=True)
class SshSettings:
    """SSH settings for all hosts of a profile.

    Args:
        known_hosts: the file of their keys; None takes ~/.ssh/known_hosts.
    """

    known_hosts: str | None = None

    @property
    def known_hosts_file(self) -> Path:
        """The file that decides which keys are known."""
        return expanded(self.known_hosts or "~/.ssh/known_hosts")


class SshConnection:
    """An open connection; `connect` makes one."""

    def __init__(
        self,
        host: SshTarget,
        connection: asyncssh.SSHClientConnection,
        jump: asyncssh.SSHClientConnection | None,
    ) -> None:
        self.host = host
        self._connection = connection
        self._jump = jump
        self._sftp: asyncssh.SFTPClient | None = None

    async def run(
        self, command: Sequence[str], said: bytes | BinaryIO = b"", seconds: float = 60.0
    ) -> bytes:
        """Run a program to its end; return its output.

        Args:
            command: a program and its arguments; none of them is shell text.
            said: its standard input.

        Raises:
            HostUnreachable: the connection broke, or it took too long.
            HostRefused: it failed; has the end of its error output.
        """
        given = {"input": said} if isinstance(said, bytes) else {"stdin": said, "bufsize": 1 << 18}
        with self._told_plainly():
            async with asyncio.timeout(seconds):
                done = await self._connection.run(
                    shlex.join(command), **given, encoding=None, check=False
                )
        if done.exit_status is None:
            raise HostUnreachable(f"{self.host.label}: the connection broke.")
        if done.exit_status != 0:
            error = _text(done.stderr)
            raise HostRefused(
                f"{self.host.label}: {command[0]} ended with code {done.exit_status}: "
                f"{error[-2000:] or 'it said nothing'}"
            )
        return _bytes(done.stdout)

    async def _start(self, command: Sequence[str]) -> asyncssh.SSHClientProcess[bytes]:
        """Start a program; raise HostUnreachable where the connection broke."""
        with self._told_plainly():
            async with asyncio.timeout(_SECONDS_TO_CONNECT):
                return await self._connection.create_process(shlex.join(command), encoding=None)

    async def stream(
        self,
        command: Sequence[str],
        output: Callable[[bytes], None],
        errors: Callable[[bytes], None],
        said: bytes = b"",
        *,
        keeps_open: bool = False,
    ) -> int:
        """Run a program; pass on each line as it comes.

        Args:
            command, said: as of `run`.
            output, errors: take the lines of standard output and of standard error.
            keeps_open: whether its standard input ends with the connection, not after `said`.

        Returns:
            its exit code; as a shell's where a signal ended it.

        Raises:
            HostUnreachable: the connection broke.
        """
        process = await self._start(command)
        try:
            with contextlib.suppress(OSError):  # it has ended already: its exit code says why
                process.stdin.write(said)
                if not keeps_open:
                    process.stdin.write_eof()
            await asyncio.gather(
                self._pass_on(process.stdout, output), self._pass_on(process.stderr, errors)
            )
            with self._told_plainly():
                code = (await process.wait()).returncode
        finally:
            process.close()
        if code is None:
            raise HostUnreachable(f"{self.host.label}: the connection broke.")
        return code if code >= 0 else 128 - code

    async def _pass_on(
        self, reader: asyncssh.SSHReader[bytes], take: Callable[[bytes], None]
    ) -> None:
        rest = b""
        while True:
            with self._told_plainly():
                chunk = await reader.read(_CHUNK_BYTES)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                take(line + b"\n")
            if not chunk:
                break
        if rest:
            take(rest)

    @contextlib.asynccontextmanager
    async def talk(self, command: Sequence[str], first: Mapping[str, Any]) -> AsyncIterator[Talk]:
        """Run a program that exchanges lines of JSON with this side, inside the `with`.

        Args:
            first: the first line that it gets.

        Raises:
            HostUnreachable: the connection broke.
        """
        process = await self._start(command)
        try:
            talk = Talk(self, process)
            talk.send(first)
            yield talk
        finally:
            process.close()

    async def put(self, source: Path, target: str, offset: int) -> None:
        """Copy a file there from `offset` on, which is what `target` has of it already.

        Raises:
            HostUnreachable: the connection broke.
            HostRefused: the file cannot be written there.
        """
        with self._told_plainly(), source.open("rb") as reader:
            sftp = await self._sftp_client()
            reader.seek(offset)
            async with await sftp.open(target, "rb+" if offset else "wb") as writer:
                while chunk := reader.read(_CHUNK_BYTES):
                    await writer.write(chunk, offset)
                    offset += len(chunk)

    async def get(self, source: str, target: Path) -> None:
        """Copy a file from there, going on where `target` ends.

        Raises:
            HostUnreachable: the connection broke.
            HostRefused: there is no such file, or it cannot be read.
        """
        with self._told_plainly(), open(target, "ab", opener=open_no_link) as writer:
            sftp = await self._sftp_client()
            offset = writer.tell()
            async with await sftp.open(source, "rb") as reader:
                while chunk := await reader.read(_CHUNK_BYTES, offset):
                    writer.write(_bytes(chunk))
                    offset += len(chunk)

    def close(self) -> None:
        """Leave; what was started detached runs on."""
        self._connection.close()
        if self._jump is not None:
            self._jump.close()

    async def _sftp_client(self) -> asyncssh.SFTPClient:
        if self._sftp is None:
            self._sftp = await self._connection.start_sftp_client()
        return self._sftp

    @contextlib.contextmanager
    def _told_plainly(self) -> Any:
        """Turn asyncssh's errors, but not those of files here, into ours."""
        import asyncssh

        lost = (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection)
        try:
            yield
        except lost as error:
            raise HostUnreachable(
                f"{self.host.label}: the connection broke ({error.reason})."
            ) from error
        except asyncssh.SFTPError as error:
            raise HostRefused(f"{self.host.label}: {error.reason}") from error
        except TimeoutError as error:
            raise HostUnreachable(f"{self.host.label}: did not answer in time.") from error
        except (asyncssh.Error, ConnectionError, BrokenPipeError) as error:
            raise HostUnreachable(
                f"{self.host.label}: the connection broke ({error or 'without a reason'})."
            ) from error


class Talk:
    """Lines of JSON to and from a running program."""

    def __init__(
        self, connection: SshConnection, process: asyncssh.SSHClientProcess[bytes]
    ) -> None:
        self._connection = connection
        self._process = process

    def send(self, record: Mapping[str, Any]) -> None:
        """Send one line; it is lost where the connection is."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(dict(record)).encode() + b"\n")

    async def hear(self, seconds: float) -> dict[str, Any] | None:
        """Return the next line's record; None at the program's regular end.

        Raises:
            HostUnreachable: nothing came for so long, or the connection broke.
            HostRefused: the program failed; has the end of its error output.
        """
        label = self._connection.host.label
        with self._connection._told_plainly():
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
                if line.endswith(b"\n"):
                    record: dict[str, Any] = json.loads(line)
                    return record
                done = await self._process.wait()
        if done.exit_status is None:
            raise HostUnreachable(f"{label}: the connection broke.")
        if done.exit_status != 0:
            error = _text(done.stderr)
            raise HostRefused(f"{label}: {error[-2000:] or f'code {done.exit_status}'}")
        return None


async def connect(host: SshTarget, settings: SshSettings) -> SshConnection:
    """Open a connection.

    Raises:
        HostUnreachable: there is no answer.
        HostRefused: its key is unknown or has changed, or ours is not accepted; says what to do.
    """
    import asyncssh

    jump = await _jump(host, settings)
    try:
        try:
            connection = await asyncssh.connect(
                host.address,
                **_options(host, settings),
                **({"port": host.port} if host.port else {}),
                **({"username": host.user} if host.user else {}),
                tunnel=jump or (),
            )
        except asyncssh.HostKeyNotVerifiable as error:
            advice = about_key(host, settings.known_hosts_file, str(error.reason))
            raise HostRefused(advice) from error
        except asyncssh.PermissionDenied as error:
            if host.key and _has_passphrase(host.key):
                raise HostRefused(
                    f"{host.label}: the key {host.key} has a passphrase, which is never asked "
                    f"for, and the agent does not have it: `ssh-add {host.key}`."
                ) from error
            raise HostRefused(
                f"{host.label} accepts none of our keys ({error.reason}): put the public key into "
                f"~/.ssh/authorized_keys there, name its private key with `key:`, or add it to "
                f"the agent (ssh-add). Passwords are never asked for."
            ) from error
        except ValueError as error:
            raise HostRefused(
                f"{host.label}: ~/.ssh/config, or a key that it names, cannot be read: {error}."
            ) from error
        except (OSError, TimeoutError, asyncssh.Error) as error:
            words = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise HostUnreachable(f"{host.label} cannot be reached: {words}.") from error
    except BaseException:
        if jump is not None:
            jump.close()
        raise
    return SshConnection(host, connection, jump)


async def _jump(host: SshTarget, settings: SshSettings) -> asyncssh.SSHClientConnection | None:
    if host.jump_host is None:
        return None
    user, _, rest = host.jump_host.rpartition("@")
    address, _, port = rest.partition(":")
    through = SshTarget(
        address=address, user=user or None, port=int(port) if port else None, key=host.key
    )
    return (await connect(through, settings))._connection


def _options(host: SshTarget, settings: SshSettings) -> dict[str, Any]:
    import asyncssh

    known = settings.known_hosts_file
    key: dict[str, Any] = {}
    path = host.key
    try:
        if host.key and _has_passphrase(host.key):
            public = f"{host.key}.pub"
            only = {"agent_identities": [public]} if Path(public).is_file() else {}
            key = {"client_keys": [host.key], "ignore_encrypted": True, **only}
        elif host.key:
            key = {"client_keys": [host.key]}
        path = str(known)
        if known.is_file():
            asyncssh.read_known_hosts(path)
    except (OSError, ValueError) as error:
        raise HostRefused(f"{host.label}: {path} cannot be read: {error}.") from error
    return {
        # An empty list accepts nothing; None would accept everything.
        "known_hosts": str(known) if known.is_file() else ([], [], []),
        "preferred_auth": "publickey",
        "connect_timeout": _SECONDS_TO_CONNECT,
        "login_timeout": _SECONDS_TO_CONNECT,
        "keepalive_interval": _SECONDS_BETWEEN_KEEPALIVES,
        "keepalive_count_max": _NUM_UNANSWERED_KEEPALIVES,
        **key,
    }


def _has_passphrase(key: str) -> bool:
    """Say whether a private key is encrypted.

    Raises:
        OSError, ValueError: it cannot be read, or is not a key.
    """
    import asyncssh

    try:
        asyncssh.read_private_key(key)
    except asyncssh.KeyImportError as error:
        if "assphrase" not in str(error):
            raise
        return True
    return False


def _bytes(said: bytes | str | None) -> bytes:
    """Return output as bytes, which it is unless an encoding was requested."""
    return said.encode() if isinstance(said, str) else said or b""


def _text(said: bytes | str | None) -> str:
    return _bytes(said).decode("utf-8", "replace").strip()
