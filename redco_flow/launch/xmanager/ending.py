"""Say in exit.json how an XManager job ended, from its ranks' words alone."""

from __future__ import annotations

from redco_flow.launch.endings import ClusterWord, judge, read_endings, write_exit
from redco_flow.launch.hosts.ranks import runners_of
from redco_flow.launch.job import read_log_end
from redco_flow.launch.process_tree import processes_of
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.states import Cause

EXPERIMENT_LOG = "logs/xmanager.log"
"""What XManager itself says, within the attempt's directory."""

_LOG_END_BYTES = 2000


def is_over(attempt: AttemptDirectory, num_processes: int) -> bool:
    """Say whether no rank runs any more, and none will start."""
    runners = dict(runners_of(attempt))
    if any(runner.is_alive() for runner in runners.values()):
        return False
    # A process that could start a rank carries the attempt's mark, as would the rank.
    return len(runners) == num_processes or not any(processes_of(attempt.path))


def write_ending(attempt: AttemptDirectory, num_processes: int) -> None:
    """Write exit.json of a job that is over, once."""
    if attempt.read_exit() is not None:
        return
    stranger = (Cause.CANCELLED, "it was stopped, not by redco-flow.")
    has_begun = any(runners_of(attempt))
    not_begun = (Cause.FAILED, f"no process was started; {_log_end(attempt)}")
    record = judge(
        read_endings(attempt, 0),
        num_processes,
        ClusterWord(stopped=stranger, unstarted=None if has_begun else not_begun),
        has_result=attempt.result_path.exists(),
        was_cancelled=attempt.cancel_path.exists(),
    )
    write_exit(attempt, record)


def _log_end(attempt: AttemptDirectory) -> str:
    path = attempt.path / EXPERIMENT_LOG
    if not path.exists():
        return "XManager wrote no log."
    return f"{path} says:\n{read_log_end(path, _LOG_END_BYTES)}"
