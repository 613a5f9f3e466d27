"""Records about hosts: hardware, results of `doctor`, results of `clean`.

A host tells its GPUs, its name and its packages' versions.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, TypedDict


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
    from importlib import metadata  # 15 ms, which no worker's first line waits for

    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
