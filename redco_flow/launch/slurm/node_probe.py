"""Say, as one line of JSON, what one node sees: `redco-flow doctor` runs it on several at once.

`python -m redco_flow.launch.slurm.node_probe FOLDER SIGNAL…` under srun; FOLDER, in the workspace,
holds `mark`. Reads, writes, meets the other nodes over the network as ranks do, and waits for the
signals, which `probe` sends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redco_flow.launch.host_facts import num_gpus, own_name_problem
from redco_flow.launch.package_versions import package_versions
from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous
from redco_flow.records import write_text

LISTENING = "listening-"
"""A node's file of this name, with its rank, says that it waits for signals; has the job's id."""

WRITTEN = "written-by-"
"""A node's file of this name, with its rank; has the host's own name."""

_SECONDS_TO_MEET = 8.0
_SECONDS_TO_HEAR = 6.0


def main(arguments: list[str]) -> int:
    """Look around and print what was found."""
    now = time.time()
    folder, names = Path(arguments[0]), arguments[1:]
    heard: set[str] = set()
    for name in names:
        signal.signal(signal.Signals[f"SIG{name}"], lambda *_, name=name: heard.add(name))
    place = ProcessPlace.from_slurm(os.environ, gpus_per_host=0, rendezvous_seconds=0)
    found: dict[str, Any] = {
        "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "host": socket.gethostname(),
        "rank": place.rank,
        "time": now,
        "versions": package_versions(),
        "gpus": num_gpus(),
        "own_name": own_name_problem(),
        **_files(folder, place.rank),
        "unreached": "",
        "unknown_names": [],
    }
    if not found["problem"] and place.num_processes > 1:
        found["unreached"] = _meet(folder, place)
        found["unknown_names"] = _unknown_names(folder)
    if not found["problem"]:
        write_text(folder / f"{LISTENING}{place.rank}", os.environ["SLURM_JOB_ID"])
        _listen(heard, names)
    sys.stdout.write(json.dumps(found | {"heard": sorted(heard)}) + "\n")
    return 0


def _files(folder: Path, rank: int) -> dict[str, str]:
    try:
        read = (folder / "mark").read_text()
        write_text(folder / f"{WRITTEN}{rank}", socket.gethostname())
    except OSError as error:
        return {"read": "", "problem": str(error)}
    return {"read": read, "problem": ""}


def _meet(folder: Path, place: ProcessPlace) -> str:
    """Meet the other nodes' processes; return "" or why that failed."""
    try:
        Rendezvous(folder, place, {}, _SECONDS_TO_MEET).meet()
    except CannotMeet as error:
        return str(error)
    return ""


def _unknown_names(folder: Path) -> list[str]:
    """The names that hosts call themselves by and that do not resolve here."""
    found = []
    for name in sorted({path.read_text() for path in folder.glob(f"{WRITTEN}*")}):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            found.append(name)
    return found


def _listen(heard: set[str], names: Sequence[str]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_HEAR
    while len(heard) < len(names) and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
