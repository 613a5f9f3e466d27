"""One rank on a host without a scheduler: detached, known by its process, alone by its lock.

`python -m redco_flow.launch.hosts.rank ATTEMPT …`, started by `ranks`, which has taken the
rank's lock and hands it on: the kernel drops it when this process dies. Owns `runner.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.rank import supervise
from redco_flow.launch.supervisor import Limits
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import ProcessIdentity


def main(arguments: list[str]) -> int:
    """Say who runs the rank, then run it."""
    options = _parse(arguments)
    place = ProcessPlace.from_environment(os.environ)
    folder = AttemptDirectory(options.attempt).rank_directory(place.rank)
    write_json(folder / "runner.json", ProcessIdentity.current().to_json())
    limits = Limits(options.stall_seconds, options.grace_seconds)
    return supervise(options.attempt, place, limits, seconds_to_end=options.walltime_seconds)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.launch.hosts.rank")
    parser.add_argument("attempt", type=Path)
    parser.add_argument("--stall-seconds", type=float, required=True)
    parser.add_argument("--grace-seconds", type=float, required=True)
    parser.add_argument("--walltime-seconds", type=float)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
