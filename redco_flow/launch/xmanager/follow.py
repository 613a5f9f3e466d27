"""The program of an XManager job: start one detached rank, and wait for its end.

`python -P -m redco_flow.launch.xmanager.follow ATTEMPT …`; which rank, the environment says.
XManager ends its local jobs with the process that made them; the rank runs on. Writes the ending
of a rank whose supervisor was killed, so that the other ranks do not wait for it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict

from redco_flow.launch.endings import RankEnding
from redco_flow.launch.hosts.ranks import RanksOrder, start
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.supervisor import parser_of
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now

_SECONDS_BETWEEN_LOOKS = 0.1


def main(arguments: list[str]) -> int:
    """Return 0 once the rank has ended, in whatever way: how, its own record says."""
    options = _parse(arguments)
    attempt = AttemptDirectory(options.attempt)
    rank_info = RankInfo.from_environment(os.environ)
    order = RanksOrder(
        attempt=str(attempt.path),
        rank_infos=[asdict(rank_info)],
        stall_seconds=options.stall_seconds,
        grace_seconds=options.grace_seconds,
        walltime_seconds=options.walltime_seconds,
    )
    (runner,) = start(order)
    follow(attempt, rank_info, ProcessIdentity.from_json(runner))
    return 0


def follow(attempt: AttemptDirectory, rank_info: RankInfo, runner: ProcessIdentity) -> None:
    """Wait for the rank's end, and see to it that there is a record of it.

    Args:
        runner: the process that supervises the rank.
    """
    while runner.is_alive():
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    path = attempt.rank_exit_path(rank_info.rank)
    if not path.exists():
        write_json(path, _lost(rank_info).to_json())


def _lost(rank_info: RankInfo) -> RankEnding:
    return RankEnding(
        exit_code=None,
        cause=Cause.LOST,
        message="its supervisor was killed (kill -9 or the out-of-memory killer).",
        ended_at=utc_now(),
        rank=rank_info.rank,
        restart=rank_info.restart,
        host=os.uname().nodename,
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("redco_flow.launch.xmanager.follow")
    parser.add_argument("--walltime-seconds", type=float)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
