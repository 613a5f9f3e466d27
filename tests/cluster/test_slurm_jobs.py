"""How Slurm jobs begin and end, on a real cluster."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_processes import phase_of, processes_of
from orchestrate_runs import TWO_STAGES, InProcess
from small_disk import small_disk
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.errors import RunCancelled, StageFailed
from redco_flow.launch.call import JobResources
from redco_flow.launch.endings import write_exit
from redco_flow.launch.executor import reattach
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.executor import SlurmExecutor
from redco_flow.launch.slurm.queue import drop_dependencies
from redco_flow.tracking.attempt import Cause, ExitRecord
from redco_flow.tracking.locks import find_holder

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_waiting_job_says_why_it_waits(submit):
    job = submit("write", settings={"options": ["--begin=now+1hour"]})

    status = wait_until(lambda: (s := job.status()).source.startswith("squeue") and s)

    assert (status.state, status.message) == ("pending", "waits in the queue: BeginTime")
    job.cancel()
    assert job.state == "CANCELLED"


def test_a_job_does_not_wait_for_one_that_has_completed_and_that_slurm_holds_in_the_queue(
    slurm, workspace, new_executor
):
    """Fault 10: a killed slurmctld has forgotten the end of a job, and holds it."""
    attempts = [make_attempt(workspace, run=f"tiny-{number}") for number in range(5)]
    executor = new_executor()
    with slurm.starts_nothing():
        held, other = (executor.submit_call(one) for one in attempts[:2])
        slurm.run("scontrol", "hold", held.job_id)
        jobs = [executor.submit_call_after(one, [held, other]) for one in attempts[2:]]
        completed = ExitRecord(exit_code=0, cause=Cause.COMPLETED, message="")
        write_exit(held.attempt, completed)
        # While one still waits for the other, Slurm is not told again at each answer.
        arguments = jobs[0].job_id, [held.job_id], slurm.environment
        assert [drop_dependencies(*arguments) for _ in range(2)] == [True, False]

    wait_until(lambda: {job.done() for job in jobs} == {True})
    slurm.run("scontrol", "release", held.job_id)

    assert [job.state for job in (*jobs, other)] == ["COMPLETED"] * 4
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs())
    assert not held.attempt.ranks_with_logs()


def test_a_job_whose_interpreter_is_missing_fails_with_the_end_of_its_log(submit):
    job = submit("write", settings={"python": "/nowhere/python"})

    job.wait()

    assert job.state == "FAILED"
    assert "/nowhere/python" in job.status().message
    assert "squeue" not in job.status().source


def test_what_slurm_refuses_is_told_in_its_words_and_leaves_no_job(submit):
    with pytest.raises(StageFailed, match=r"(?i)partition"):
        submit("write", settings={"partition": "nowhere"})


def preempt(slurm):
    """Have a job of higher priority take every node; return its id."""
    script = slurm.directory / "high.sh"
    script.write_text("#!/bin/sh\nsleep 600\n")
    options = ["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null"]
    return slurm.run("sbatch", "--parsable", *options, str(script)).strip()


@pytest.mark.parametrize("by", ["a job of higher priority", "a plain SIGTERM"])
def test_a_preempted_job_saves_is_queued_again_and_goes_on(slurm, submit, tmp_path, by):
    """Fault 5: all ranks save the same step; the job is requeued and resumes there.

    With slurm.python the last command is a step, which Slurm must start in the time of grace.
    """
    settings = {} if by == "a plain SIGTERM" else {"python": sys.executable}
    call = {"settings": settings, "config": {"folder": str(tmp_path)}}
    job = submit("finish_if_saved", grace_seconds=20, **call)
    wait_until(lambda: phase_of(job.attempt) == "training")

    with slurm.starts_nothing():
        if by == "a plain SIGTERM":
            slurm.run("scancel", "--signal=TERM", job.job_id)
        else:
            other = preempt(slurm)
        wait_until((tmp_path / "saved").exists)
        waiting = wait_until(lambda: (s := job.status()).state == "pending" and s)
        if by != "a plain SIGTERM":
            slurm.run("scancel", other)
    assert "waits in the queue" in waiting.message
    assert "restarted 1 times" in waiting.message
    # Slurm starts it again by itself once the old start's credential has expired.
    assert job.wait_seconds(400)

    assert job.state == "COMPLETED", job.status()
    assert job.attempt.read_exit().restart == 1
    assert not job.attempt.error_path.exists()


def test_a_save_that_the_grace_ends_is_as_if_it_had_never_begun(slurm, submit, tmp_path):
    """Fault 6: killed while it writes; the next start goes on from the save before."""
    job = submit("save_slowly", grace_seconds=1, config={"folder": str(tmp_path)})
    wait_until(lambda: phase_of(job.attempt) == "training")

    with slurm.starts_nothing():
        slurm.run("scancel", "--signal=TERM", job.job_id)
        wait_until(lambda: job.status().state == "pending")
        (checkpoints,) = tmp_path.glob("workspace/work/*/checkpoints")
        left = {path.name.partition(".")[0] for path in checkpoints.iterdir()}
    assert job.wait_seconds(400)

    assert job.state == "COMPLETED", job.status()
    assert job.attempt.read_exit().restart == 1
    assert left == {"1", "2"}  # it had begun to write
    assert not (tmp_path / "saved").exists()
    assert json.loads((tmp_path / "restored.json").read_text()) == {"step": 1, "w": [1.0] * 4}


def test_a_group_whose_node_dies_is_queued_again_and_completes_elsewhere(slurm, submit, tmp_path):
    """Fault 8: the stage is retried on another host; rank 0's node lives on."""
    call = {"resources": JobResources(num_hosts=2), "num_cpu_devices": 1}
    job = submit("wait_for_go", config={"folder": str(tmp_path)}, **call)
    wait_until(lambda: (tmp_path / "starts").exists() and read_starts(tmp_path) == "xx")
    hosts = slurm.run("squeue", "--noheader", "--job", job.job_id, "--format=%N")
    node = slurm.run("scontrol", "show", "hostnames", hosts.strip()).split()[-1]

    slurm.kill_node(node)
    try:
        wait_until(lambda: read_starts(tmp_path) == "xxxx")
        (tmp_path / "go").touch()
        assert job.wait_seconds(400)
    finally:
        slurm.start_node(node)

    assert job.state == "COMPLETED", job.status()
    assert job.attempt.read_exit().restart == 1


