"""Say how a job on hosts ended, from its ranks' words and from what became of the silent ones."""

from __future__ import annotations

from collections.abc import Mapping

from redco_flow.launch.endings import ClusterWord, judge, read_endings
from redco_flow.launch.hosts.start import StartedJob
from redco_flow.tracking.attempt import ExitRecord
from redco_flow.tracking.states import Cause

LOST = "lost"

_FATES = {
    "gone": "its supervisor was killed (kill -9 or the out-of-memory killer)",
    "rebooted": "the host was restarted",
    "never started": "the host has forgotten it: its directory was emptied",
    LOST: "the host has not answered for too long (hosts.lost_after_minutes)",
}


def ending_of(job: StartedJob, fates: Mapping[int, str]) -> ExitRecord:
    """Return what exit.json says.

    Args:
        fates: of every rank: ended, or why there is no word of it.
    """
    silent = [
        f"rank {rank} on {job.host_of(rank)}: {_FATES[fate]}"
        for rank, fate in sorted(fates.items())
        if fate in _FATES
    ]
    return judge(
        read_endings(job.attempt, 0),
        job.call.resources.num_processes,
        ClusterWord(
            stopped=(Cause.PREEMPTED, "the host is being shut down."),
            silent=(Cause.NODE_FAILURE, f"{'; '.join(silent)}.") if silent else None,
        ),
        has_result=job.attempt.result_path.exists(),
        was_cancelled=job.attempt.cancel_path.exists(),
    )
