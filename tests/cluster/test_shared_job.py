"""Stages of one `group` in one Slurm job: each with its own records, retries and reuse."""

import shutil

import pytest
from orchestrate_runs import InProcess, kill_launcher, wait_for_end, wait_for_stage
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.cli.view import read_run_view
from redco_flow.launch.call import JobResources
from redco_flow.launch.endings import write_exit
from redco_flow.launch.slurm.executor import reattach
from redco_flow.launch.slurm.script import JOB_ID_FILE
from redco_flow.orchestrate.run.attempts import count_ended
from redco_flow.orchestrate.run.cancel import StopRequest, cancel_run
from redco_flow.orchestrate.run.driver import open_session
from redco_flow.orchestrate.run.start import resume_run
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.records import write_json
from redco_flow.tracking.attempt import Cause, ExitRecord
from redco_flow.tracking.run_directory import RunDirectory

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GROUPED = """
name: grouped
stages:
  preprocess: {kind: orchestrate_kinds.numbers, group: small}
  train: {kind: orchestrate_kinds.total, group: small}
  compare: {kind: orchestrate_kinds.score, metrics: [train], group: small}
"""
STAGES = ["preprocess", "train", "compare"]


def job_ids(run, stages=STAGES):
    return [run.latest_attempt(stage).read_job()["job_id"] for stage in stages]


def executed(executions):
    return executions.read_text().split()[::3]


def causes(run):
    return [run.latest_attempt(stage).cause for stage in STAGES]


def phase_of(run, stage):
    attempt = run.latest_attempt(stage)
    return ((attempt and attempt.read_progress()) or {}).get("phase")


@pytest.mark.parametrize("ahead", [False, True])
def test_stages_of_a_group_run_in_one_job_and_a_second_run_reuses_them(
    runs, slurm, held, gate, executions, ahead
):
    driven = InProcess(runs.write(GROUPED, held, ahead=ahead))
    wait_until(lambda: phase_of(driven.run, "train") == "waiting")
    jobs, states = slurm.jobs(), driven.states()
    waiting = driven.run.read_state()["stages"]["compare"]["message"]
    gate.touch()

    outcome = driven.end()

    assert outcome.state == "completed", driven.said
    (job,) = jobs
    assert job_ids(driven.run) == [job] * 3
    assert (states["preprocess"], states["train"]) == ("completed", "running")
    assert (states["compare"], waiting) == ("waiting", f"job {job} runs it after train")
    assert executed(executions) == ["preprocess", "train"]
    logs = [driven.run.latest_attempt(stage).logs / "slurm.log" for stage in STAGES]
    assert all(path.is_file() for path in logs)
    again = InProcess(runs.write(GROUPED, held, ahead=ahead))
    assert again.end().message == "3 stages completed, 3 of them reused"


def test_a_stage_that_fails_ends_the_job_and_its_retry_has_the_rest_of_the_group(
    runs, slurm, held, gate, executions, tmp_path
):
    runs.profile["retries"] = {"failed": 1}
    gate.touch()
    cured = tmp_path / "cured"
    driven = InProcess(runs.write(GROUPED, [*held, f"train.fails_until={cured}"]))
    assert driven.end().state == "failed"
    run = driven.run
    first = [run.attempt(stage, 1) for stage in STAGES]
    second = [run.attempt(stage, 2).read_job()["job_id"] for stage in ("train", "compare")]
    cured.touch()

    resumed = InProcess(run)
    outcome = resumed.end()

    assert outcome.state == "completed", resumed.said
    assert [one.cause for one in first] == ["completed", "failed", "cancelled"]
    why = "it never began: stage train, before it in the same job, ended: failed."
    assert first[2].read_exit().message == why
    assert len(set(second)) == 1
    assert second[0] != first[0].read_job()["job_id"]
    assert executed(executions) == ["preprocess", "train", "train", "train"]
    assert [len(run.attempts(stage)) for stage in STAGES] == [1, 3, 3]
    assert driven.said
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs(), 300)


