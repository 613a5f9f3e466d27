"""Say, as one line of JSON, what one node sees: `redco-flow doctor` runs it on several at once.

`python -m redco_flow.launch.slurm.node_probe FOLDER` under srun; FOLDER, in the workspace, holds
`mark`. Reads, writes, and meets the other nodes over the network as ranks do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from redco_flow.launch.package_versions import package_versions
from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous

_SECONDS_TO_MEET = 8.0


def main(arguments: list[str]) -> int:
    """Look around and print what was found."""
    now = time.time()
    folder = Path(arguments[0])
    place = ProcessPlace.from_slurm(os.environ, gpus_per_host=0, rendezvous_seconds=0)
    node = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    try:
        read = (folder / "mark").read_text()
        (folder / f"written-by-{place.rank}").write_text(node)
        problem = ""
    except OSError as error:
        read, problem = "", str(error)
    unreached = ""
    if not problem and place.num_processes > 1:
        try:
            Rendezvous(folder, place, {}, _SECONDS_TO_MEET).meet()
        except CannotMeet as error:
            unreached = str(error)
    found = {
        "node": node,
        "read": read,
        "problem": problem,
        "versions": package_versions(),
        "time": now,
        "unreached": unreached,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