def read_starts(folder):
    return (folder / "starts").read_text()


@pytest.fixture
def on_small_disk(slurm, workspace):
    """The workspace on a disk of 2 MB, and the settings of jobs on a node that sees it."""
    node = slurm.nodes[0]
    slurm.kill_node(node)  # it does not see what is mounted later
    with small_disk(workspace, 2 << 20):
        slurm.start_node(node)
        slurm.wait_until_idle()
        yield {"options": [f"--nodelist={node}"]}
        slurm.kill_node(node)
    slurm.start_node(node)


def test_a_full_disk_is_named_in_the_jobs_records_although_it_is_full(
    on_small_disk, submit, workspace
):
    """Fault 20: Slurm's own log of the job and its last command find no room either."""
    job = submit("fill_disk", settings=on_small_disk)

    assert job.wait_seconds(400), job.status()

    assert job.status().source == "exit.json"
    assert job.state == "FAILED"
    assert f"The file system at {workspace} is full: " in job.status().message
    assert "Free space" in job.status().message


def test_a_job_that_a_node_refuses_starts_on_another(slurm, submit):
    """Slurm drains a node whose prolog fails, and holds the job until it is released."""
    slurm.break_node(slurm.nodes[0])
    try:
        job = submit("write")
        assert job.wait_seconds(400), job.status()
    finally:
        slurm.mend_node(slurm.nodes[0])

    assert job.state == "COMPLETED", job.status()
    assert job.attempt.read_exit().restart == 1


def test_scancel_by_a_user_is_reported_as_cancelled_and_leaves_nothing(submit, slurm, tmp_path):
    """Fault 9; the children that ignore SIGTERM are gone too."""
    job = submit("ignore_termination", config={"folder": str(tmp_path)})
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)

    slurm.run("scancel", job.job_id)
    assert job.wait_seconds(400)

    assert job.state == "CANCELLED"
    assert "scancel" in job.status().message
    wait_until(lambda: processes_of(job.attempt) == [])
    with pytest.raises(RunCancelled):
        job.result()


def test_a_restart_of_the_controller_does_not_touch_a_running_job(submit, slurm, tmp_path):
    """Fault 10: running jobs are not affected."""
    job = submit("wait_for_go", config={"folder": str(tmp_path)})
    wait_until(lambda: phase_of(job.attempt) == "waiting")

    before = wait_until(lambda: (s := job.status()).source == "squeue: RUNNING" and s)
    slurm.stop_controller()
    try:
        during = wait_until(lambda: (s := job.status()) != before and s)
        stranger = reattach(job.record())
        first_look = stranger.status()
    finally:
        slurm.start_controller()
    (tmp_path / "go").touch()
    assert job.wait_seconds(400)

    assert (during.state, during.source) == ("running", "squeue of before: RUNNING")
    assert "last known; squeue: slurm_load_jobs error: Unable to contact" in during.message
    assert first_look.state == "running"  # by the job's own heartbeat, or what squeue said before
    assert job.state == "COMPLETED"
    assert (tmp_path / "starts").read_text() == "x"