def test_the_job_goes_on_without_its_launcher_and_resume_follows_it(
    runs, slurm, held, gate, executions
):
    run = runs.start(GROUPED, held)
    wait_until(lambda: phase_of(run, "train") == "waiting")
    kill_launcher(run)
    (job,) = slurm.jobs()
    interrupted = read_run_view(run)["state"]
    resume_run(run)
    wait_for_stage(run, "train")
    gate.touch()

    state = wait_for_end(run)

    assert interrupted == "interrupted"
    assert state["state"] == "completed", run.log_path.read_text()
    assert job_ids(run) == [job] * 3
    assert executed(executions) == ["preprocess", "train"]


def test_a_requeued_job_repeats_no_stage_that_has_completed(runs, slurm, held, gate, executions):
    driven = InProcess(runs.write(GROUPED, held))
    wait_until(lambda: phase_of(driven.run, "train") == "waiting")
    (job,) = slurm.jobs()
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for("it is queued again", lambda: slurm.jobs().get(job) == "PENDING")
    gate.touch()
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    outcome = driven.end()

    assert outcome.state == "completed", driven.said
    assert executed(executions) == ["preprocess", "train", "train"]
    ends = [driven.run.latest_attempt(stage).read_exit() for stage in STAGES]
    assert [end.restart for end in ends] == [0, 1, 1]


def test_a_group_goes_on_after_its_controller_was_away_and_has_forgotten_the_last_seconds(
    runs, slurm, held, gate, executions, tmp_path
):
    """Fault 10: slurmctld, killed, starts from a state in which the first stage's step runs."""
    first_gate, saved, state = tmp_path / "first", tmp_path / "state", slurm.directory / "state"
    driven = InProcess(runs.write(GROUPED, [*held, f"preprocess.gate={first_gate}"]))
    attempt = wait_until(lambda: driven.run.latest_attempt("preprocess"))
    command = f"redco_flow.launch.rank {attempt.path} ".encode()
    wait_until(lambda: command in read_bytes(state / "job_state"))
    shutil.copytree(state, saved, ignore=shutil.ignore_patterns("*.new", "*.old"))
    first_gate.touch()
    wait_until(lambda: phase_of(driven.run, "train") == "waiting")
    slurm.kill_controller()
    shutil.copytree(saved, state, dirs_exist_ok=True)
    gate.touch()
    log = driven.run.latest_attempt("compare").logs / "slurm.log"
    try:
        wait_until(lambda: read_bytes(log).count(b"Unable to contact slurm controller") >= 2)
    finally:
        slurm.start_controller()

    outcome = driven.end()

    assert outcome.state == "completed", driven.said
    assert executed(executions) == ["preprocess", "train"]
    assert [len(driven.run.attempts(stage)) for stage in STAGES] == [1, 1, 1]


def read_bytes(path):
    return path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize("launcher", ["alive", "gone"])
def test_cancelling_ends_the_job_and_what_had_not_begun(runs, slurm, held, launcher):
    run = runs.write(GROUPED, held)
    driven = InProcess(run)
    wait_until(lambda: phase_of(run, "train") == "waiting")

    if launcher == "alive":
        driven.stop.cancel("enough")
        assert driven.end().state == "cancelled"
    else:
        driven.stop.detach("the laptop is closed")
        driven.end()
        cancel_run(run, "enough")

    assert list(driven.states().values()) == ["completed", "cancelled", "cancelled"]
    wait_until(lambda: causes(run) == ["completed", "cancelled", "cancelled"])
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs(), 300)


def test_a_run_that_ends_before_its_group_ends_the_job(runs, slurm, held):
    """A flow of the user's that leaves the later stages out; so does an error between two."""
    run = runs.write(GROUPED, held)
    session = open_session(run, StateStore(run), StopRequest(), leave_cancelled=False)
    session.run_stage("preprocess", print)
    wait_until(lambda: phase_of(run, "train") == "waiting")

    assert session.conclude().state == "failed"

    assert causes(run) == ["completed", "cancelled", "cancelled"]
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs(), 300)


