"""A small disk of its own for a test that fills it, and what a training left on it."""

import contextlib
import shutil
import subprocess

import pytest

SMALL_DISK_BYTES = 32 << 20


@contextlib.contextmanager
def small_disk(folder, num_bytes=SMALL_DISK_BYTES):
    """Make `folder` a small disk inside the `with`."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path):
    """Write a file until the disk takes no more byte, whatever others remove meanwhile."""
    with path.open("wb", buffering=0) as file:
        while shutil.disk_usage(path.parent).free:
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * size)


def trained_steps(attempt):
    """The steps that an attempt logged."""
    return [one["step"] for one in attempt.read_metrics() if one["kind"] == "training"]


def committed_steps(workspace):
    """The training's checkpoints that are whole."""
    found = workspace.glob("work/*/checkpoints/*/commit.json")
    return sorted(int(path.parent.name) for path in found)
