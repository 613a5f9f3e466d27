"""Real workspaces, real other processes, real small disks."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from redco_flow.tracking.workspace import Workspace

_UNSHARE = ("unshare", "--map-root-user", "--mount")
_MOUNT = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "workspace")


@pytest.fixture
def big_workspace() -> Iterator[Workspace]:
    """In memory where there is some: thousands of durable writes measure the disk otherwise."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Workspace.open(folder)


@pytest.fixture
def start_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a script in a process of its own; killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object, prefix: tuple[str, ...] = ()):
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def on_small_disk(start_python, tmp_path: Path) -> Callable[[str], str]:
    """Run a script with a directory on a file system of 1 MiB; return what it prints."""
    folder = tmp_path / "small"
    folder.mkdir()
    script_prefix, prefix = "", (*_UNSHARE, "sh", "-c", _MOUNT, str(folder))
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"]).returncode:
        script_prefix, prefix = _LIMIT, ()  # no file can exceed 1 MiB: the same place fails

    def run(script: str) -> str:
        process = start_python(script_prefix + textwrap.dedent(script), folder, prefix=prefix)
        output, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
        return output

    return run