def test_another_run_of_the_same_stages_waits_without_a_job(runs, slurm, held, gate, executions):
    runs.profile["max_parallel_stages"] = 1
    first = InProcess(runs.write(GROUPED, [*held, f"preprocess.gate={gate}"]))
    wait_until(lambda: phase_of(first.run, "preprocess") == "waiting")
    second = InProcess(runs.write(GROUPED, [*held, f"preprocess.gate={gate}"]))
    gate.touch()

    assert first.end().state == "completed", first.said
    assert second.end().message == "3 stages completed, 3 of them reused"

    assert [second.run.latest_attempt(stage) for stage in STAGES] == [None] * 3
    assert executed(executions) == ["preprocess", "train"]


def test_each_stage_has_its_own_ranks_in_the_job_of_the_largest(slurm, workspace, new_executor):
    small = JobResources(cpus_per_host=1, memory_gib=0.5)
    large = JobResources(num_hosts=2, processes_per_host=2, cpus_per_host=2, memory_gib=0.5)
    sizes = [small, large, small]
    attempts = [
        make_attempt(workspace, run=f"tiny-{number}", resources=size)
        for number, size in enumerate(sizes)
    ]

    executor = new_executor(settings={"memory_option": "mem-per-cpu"})
    job = executor.submit_call_after(attempts[0], (), then=attempts[1:])
    wait_until(lambda: all(one.cause for one in attempts))

    assert [one.cause for one in attempts] == ["completed"] * 3, job.status()
    assert [one.ranks_with_logs() for one in attempts] == [[0], [0, 1, 2, 3], [0]]


def test_a_stage_for_which_the_job_has_no_time_left_ends_at_once(slurm, workspace, new_executor):
    """Slurm warns no more: 120 s before the end of the job, which its stages ask for in all."""
    sizes = [JobResources(walltime_minutes=1)] * 2
    attempts = [
        make_attempt(workspace, run=f"tiny-{n}", resources=one) for n, one in enumerate(sizes)
    ]

    new_executor().submit_call_after(attempts[0], (), then=attempts[1:])
    wait_until(lambda: all(one.cause for one in attempts))

    assert [one.cause for one in attempts] == ["timeout", "cancelled"]


def test_a_timeout_is_counted_where_the_stage_was_the_first_of_its_job(workspace):
    attempts = [make_attempt(workspace, run=f"tiny-{number}") for number in range(3)]
    before = RunDirectory(workspace / "runs" / "tiny-0").new_attempt("before")
    groups = [[before, attempts[0]], [attempts[1], before], []]
    for one, group in zip(attempts, groups, strict=True):
        paths = {"group": [str(member.path) for member in group]} if group else {}
        write_json(one.job_path, {"executor": "slurm", "job_id": "7", **paths})
        write_exit(one, ExitRecord(exit_code=None, cause=Cause.TIMEOUT, message="over"))

    assert [count_ended([one], Cause.TIMEOUT) for one in attempts] == [0, 1, 1]
    assert count_ended(attempts, Cause.TIMEOUT) == 2
    assert count_ended(attempts, Cause.FAILED) == 0


def test_an_id_that_is_learnt_late_is_noted_for_every_stage_of_the_job(slurm, workspace):
    """The answer of sbatch was lost, or it refused the job for a while."""
    attempts = [make_attempt(workspace, run=f"tiny-{number}") for number in range(2)]
    group = [str(one.path) for one in attempts]
    for one in attempts:
        record = {"executor": "slurm", "job_id": "", "job_name": "x", "group": group}
        write_json(one.job_path, {**record, "attempt": str(one.path)})
    (attempts[0].path / JOB_ID_FILE).write_text("77\n")

    assert reattach(attempts[0].read_job()).search() is None

    found = [one.read_job() for one in attempts]
    assert [(one["job_id"], one["attempt"]) for one in found] == [("77", one) for one in group]