def test_a_job_that_slurm_has_forgotten_is_lost_within_seconds(slurm, submit):
    """Fault 11: how the job ended is known within seconds all the same."""
    job = submit("write", settings={"options": ["--hold"]})
    record = job.record() | {"job_id": "1"}

    stranger = reattach(record)

    assert stranger.wait_seconds(400)
    assert stranger.state == "LOST"
    assert "redco-flow resume" in stranger.status().message
    job.cancel()


SUBMIT = """
import sys
kinds, workspace, folder = sys.argv[1:]
sys.path.append(kinds)
from tiny_stages.calls import make_attempt
from redco_flow.launch.slurm.executor import SlurmExecutor
from redco_flow.launch.slurm.config import Config
attempt = make_attempt(workspace, "wait_for_go", config={"folder": folder})
SlurmExecutor(workspace, Config()).submit_call(attempt)
"""


def path_with(tmp_path, sbatch):
    """PATH with an sbatch before the real one that kills the process which calls it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\nkill -9 $PPID\n")
    (programs / "sbatch").chmod(0o755)
    return f"{programs}{os.pathsep}{os.environ['PATH']}"


def submit_and_die(workspace, tmp_path, sbatch):
    """Submit from a process that sbatch kills."""
    kinds = str(Path(__file__).parent.parent / "launch" / "kinds")
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT, kinds, str(workspace), str(tmp_path)],
        env=os.environ | {"PATH": path_with(tmp_path, sbatch)},
    )
    assert done.returncode == -signal.SIGKILL
    (record,) = workspace.rglob("job.json")
    return reattach(json.loads(record.read_text()))


def test_a_job_whose_id_was_lost_is_found_by_its_name_and_not_submitted_twice(
    slurm, workspace, tmp_path
):
    """Fault 12: the job is found by its name; nothing is submitted twice."""
    real = subprocess.check_output(["which", "sbatch"], text=True).strip()

    job = submit_and_die(workspace, tmp_path, f'{real} "$@"')
    wait_until(lambda: job.status().state == "running")

    assert list(slurm.jobs()) == [job.job_id]
    assert job.attempt.read_job()["job_id"] == job.job_id
    (tmp_path / "go").touch()
    assert job.wait_seconds(400)
    assert job.state == "COMPLETED"
    assert (tmp_path / "starts").read_text() == "x"


def test_a_submission_that_never_reached_slurm_is_lost_and_may_be_repeated(
    slurm, workspace, tmp_path
):
    """Fault 12, the other way round."""
    job = submit_and_die(workspace, tmp_path, "true")

    assert job.wait_seconds(400)

    assert job.state == "NEVER_SUBMITTED"
    assert "never got" in job.status().message
    assert slurm.jobs() == {}


def test_a_stage_whose_submission_never_reached_slurm_is_submitted_again(
    runs, tmp_path, monkeypatch
):
    """Fault 12, to its end."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", path_with(tmp_path, "true"))
        run = runs.start(TWO_STAGES)
        wait_until(lambda: run.attempt("preprocess", 1).job_path.exists())
        wait_until(lambda: find_holder(run) is None)

    driven = InProcess(run)

    assert driven.end().state == "completed", driven.said
    assert [len(run.attempts(stage)) for stage in ("preprocess", "train")] == [2, 1]


def test_odd_names_and_values_never_reach_a_shell(slurm, tmp_path):
    """Fault 30: sbatch's own parser and bash read the file for real."""
    odd = tmp_path / "$(touch X) `touch X`; touch X 'a' \"b\" ünï # --stall-seconds"
    odd.mkdir()
    config = {"text": "$(touch X); touch X\n'\"", "folder": "--help"}
    attempt = make_attempt(odd, "write", run="--run", config=config)
    environment = {**os.environ, "ODD": "$(touch X)\n;touch X"}

    job = SlurmExecutor(odd, Config(), environment=environment).submit_call(attempt)

    assert job.result()["outputs"].keys() == {"dataset"}
    assert list(Path.cwd().glob("X")) == list(tmp_path.rglob("X")) == []


def test_the_warning_signal_does_nothing_to_processes_that_do_not_expect_it(
    submit, slurm, tmp_path
):
    """A data loader's helper process must not die of the warning before the stage has saved."""
    job = submit("save_beside_a_child", grace_seconds=20, config={"folder": str(tmp_path)})
    wait_until(lambda: phase_of(job.attempt) == "training")

    slurm.run("scancel", "--signal=URG", job.job_id)
    wait_until((tmp_path / "saved").exists)

    assert (tmp_path / "saved").read_text() == "the child lives"
