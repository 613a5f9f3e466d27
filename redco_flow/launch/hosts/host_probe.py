"""What one host is and reaches, for `redco-flow doctor`: a few looks, nothing is started."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from redco_flow.launch.host_facts import num_gpus, own_name_problem
from redco_flow.launch.hosts import lease as host_lease
from redco_flow.launch.hosts.leftovers import num_bytes
from redco_flow.launch.package_versions import package_versions
from redco_flow.launch.rendezvous import own_addresses


def look_around(directory: Path) -> dict[str, Any]:
    """Return what was found.

    Args:
        directory: of this host.
    """
    return {
        "node": os.uname().nodename,
        "versions": package_versions(),
        "time": time.time(),
        "taken_gib": num_bytes(directory) / 2**30,
        "free_gib": shutil.disk_usage(directory).free / 2**30,
        "gpus": num_gpus(),
        "addresses": own_addresses(),
        "own_name": own_name_problem(),
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
