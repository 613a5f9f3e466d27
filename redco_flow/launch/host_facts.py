"""Records about hosts: hardware, results of `doctor`, results of `clean`; this machine's GPUs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from redco_flow.search_path import library_environment

# Devices of other kinds (WSL, AMD, TPUs) are not counted by their files.
_OTHER_DEVICES = ("dxg", "kfd", "accel", "accel0", "vfio")
_GPU_PLATFORMS = {"cuda", "gpu"}
_SECONDS_TO_IMPORT = 60


def count_local_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int | None:
    """Return the most GPUs that a process here can have; None where only JAX can tell.

    Args:
        environ: of the process: `JAX_PLATFORMS` and `CUDA_VISIBLE_DEVICES` hide GPUs.
        devices: the folder of device files.
    """
    platforms = set(filter(None, environ.get("JAX_PLATFORMS", "").split(",")))
    if platforms == {"cpu"}:
        return 0
    if platforms and not platforms & _GPU_PLATFORMS:
        return None
    if any((devices / name).exists() for name in _OTHER_DEVICES):
        return None
    count = len(list(devices.glob("nvidia[0-9]*")))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, sum(one.strip() not in ("", "-1") for one in visible.split(",")))


def gpu_memory_gib() -> float | None:
    """Return the memory of the smallest GPU here, by nvidia-smi; None where that fails."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return min(map(float, done.stdout.split())) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


@dataclass(frozen=True)
class Finding:
    """One check's outcome.

    Args:
        check: what was looked at.
        is_good: whether it can be used as it is.
        detail: what was found.
        remedy: what to do where it is not good.
    """

    check: str
    is_good: bool
    detail: str
    remedy: str = ""


def output_of_python(check: str, program: str, *, remedy: str) -> str | Finding:
    """Return what a program prints in a Python process of its own; the finding where it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env=library_environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_IMPORT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(check, False, f"no answer in {_SECONDS_TO_IMPORT} s", remedy)
    if done.returncode != 0:
        return Finding(check, False, (done.stderr.strip().splitlines() or [""])[-1], remedy)
    return done.stdout


class CleanedHost(TypedDict):
    """A host's files before and after a clean-up.

    Args:
        label: the host's name.
        problem: why it could not be asked; "" where it could.
        items: path, kind, bytes, and the reason why it stays; without one it went, or would go.
        stuck: paths that could not be deleted whole.
    """

    label: str
    problem: str
    items: list[dict[str, Any]]
    stuck: list[str]


_SECONDS_TO_ASK = 20.0


def num_gpus() -> int | None:
    """Return how many GPUs nvidia-smi counts; None where there is none of it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_ASK,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def own_name_problem() -> str:
    """Say why the host's own name does not lead to it from elsewhere; "" if it does."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return f"{name} does not resolve ({error})"
    return f"{name} resolves to {address}" if address.startswith("127.") else ""


_DISTRIBUTIONS = (
    *("redco-flow", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"),
    *("transformers", "tokenizers", "datasets"),
)


def package_versions() -> dict[str, str]:
    """Return name to version, of Python and of what is installed here."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    return {"python": python, **installed_versions(_DISTRIBUTIONS)}


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return name to version of those that are installed here."""
    from importlib import metadata  # 15 ms, which no worker's first line waits for

    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
