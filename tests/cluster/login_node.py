"""A login node: a real sshd on this machine, behind a link that a test can cut.

It shares the machine with the laptop, which has another home, other keys and no workspace.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
Subsystem sftp internal-sftp
{environment}
"""
# `held`: a command line with this word waits where the test says, before or after its work.
_PYTHON = """\
#!/bin/sh
wait_at() {{
    case "$*" in *" run "*) [ ! -e "$0.$1" ] || touch "$0.reached" ;; *) return ;; esac
    while [ -e "$0.$1" ]; do sleep 0.05; done
}}
wait_at before "$@"
{python} "$@"; code=$?
wait_at after "$@"
exit $code
"""


def missing_programs():
    return [
        name for name in ("sshd", "ssh-keygen") if shutil.which(name, path=_SEARCH_PATH) is None
    ]


@dataclass
class Link:
    """Relays connections to a port; `cut` breaks them, and after `num_bytes` they break alone."""

    target: int
    num_bytes: int | None = None
    _pairs: list = field(default_factory=list)

    def __post_init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self):
        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.cut()
        self._listener.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._pairs += [near, far]
                for source, sink, counts in ((near, far, True), (far, near, False)):
                    threading.Thread(
                        target=self._relay, args=(source, sink, counts), daemon=True
                    ).start()

    def _relay(self, source, sink, counts):
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                if counts and self.num_bytes is not None:
                    self.num_bytes -= len(chunk)
                    if self.num_bytes < 0:
                        self.num_bytes = None
                        break
                sink.sendall(chunk)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@dataclass
class LoginNode:
    """A running sshd in a folder of its own.

    Args:
        link: between the laptop and it.
        python: the interpreter for profiles; holds `run` back while `python.before` or
            `python.after` exist.
    """

    folder: Path
    link: Link
    python: Path

    @property
    def workspace(self):
        return self.folder / "workspace"

    def settings(self, **changes):
        """Return a profile's `ssh:` section."""
        return {
            "address": "127.0.0.1",
            "port": self.link.port,
            "user": "root",
            "key": str(self.folder / "user_key"),
            "known_hosts": str(self.folder / "known_hosts"),
            "workspace": str(self.workspace),
            "python": str(self.python),
            **changes,
        }


def make_key(path):
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path))
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, env={"PATH": _SEARCH_PATH})


@dataclass
class Account:
    """An account of this machine other than ours, for the time of a test.

    Args:
        python: an interpreter that it may start, with our packages.
    """

    name: str
    home: Path
    python: Path

    def owner_of(self, path):
        return pwd.getpwuid(path.stat().st_uid).pw_name


@contextlib.contextmanager
def another_account(folder):
    """Add an account; at the end, end its processes and remove it.

    Args:
        folder: which everyone may enter.
    """
    name, home, python = f"redco-{os.getpid()}", folder / "home", folder / "venv/bin/python"
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(pytest.__file__).parent.parent
    subprocess.run([system, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    shutil.rmtree(site)
    site.symlink_to(packages)
    words = [
        "--no-log-init",
        "--password",
        "*",
        "--create-home",
        "--home-dir",
        home,
        "--shell",
        "/bin/sh",
        name,
    ]
    subprocess.run([shutil.which("useradd", path=_SEARCH_PATH), *words], check=True)
    try:
        yield Account(name, home, python)
    finally:
        uid = pwd.getpwnam(name).pw_uid
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if process.stat().st_uid == uid:
                    os.kill(int(process.name), signal.SIGKILL)
        subprocess.run([shutil.which("userdel", path=_SEARCH_PATH), "--force", name], check=False)


@contextlib.contextmanager
def running_login_node(folder, environment, interpreter=sys.executable):
    """Start sshd, whose sessions get the environment; stop it at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name in ("host_key", "user_key", "other_key"):
        make_key(folder / name)
    variables = " ".join(f'{name}="{value}"' for name, value in environment.items())
    config = folder / "sshd_config"
    config.write_text(
        _SSHD_CONFIG.format(port=port, folder=folder, environment=f"SetEnv {variables}")
    )
    python = folder / "python"
    python.write_text(_PYTHON.format(python=interpreter))
    python.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen(
        [shutil.which("sshd", path=_SEARCH_PATH), "-D", "-e", "-f", str(config)],
        stdin=subprocess.DEVNULL,
        stderr=(folder / "sshd.log").open("wb"),
    )
    link = Link(port)
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{link.port} {key}\n")
    try:
        _wait_for(port, daemon)
        yield LoginNode(folder, link, python)
    finally:
        link.close()
        daemon.terminate()
        daemon.wait()


def _wait_for(port, daemon):
    while daemon.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise RuntimeError("sshd does not start")
