"""Say how a job on hosts ended, from its ranks' words and from what became of the silent ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_flow.launch.hosts.start import StartedJob
from redco_flow.launch.rank_endings import TAKEN_BACK, TERMINATED, judge_group, read_endings

LOST = "lost"

_FATES = {
    "gone": "its supervisor was killed (kill -9 or the out-of-memory killer)",
    "rebooted": "the host was restarted",
    "never started": "the host has forgotten it: its directory was emptied",
    LOST: "the host has not answered for too long (hosts.lost_after_minutes)",
}


def ending_of(job: StartedJob, fates: Mapping[int, str]) -> dict[str, Any]:
    """Return what exit.json says.

    Args:
        fates: of every rank: ended, or why there is no word of it.
    """
    record = judge_group(read_endings(job.attempt, 0), job.call.resources.num_processes)
    silent = [
        f"rank {rank} on {job.host_of(rank)}: {_FATES[fate]}"
        for rank, fate in sorted(fates.items())
        if fate in _FATES
    ]
    if silent and record["cause"] == "node_failure":
        record |= {"message": f"{'; '.join(silent)}."}
    if job.attempt.result_path.exists():  # rank 0's last act
        record |= {"cause": "completed", "message": "the result is published.", "exit_code": 0}
    elif record["cause"] == "completed":
        message = f"{job.host_of(0)} lost the result before it was copied here."
        record |= {"cause": "node_failure", "message": message, "exit_code": None}
    if record["cause"] in TAKEN_BACK and job.attempt.cancel_path.exists():
        record |= {"cause": "cancelled", "message": "it was cancelled."}
    if record["cause"] == TERMINATED:
        record |= {"cause": "preempted", "message": "the host is being shut down."}
    return record
