"""Real jobs of XManager's local backend: what they leave, how they end, what survives what."""

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from job_processes import phase_of, processes_of, worker_of
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.errors import StageFailed
from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import reattach
from redco_flow.launch.processes import kill_processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TWO = JobResources(processes_per_host=2)
LAUNCH = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from redco_flow.launch.xmanager.executor import XManagerExecutor
from redco_flow.launch.xmanager.config import Config
from redco_flow.tracking.attempt import AttemptDirectory
attempt = AttemptDirectory(Path(sys.argv[1]))
executor = XManagerExecutor(attempt.path, Config(), variables={}, grace_seconds=5)
executor.submit_call(attempt).wait()
"""


@pytest.fixture
def launch(xmanager):
    """Submit an attempt's call from a process of its own."""
    started = []

    def launch(attempt):
        search = [path for path in sys.path if "tests" in path]
        command = [sys.executable, "-c", LAUNCH, str(attempt.path), *search]
        started.append((subprocess.Popen(command), attempt))
        return started[-1][0]

    yield launch
    for process, attempt in started:
        process.kill()
        process.wait()
        kill_processes_of(attempt.path)


def test_a_run_is_one_experiment_and_each_attempt_a_work_unit(submit, xmanager):
    first = submit("write", number=1)
    assert first.wait_seconds(400), first.status()
    second = submit("write", number=2)
    assert second.wait_seconds(400), second.status()

    assert first.result()["outputs"] == second.result()["outputs"]
    experiment, number = first.job_id.split("-")
    assert (number, second.job_id) == ("1", f"{experiment}-2")
    with sqlite3.connect(xmanager / ".xmanager/experiments.sqlite3") as database:
        titles = database.execute("select experiment_id, experiment_title from experiment")
        units = database.execute("select experiment_id, work_unit_id from work_unit")
        assert (int(experiment), "tiny-abcd") in set(titles)
        assert {(int(experiment), 1), (int(experiment), 2)} <= set(units)


def test_every_job_of_a_work_unit_takes_part_and_rank_zero_publishes(submit, tmp_path):
    job = submit("note_process", resources=TWO, config={"folder": str(tmp_path)})

    assert job.wait_seconds(400), job.status()
    assert job.state == "COMPLETED", job.status()
    noted = sorted(path.read_text().split(",")[0] for path in tmp_path.glob("*.noted"))
    assert noted == ["0 of 2", "1 of 2"]


def test_submitters_that_meet_at_a_fresh_database_all_succeed(submit, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        submitted = [
            pool.submit(submit, "write", run=run, number=number)
            for run, number in [("one-a", 1), ("one-a", 2), ("two-b", 1)]
        ]
    jobs = [one.result() for one in submitted]

    for job in jobs:
        assert job.wait_seconds(400), job.status()
        assert job.state == "COMPLETED", job.status()
    assert len({job.job_id for job in jobs}) == 3
    assert len({job.job_id.split("-")[0] for job in jobs}) == 2


@pytest.mark.parametrize(
    "victims", ["the launcher at once", "the launcher", "all that is not a rank"]
)
def test_a_job_outlives_its_launcher_and_is_found_again(launch, workspace, tmp_path, victims):
    """Fault 17: `redco-flow resume` finds the running job again; the flow run that died is marked
    as crashed.
    """
    attempt = make_attempt(workspace, "wait_for_go", config={"folder": str(tmp_path)})
    launcher = launch(attempt)
    wait_until(attempt.job_path.exists)
    if victims != "the launcher at once":
        wait_until(lambda: phase_of(attempt) == "waiting")

    launcher.kill()
    launcher.wait()
    if victims == "all that is not a rank":
        for program in ("xmanager_experiment", "xmanager_follow"):
            for pid in processes_of(attempt, program):
                os.kill(pid, signal.SIGKILL)
    job = reattach(attempt.read_job())
    assert job.status().state in ("pending", "running")
    (tmp_path / "go").touch()

    assert job.wait_seconds(400), job.status()
    assert job.state == "COMPLETED", job.status()
    assert (tmp_path / "starts").read_text() == "x"
    assert attempt.read_exit().cause == "completed"
    wait_until(lambda: processes_of(attempt) == [])


def test_a_rank_that_raises_ends_the_group_and_its_error_is_the_jobs(submit):
    job = submit("raise_on_rank_one", resources=TWO)

    assert job.wait_seconds(400), job.status()

    assert job.state == "FAILED"
    assert "rank 1 of 2" in job.status().message
    assert "only rank 1 does this" in str(job.exception())
    wait_until(lambda: processes_of(job.attempt) == [])


def test_the_death_of_a_supervisor_ends_the_group_and_is_told(submit):
    job = submit("hang", resources=TWO)
    wait_until(lambda: phase_of(job.attempt) == "hanging" and worker_of(job.attempt, 1))
    (supervisor,) = (
        pid
        for pid in processes_of(job.attempt, "redco_flow.launch.hosts.ranks")
        if b"REDCO_FLOW_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )

    os.kill(supervisor, signal.SIGKILL)
    assert job.wait_seconds(400), job.status()

    assert job.state == "LOST"
    assert "rank 1 of 2" in job.status().message
    assert "its supervisor was killed" in job.status().message
    wait_until(lambda: processes_of(job.attempt) == [])


def test_what_xmanager_cannot_start_is_told_in_its_own_words(submit, monkeypatch, tmp_path):
    place = tmp_path / "home"
    place.mkdir()
    (place / ".xmanager").write_text("not a directory")
    monkeypatch.setenv("HOME", str(place))

    with pytest.raises(StageFailed, match=r"(?s)XManager did not start .*FileExistsError"):
        submit("write")


def test_fifty_megabytes_that_are_no_text_and_no_line_hang_nothing(submit, tmp_path):
    """Fault 37: XManager's own reader would stop at the first line of a megabyte."""
    job = submit("print_fifty_megabytes", config={"folder": str(tmp_path)})
    wait_until(lambda: phase_of(job.attempt) == "waiting")

    (tmp_path / "go").touch()
    assert job.wait_seconds(400), job.status()

    assert job.state == "COMPLETED", job.status()
    assert job.paths.stdout.stat().st_size > 50 << 20
    assert "bytes before this are left out" in job.stdout()


def test_a_database_that_another_program_has_locked_is_told_in_its_words(submit, xmanager):
    """Fault 16: waited for some seconds, and nothing is started."""
    assert submit("write").wait_seconds(400)
    with sqlite3.connect(xmanager / ".xmanager/experiments.sqlite3") as database:
        database.execute("begin exclusive")

        with pytest.raises(StageFailed, match=r"(?s)XManager did not start .*database is locked"):
            submit("write", number=2)

    assert submit("write", number=3).wait_seconds(400)
