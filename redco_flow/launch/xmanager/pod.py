"""One rank in a container of its own, in the foreground: what a pod of an Indexed Job runs.

`python -P -m redco_flow.launch.xmanager.pod ATTEMPT …`; which rank, the environment says. The
cluster's SIGTERM lets it save. Exits with 1 where the other ranks are to be ended too.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.rank import supervise
from redco_flow.launch.supervisor import Limits
from redco_flow.tracking.attempt import AttemptDirectory


def main(arguments: list[str]) -> int:
    """Run the rank to its end."""
    options = _parse(arguments)
    AttemptDirectory(options.attempt).logs.mkdir(exist_ok=True)
    limits = Limits(options.stall_seconds, options.grace_seconds)
    place = ProcessPlace.from_environment(os.environ)
    return supervise(options.attempt, place, limits, seconds_to_end=options.walltime_seconds)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redco_flow.launch.xmanager.pod")
    parser.add_argument("attempt", type=Path)
    parser.add_argument("--stall-seconds", type=float, required=True)
    parser.add_argument("--grace-seconds", type=float, required=True)
    parser.add_argument("--walltime-seconds", type=float)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
