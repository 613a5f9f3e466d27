"""A single answer of Slurm is not final: refused submissions, empty answers, ids given again."""

import json

import pytest
from faulty_commands import FaultyCommands
from job_processes import phase_of
from orchestrate_runs import TWO_STAGES, InProcess, count_lines
from test_slurm_sweeps import RATES, Sweeps, job_id, kill_launchers
from tiny_stages.calls import wait_until

from redco_flow.cli.status import stage_line
from redco_flow.cli.view import read_run_view
from redco_flow.errors import ClusterUnreachable
from redco_flow.launch.executor import reattach
from redco_flow.orchestrate.run.attempts import end_attempt
from redco_flow.orchestrate.run.cancel import cancel_run
from redco_flow.orchestrate.run.driver import Driver
from redco_flow.orchestrate.run.start import reopen_run
from redco_flow.orchestrate.sweep.control import resume_sweep
from redco_flow.orchestrate.sweep.submission import submit_points
from redco_flow.records import write_json

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REFUSED = 'echo "sbatch: error: Batch job submission failed: {}" >&2; exit 1'
TIMED_OUT = REFUSED.format("Socket timed out on send/recv operation")
REFUSED_THEN_ACCEPTED_IN_SILENCE = f"""
case $(wc -l < "$folder/sbatch.calls") in
    1) {TIMED_OUT};;
    2) "$real" "$@" > /dev/null; {TIMED_OUT};;
esac
"""
JOBS_AT_MOST = f"""
if [ "$(squeue --me --noheader | wc -l)" -ge %d ]; then
    echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
    {REFUSED.format("Job violates accounting/QOS policy (job submit limit)")}
fi
"""
ONE_JOB_AT_MOST_AND_REFUSED_ONCE = f"""
{JOBS_AT_MOST % 1}
if [ -e "$folder/refuse" ]; then
    rm "$folder/refuse"
    {REFUSED.format("Invalid account or account/partition combination specified")}
fi
"""
THREE_JOBS_AT_MOST = JOBS_AT_MOST % 3


@pytest.fixture
def sweeps(slurm, tmp_path):
    sweeps = Sweeps(tmp_path)
    yield sweeps
    sweeps.end()


@pytest.fixture
def commands(slurm, tmp_path, monkeypatch):
    commands = FaultyCommands(tmp_path / "slurm")
    monkeypatch.setenv("PATH", commands.path)
    return commands


def test_a_submission_that_slurm_refuses_for_a_moment_is_tried_again_and_runs_once(
    runs, slurm, commands, tmp_path
):
    """Fault 52: the second refusal is of a job that Slurm has accepted all the same."""
    executions = tmp_path / "executions"
    overrides = [f"{stage}.executions={executions}" for stage in ("preprocess", "train")]
    commands.inject("sbatch", REFUSED_THEN_ACCEPTED_IN_SILENCE)

    driven = InProcess(runs.write(TWO_STAGES, overrides, ahead=True))
    outcome = driven.end(400)

    assert outcome.state == "completed", driven.said
    assert [len(driven.run.attempts(stage)) for stage in ("preprocess", "train")] == [1, 1]
    assert count_lines(executions) == 2
    assert len(commands.calls("sbatch")) == 3
    said = "\n".join(driven.said)
    assert "preprocess | waiting: sbatch: sbatch: error:" in said
    assert "Socket timed out" in said


def test_a_limit_of_submitted_jobs_is_waited_for_and_a_run_that_waits_is_cancelled_at_once(
    runs, slurm, commands, tmp_path
):
    """Fault 52: the limit of a QOS or an association."""
    for _ in range(3):
        slurm.run("sbatch", "--hold", "--output=/dev/null", "--wrap=true")
    commands.inject("sbatch", THREE_JOBS_AT_MOST)

    first = InProcess(runs.write(TWO_STAGES))
    second = InProcess(runs.write(TWO_STAGES, ["preprocess.count=5"]))
    line = "preprocess: waiting: QOSMaxSubmitJobPerUserLimit"
    for driven in (first, second):
        wait_until(
            lambda run=driven.run: (
                line == stage_line("preprocess", read_run_view(run)["stages"]["preprocess"])
            )
        )
    first.stop.cancel("enough")
    cancelled = first.end(400)
    for held in slurm.jobs():
        slurm.run("scancel", held)
    outcome = second.end(400)

    assert cancelled.state == "cancelled"
    assert outcome.state == "completed", second.said
    assert len(second.run.attempts("preprocess")) == 1


def test_points_of_a_sweep_beyond_the_limit_of_submitted_jobs_wait_and_none_fails(
    slurm, commands, tmp_path
):
    """Fault 52: the first jobs of the sweep fill the queue; the others follow as they end."""
    commands.inject("sbatch", THREE_JOBS_AT_MOST)
    sweep = Sweeps(tmp_path).write(RATES[:2])
    said = []
    submit_points(sweep, sweep.runs, said.append, Driver())
    for gate in ("first-gate", "gate"):
        (tmp_path / gate).touch()

    driven = [InProcess(run, judges_ended=True) for run in sweep.runs]
    outcomes = [one.end(400).state for one in driven]

    assert "the cluster takes no more jobs" in said[-1], said
    assert outcomes == ["completed"] * 2, [one.said for one in driven]
    assert count_lines(tmp_path / "trained") == 2


