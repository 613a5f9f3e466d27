"""A worker that no longer runs: noticed, ended, and tried again by itself."""

import os
import signal
from pathlib import Path

import pytest
from orchestrate_runs import TWO_STAGES, InProcess, count_lines, until, wait_for_stage


@pytest.mark.slow
def test_a_stage_whose_worker_is_frozen_is_tried_again_as_the_profile_allows(runs, tmp_path):
    """Fault 7, to its end."""
    gate, executions = tmp_path / "gate", tmp_path / "executions"
    runs.profile = {"stall_timeout_minutes": 0.2, "retries": {"stalled": 1}}
    run = runs.write(TWO_STAGES, [f"train.gate={gate}", f"train.executions={executions}"])
    driven = InProcess(run)
    wait_for_stage(run, "train")
    until(lambda: count_lines(executions) == 1)

    os.kill(worker_of(run.attempt("train", 1)), signal.SIGSTOP)
    until(lambda: count_lines(executions) == 2)
    gate.touch()
    outcome = driven.end()

    assert outcome.state == "completed"
    first, second = run.attempts("train")
    assert first.read_exit().cause == "stalled"
    assert second.read_exit().cause == "completed"
    assert "in pass_gate" in first.log_path(0).read_text()


def worker_of(attempt):
    """The process id of the attempt's worker."""
    supervisor = attempt.read_job()["supervisor"]["pid"]
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])


@pytest.mark.slow
def test_what_a_killed_supervisor_reserved_on_the_disk_is_freed(runs, tmp_path):
    run = runs.write(TWO_STAGES, [f"train.gate={tmp_path / 'never'}"])
    driven = InProcess(run)
    wait_for_stage(run, "train")
    attempt = run.attempt("train", 1)
    until(lambda: attempt.read_job() is not None)
    assert len(list(attempt.path.glob(".reserve-for-*.tmp"))) == 2

    os.kill(attempt.read_job()["supervisor"]["pid"], signal.SIGKILL)

    assert driven.end().state == "failed"
    assert list(attempt.path.glob(".reserve-for-*.tmp")) == []
