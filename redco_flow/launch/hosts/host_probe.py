"""What one host is and reaches, for `redco-flow doctor`: a few looks, nothing is started."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from redco_flow.launch.hosts import lease as host_lease
from redco_flow.launch.package_versions import package_versions
from redco_flow.launch.rendezvous import own_addresses

_SECONDS_TO_ASK = 20.0


def look_around(directory: Path) -> dict[str, Any]:
    """Return what was found.

    Args:
        directory: of this host.
    """
    return {
        "node": os.uname().nodename,
        "versions": package_versions(),
        "time": time.time(),
        "free_gib": shutil.disk_usage(directory).free / 2**30,
        "gpus": _num_gpus(),
        "addresses": own_addresses(),
        "own_name": _own_name_problem(),
        "holder": host_lease.holder(directory),
    }


def listen(until: io.RawIOBase) -> None:
    """Keep a free port open, and say which, until the one who asked has been served."""
    with socket.create_server(("", 0)) as listener:
        sys.stdout.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
        sys.stdout.flush()
        until.readline()


def knock(addresses: list[str], port: int) -> str:
    """Try to reach a port at any of the addresses; return "" or what went wrong."""
    problems = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=5.0):
                return ""
        except OSError as error:
            problems.append(f"{address}: {error}")
    return "; ".join(problems)


def _num_gpus() -> int | None:
    """What nvidia-smi counts; None where there is none."""
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


def _own_name_problem() -> str:
    """Say why the host's own name does not lead to it from elsewhere; "" if it does."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return f"{name} does not resolve ({error})"
    return f"{name} resolves to {address}" if address.startswith("127.") else ""