def test_packs_beyond_the_limit_of_submitted_jobs_are_submitted_as_others_end(
    sweeps, slurm, commands, tmp_path
):
    """Fault 52: one job at a time; the process that holds a refused pack is killed, and once such
    a pack is refused for good.
    """
    commands.inject("sbatch", ONE_JOB_AT_MOST_AND_REFUSED_ONCE)
    sweep = sweeps.start(max_parallel=1, holds_first=True, points_per_job=2)
    first = sweep.runs[0]

    def wait_until_refused(attempt):
        waiting = "train: waiting: QOSMaxSubmitJobPerUserLimit"
        wait_until(lambda: len(first.attempts("train")) == attempt)
        wait_until(lambda: waiting == stage_line("train", read_run_view(first)["stages"]["train"]))

    wait_until_refused(1)
    kill_launchers(sweep)
    resume_sweep(sweep)
    wait_until_refused(2)
    (commands.folder / "refuse").touch()
    for gate in ("first-gate", "gate"):
        (tmp_path / gate).touch()
    view = sweeps.wait_for_end(sweep)

    assert view["state"] == "completed", sweep.log_path.read_text()
    assert not (commands.folder / "refuse").exists()
    assert len({job_id(run, "train") for run in sweep.runs}) == 2
    assert count_lines(tmp_path / "trained") == 4
    assert count_lines(tmp_path / "preprocessed") == 1


def test_a_job_that_slurm_starts_after_its_launcher_has_given_it_up_runs_nothing(
    slurm, submit, commands, tmp_path
):
    """Fault 52: sbatch reported a failure, and squeue leaves the job out when it is looked for."""
    job = submit("count_starts", config={"folder": str(tmp_path)}, settings={"options": ["--hold"]})
    write_json(job.attempt.job_path, job.record() | {"job_id": ""})

    commands.inject("squeue", "exit 0")
    end_attempt(job.attempt, "another stage failed")
    commands.repair("squeue")
    slurm.run("scontrol", "release", job.job_id)
    slurm.wait_for("the job has ended", lambda: not slurm.jobs())

    assert not (tmp_path / "starts").exists()
    assert job.status().message == "it never began: another stage failed."


def test_a_run_whose_cancellation_slurm_did_not_take_is_resumed_with_its_job(runs, slurm, commands):
    runs.profile["slurm"] = {"options": ["--hold"]}
    run = runs.write(TWO_STAGES)
    first = InProcess(run)
    (job_id,) = wait_until(slurm.jobs)
    wait_until(lambda: run.attempt("preprocess", 1).read_job()["job_id"] == job_id)
    first.stop.detach("the laptop is closed")
    first.end()

    commands.inject("scancel", 'echo "Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(ClusterUnreachable):
        cancel_run(run)
    commands.repair("scancel")
    reopen_run(run)
    second = InProcess(run)
    for stage in run.read_state()["stages"]:
        attempt = run.attempt(stage, 1)
        held = wait_until(lambda of=attempt: (of.read_job() or {}).get("job_id"))
        slurm.run("scontrol", "release", held)

    assert second.end().state == "completed", second.said
    assert len(run.attempts("preprocess")) == 1


def test_a_job_is_followed_by_its_heartbeat_and_a_job_that_has_got_its_id_is_left_alone(
    slurm, submit, commands, tmp_path
):
    """Faults 53, 54: squeue shows another job under this job's id; a suspended job, too."""
    job = submit("wait_for_go", config={"folder": str(tmp_path)})
    wait_until(lambda: phase_of(job.attempt) == "waiting")
    slurm.run("scontrol", "suspend", job.job_id)
    suspended = wait_until(lambda: "suspended" in (s := job.status()).message and s)
    slurm.run("scontrol", "resume", job.job_id)
    name = job.record()["job_name"]
    stranger = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").strip()

    commands.inject("squeue", f'"$real" "$@" | sed "s/{name}/stranger/"; exit 0')
    followed = wait_until(lambda: (s := job.status()).source == "heartbeat" and s)
    commands.repair("squeue")
    again = wait_until(lambda: (s := job.status()).source == "squeue: RUNNING" and s)
    (tmp_path / "go").touch()
    assert job.wait_seconds(400)
    reattach(json.loads(job.attempt.job_path.read_text()) | {"job_id": stranger}).cancel()

    assert suspended.news.startswith("is suspended on 127.0.0.")
    assert (followed.state, again.state, job.state) == ("running", "running", "COMPLETED")
    assert any(f"--name={name}" in call for call in commands.calls("scancel"))
    assert slurm.jobs()[stranger] == "RUNNING"
