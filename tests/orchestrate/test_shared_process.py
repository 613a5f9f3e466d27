"""Runs of one environment are driven by one process; each keeps its own log, lease and end."""

import importlib
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from orchestrate_runs import (
    TWO_STAGES,
    count_lines,
    events,
    kill_launcher,
    until,
    wait_for_end,
    wait_for_stage,
)

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.orchestrate.run.cancel import cancel_run
from redco_flow.orchestrate.run.driver import Driver
from redco_flow.orchestrate.run.sharing import Listener, offer
from redco_flow.orchestrate.run.start import resume_run, retry_run
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.tracking.locks import acquire, find_holder
from redco_flow.tracking.workspace import home_directory


@pytest.fixture
def start(runs, tmp_path):
    """Start a run whose training waits for `gate`; each number makes other results."""

    def start(number):
        overrides = [
            f"preprocess.count={number}",
            f"train.executions={tmp_path / 'trained'}",
            f"train.gate={tmp_path / 'gate'}",
        ]
        return runs.start(TWO_STAGES, overrides)

    return start


def pid_of(run):
    return until(lambda: find_holder(run)).holder.pid


def test_runs_of_one_environment_share_a_process_and_one_of_another_has_its_own(
    start, monkeypatch, tmp_path
):
    first, second = start(1), start(2)
    monkeypatch.setenv("SETTING_OF_JOBS", "another")
    third = start(3)
    for run in (first, second, third):
        wait_for_stage(run, "train")
    pids = [pid_of(run) for run in (first, second, third)]
    first.request_cancel("not needed")
    states = [wait_for_end(first)["state"]]
    (tmp_path / "gate").touch()
    states += [wait_for_end(run)["state"] for run in (second, third)]

    assert pids[0] == pids[1] != pids[2]
    assert states == ["cancelled", "completed", "completed"]
    for run, other in ((first, second), (second, first)):
        assert other.id not in run.log_path.read_text()
    until(lambda: all(find_holder(run) is None for run in (first, second, third)))
    assert "completed: 2 stages completed" in second.log_path.read_text()


def test_the_process_that_is_started_after_one_was_killed_continues_all_of_its_runs(
    start, tmp_path
):
    before, with_a_job = [start(1), start(2)], start(4)
    for run in (*before, with_a_job):
        wait_for_stage(run, "train")
    kill_launcher(before[0])
    assert [find_holder(run) for run in (*before, with_a_job)] == [None] * 3
    record = LaunchRecord.read(with_a_job)
    replace(record, profile={**record.profile, "launcher": "slurm"}).write(with_a_job)

    runs = [*before, start(3)]
    until(lambda: all(map(find_holder, runs)))
    pids = {pid_of(run) for run in runs}
    (tmp_path / "gate").touch()

    assert len(pids) == 1
    assert [wait_for_end(run)["state"] for run in runs] == ["completed"] * 3
    assert count_lines(tmp_path / "trained") == 4
    folder = home_directory() / "launchers"
    until(lambda: not any(list(folder.glob(f"*/{run.id}")) for run in (*runs, with_a_job)))
    assert "lease_taken_over" not in events(with_a_job)


def test_a_run_that_cannot_be_driven_is_left_without_a_lease(runs):
    run = runs.write(TWO_STAGES)
    run.log_path.mkdir()

    with pytest.raises(IsADirectoryError):
        Driver().start(run)

    assert find_holder(run) is None


def test_a_run_that_is_cancelled_before_its_process_has_begun_is_driven_only_when_retried(runs):
    run = runs.write(TWO_STAGES)
    cancel_run(run)

    with pytest.raises(UsageError, match="has ended already: it is cancelled"):
        Driver().start(run)

    assert run.read_state()["state"] == "cancelled"
    assert find_holder(run) is None
    retry_run(run)
    assert wait_for_end(run)["state"] == "completed"


@pytest.mark.slow
def test_runs_whose_process_is_killed_at_random_moments_compute_everything_once(start, tmp_path):
    """Fault 17: `redco-flow resume` finds the running job again; the flow run that died is marked
    as crashed.
    """
    generator = random.Random(3)
    runs = [start(number) for number in (1, 2, 3)]
    for _ in range(8):
        time.sleep(generator.uniform(0.0, 0.6))
        if (lease := find_holder(generator.choice(runs))) is not None:
            os.kill(lease.holder.pid, signal.SIGKILL)
            until(lambda lease=lease: not lease.holder.is_alive())
        for run in runs:
            with suppress(UsageError):  # the process of another one has continued it
                resume_run(run)
    (tmp_path / "gate").touch()

    assert [wait_for_end(run)["state"] for run in runs] == ["completed"] * 3
    assert count_lines(tmp_path / "trained") == 3


def test_a_process_accepts_no_run_once_a_module_of_its_own_has_changed(runs, monkeypatch, tmp_path):
    module = tmp_path / "my_own_module.py"
    module.write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("my_own_module")
    monkeypatch.setitem(sys.modules, "my_own_module", sys.modules["my_own_module"])
    listener = Listener(Driver(), name := f"test-{os.getpid()}", since=time.time_ns())
    taken = runs.write(TWO_STAGES)
    options = {"leave_cancelled": False}
    with acquire(taken), pytest.raises(RedcoFlowError, match=r"could not be started.* is driven"):
        offer(taken, name, options)
    unknown = offer(taken, name, {"of_another_version": True})
    accepted = offer(taken, name, options)
    module.write_text("NUMBER = 2\n")

    assert not unknown
    assert accepted
    assert not offer(runs.write(TWO_STAGES), name, options)
    listener.wait()
    assert taken.read_state()["state"] == "completed"
