"""The verb drill: does a profile's cluster lose work when something goes wrong?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from redco_flow.cli.arguments import Verbs, add_json
from redco_flow.cli.status import follow_run
from redco_flow.cli.text import columns, duration

_VERDICTS = {True: "bitwise", False: "NO"}


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    drill = verbs.add("drill", _drill)
    drill.add_argument("-p", "--profile", default="local", metavar="PROFILE")
    drill.add_argument(
        "--fault",
        dest="faults",
        action="append",
        metavar="FAULT",
        help="only this one: preempt, kill, stall or timeout; may be repeated",
    )
    drill.add_argument(
        "--num-hosts", type=int, default=1, metavar="N", help="hosts of each training (1)"
    )
    add_json(drill)


def _drill(options: argparse.Namespace) -> int:
    from redco_flow.launch.processes import FAULTS
    from redco_flow.orchestrate.checks.drill import drill
    from redco_flow.spec.profile import load_own_profile

    profile = load_own_profile(options.profile)
    directory = Path(profile.workspace) / "drills" / time.strftime("%Y%m%d-%H%M%S")
    sys.stderr.write(f"the drill's runs: {directory}\n")
    survivals = drill(
        profile,
        options.profile,
        follow_run,
        faults=options.faults or FAULTS,
        num_hosts=options.num_hosts,
        directory=directory.absolute(),
    )
    if options.json:
        print(json.dumps([dataclasses.asdict(survival) for survival in survivals]))
    else:
        rows = [
            [
                survival.fault,
                _VERDICTS[survival.survived],
                duration(survival.seconds),
                survival.how,
            ]
            for survival in survivals
        ]
        print(columns(rows, ["FAULT", "SURVIVED", "TIME", "HOW"]))
    return 1 if any(not survival.survived for survival in survivals) else 0
