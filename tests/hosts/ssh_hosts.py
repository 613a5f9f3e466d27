"""Two hosts behind real sshd on this machine, each in namespaces of its own; nothing is left after.

`python tests/hosts/ssh_hosts.py [DIRECTORY]` starts them for a person; a test session gets them
from the fixture `hosts`. A host has its own network address, host key, name, processes and
directory; killing it is a power cut. Needs root. Of the launcher's folders they see `shared` and
not `private`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INSTALL = "install openssh-server iproute2 (apt)"
_PROGRAMS = ("sshd", "ssh-keygen", "ip", "unshare", "mount")
_SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_NAMESPACES = (
    *("--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"),
    *("--propagation", "private"),
)
_SECONDS_TO_START = 300.0
_PR_SET_PDEATHSIG = 1

_SSHD_CONFIG = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {authorized_keys}
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
MaxSessions 100
ClientAliveInterval 5
ClientAliveCountMax 2
Subsystem sftp internal-sftp
"""
# As a machine of its own would be: it resolves its name and the others', sees no disk of the
# launcher's but the shared one, and its shells begin without what this machine's user has them do,
# such as taking a lock, which a power cut would leave behind for all the others.
_BOOT = """\
mount --bind "$FOLDER/hosts" /etc/hosts
[ ! -e "$SHELL_STARTUP" ] || mount --bind /dev/null "$SHELL_STARTUP"
mount -t tmpfs none "$PRIVATE"
hostname "$NAME"
mkdir -p /run/sshd
exec "$SSHD" -D -e -f "$FOLDER/sshd_config"
"""


def missing_programs() -> list[str]:
    """Return the programs that the hosts need and this machine has not."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_SEARCH_PATH) is None]


def why_not_permitted() -> str:
    """Say why namespaces cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"rf{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@dataclass(frozen=True)
class SshHost:
    """One host.

    Args:
        name: its own.
        folder: its configuration on this machine.
        link: this machine's end of its cable.
        directory: its working directory, for the profile.
    """

    name: str
    address: str
    folder: Path
    link: str

    @property
    def directory(self) -> Path:
        return self.folder / "directory"


