"""Say in exit.json how an XManager job ended, from its ranks' words alone."""

from __future__ import annotations

from typing import Any

from redco_flow.launch.hosts.ranks import runners_of
from redco_flow.launch.job import read_log_end
from redco_flow.launch.process_tree import processes_of
from redco_flow.launch.rank_endings import TAKEN_BACK, TERMINATED, judge_group, read_endings
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.clock import utc_now

EXPERIMENT_LOG = "logs/xmanager.log"
"""What XManager itself says, within the attempt's directory."""

_LOG_END_BYTES = 2000


def is_over(attempt: AttemptDirectory, num_processes: int) -> bool:
    """Say whether no rank runs any more, and none will start."""
    runners = dict(runners_of(attempt))
    if any(runner.is_alive() for runner in runners.values()):
        return False
    # Whoever could start a rank carries the attempt's mark, as would the rank.
    return len(runners) == num_processes or not any(processes_of(attempt.path))


def write_ending(attempt: AttemptDirectory, num_processes: int) -> None:
    """Write exit.json of a job that is over, once."""
    if attempt.read_exit() is None:
        record = _ending_of(attempt, num_processes)
        write_json(attempt.exit_path, record | {"ended_at": record["ended_at"] or utc_now()})


def _ending_of(attempt: AttemptDirectory, num_processes: int) -> dict[str, Any]:
    record = judge_group(read_endings(attempt, 0), num_processes)
    if attempt.result_path.exists():  # rank 0's last act
        record |= {"cause": "completed", "message": "the result is published.", "exit_code": 0}
    elif attempt.cancel_path.exists() and record["cause"] in (*TAKEN_BACK, "lost"):
        record |= {"cause": "cancelled", "message": "it was cancelled."}
    elif record["cause"] == TERMINATED:
        record |= {"cause": "cancelled", "message": "somebody else than redco-flow stopped it."}
    elif not any(runners_of(attempt)):
        record |= {"cause": "failed", "message": f"no process was started; {_log_end(attempt)}"}
    return record


def _log_end(attempt: AttemptDirectory) -> str:
    path = attempt.path / EXPERIMENT_LOG
    return f"{path} says:\n{read_log_end(path, _LOG_END_BYTES)}"