class SshHosts:
    """Running hosts on a network of their own.

    Args:
        directory: everything of them.
    """

    def __init__(self, directory: Path, num_hosts: int = 2) -> None:
        self.directory = directory.absolute()
        self.shared = self.directory / "shared"
        self.private = self.directory / "private"
        self.key = self.directory / "user_key"
        self.known_hosts = self.directory / "known_hosts"
        self._mark = secrets.token_hex(3)
        self._bridge = f"rf{self._mark}br"
        net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}"
        self._own_address = f"{net}.1"
        self.hosts = [
            SshHost(
                name=f"rf{self._mark}h{index}",
                address=f"{net}.{10 + index}",
                folder=self.directory / f"host{index}",
                link=f"rf{self._mark}v{index}",
            )
            for index in range(num_hosts)
        ]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def profile(self, **changes: object) -> dict[str, object]:
        """Return a profile's `hosts:` section."""
        addresses = [
            {
                "address": host.address,
                "user": "root",
                "key": str(self.key),
                "directory": str(host.directory),
            }
            for host in self.hosts
        ]
        return {
            "addresses": addresses,
            "python": sys.executable,
            "known_hosts": str(self.known_hosts),
            "rendezvous_seconds": 60,
            **changes,
        }

    def start(self) -> None:
        """Lay the cables and start every host."""
        for folder in (self.shared, self.private, *(host.folder for host in self.hosts)):
            folder.mkdir(parents=True, exist_ok=True)
        self._make_key(self.key)
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self._own_address}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for host in self.hosts:
            self._lay_cable(host)
            self.make_host_key(host)
            self._configure(host)
        self.write_known_hosts()
        for host in self.hosts:
            self.start_host(host)

    def stop(self) -> None:
        """Kill every host with all that runs there, and remove the network."""
        for host in self.hosts:
            self.kill_host(host)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True)

    def start_host(self, host: SshHost) -> None:
        """Boot a host and wait until it answers."""
        variables = {
            "FOLDER": str(host.folder),
            "PRIVATE": str(self.private),
            "NAME": host.name,
            "SHELL_STARTUP": str(Path.home() / ".bashrc"),
            "SSHD": _program("sshd"),
            "PATH": _SEARCH_PATH,
        }
        with (host.folder / "sshd.log").open("ab") as log:
            self._daemons[host.name] = subprocess.Popen(
                [
                    *(_program("ip"), "netns", "exec", host.name),
                    *(_program("unshare"), *_NAMESPACES, "sh", "-ec", _BOOT),
                ],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + _SECONDS_TO_START
        while not _answers(host.address):
            if time.monotonic() > deadline or self._daemons[host.name].poll() is not None:
                raise RuntimeError(f"{host.name}: {(host.folder / 'sshd.log').read_text()}")
            time.sleep(0.05)

    def kill_host(self, host: SshHost) -> None:
        """End a host and everything on it at once, as a power cut would."""
        daemon = self._daemons.pop(host.name, None)
        if daemon is None:
            return
        for child in _children(daemon.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            daemon.wait(5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def cut(self, host: SshHost) -> None:
        """Pull a host's cable; what runs there runs on."""
        _run("ip", "link", "set", host.link, "down")

    def mend(self, host: SshHost) -> None:
        """Plug it in again."""
        _run("ip", "link", "set", host.link, "up")

    def separate(self, one: SshHost, other: SshHost) -> None:
        """Let two hosts no longer reach each other, as a firewall would."""
        for host, target in ((one, other), (other, one)):
            _run("ip", "-n", host.name, "route", "add", "unreachable", target.address)

    def join(self, one: SshHost, other: SshHost) -> None:
        """Undo `separate`."""
        for host, target in ((one, other), (other, one)):
            _run("ip", "-n", host.name, "route", "delete", "unreachable", target.address)

    def make_host_key(self, host: SshHost) -> None:
        """Give a host a new key; sshd shows it to the next who connects."""
        self._make_key(host.folder / "host_key")

    def write_known_hosts(self) -> None:
        """Know every host by the key that it has now."""
        lines = [f"{host.address} {_public(host.folder / 'host_key')}" for host in self.hosts]
        self.known_hosts.write_text("\n".join(lines) + "\n")

    def _lay_cable(self, host: SshHost) -> None:
        inside = f"{host.link}i"
        _run("ip", "netns", "add", host.name)
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", inside)
        _run("ip", "link", "set", inside, "netns", host.name)
        _run("ip", "link", "set", host.link, "master", self._bridge, "up")
        within = ("ip", "-n", host.name)
        _run(*within, "address", "add", f"{host.address}/24", "dev", inside)
        _run(*within, "link", "set", inside, "up")
        _run(*within, "link", "set", "lo", "up")

    def _configure(self, host: SshHost) -> None:
        names = "".join(f"{one.address} {one.name}\n" for one in self.hosts)
        (host.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        authorized = self.directory / "user_key.pub"
        (host.folder / "sshd_config").write_text(
            _SSHD_CONFIG.format(
                address=host.address, folder=host.folder, authorized_keys=authorized
            )
        )

    @staticmethod
    def _make_key(path: Path) -> None:
        path.unlink(missing_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path))


@contextlib.contextmanager
def running_hosts(directory: Path | None = None) -> Iterator[SshHosts]:
    """Start two hosts; stop them and remove their directory at the end."""
    folder = directory or Path(tempfile.mkdtemp(prefix="redco-hosts-"))
    folder.mkdir(exist_ok=True)
    hosts = SshHosts(folder)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(
        [_program(command[0]), *command[1:]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


def _program(name: str) -> str:
    return shutil.which(name, path=_SEARCH_PATH) or name


def _public(key: Path) -> str:
    return " ".join(key.with_suffix(".pub").read_text().split()[:2])


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=1.0) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in listed]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    """Start the hosts, say how to use them, and keep them until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="ssh_hosts", description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, help="made, and removed at the end")
    options = parser.parse_args()
    if missing := missing_programs():
        sys.stderr.write(f"not here: {', '.join(missing)}; {INSTALL}\n")
        return 2
    if reason := why_not_permitted():
        sys.stderr.write(f"{reason}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running_hosts(options.directory) as hosts, contextlib.suppress(KeyboardInterrupt):
        import yaml

        profile = {"executor": "hosts", "hosts": hosts.profile()}
        path = hosts.directory / "hosts.yaml"
        path.write_text(yaml.safe_dump(profile, sort_keys=False))
        print(f"# in another terminal: redco-flow run pipelines/quickstart.yaml -p {path}")
        print("# Ctrl-C here stops the hosts and every job on them", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
