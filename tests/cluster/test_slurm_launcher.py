"""Runs that a job of the cluster drives: `launcher: slurm`."""

import json

import pytest
from orchestrate_runs import ENDED, TWO_STAGES, count_lines, until, wait_for_stage
from test_command_line import redco_flow  # noqa: F401

from redco_flow.cli.main import run_command
from redco_flow.cli.view import read_run_view
from redco_flow.errors import UsageError
from redco_flow.orchestrate.run.cancel import cancel_run
from redco_flow.orchestrate.run.start import resume_run
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.tracking.locks import find_holder

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


FAILING_STAGE = (
    "  bad: {kind: orchestrate_kinds.total, learning_rate: 2.0, fails_until: /nowhere}\n"
)


@pytest.fixture
def driven_by_jobs(runs):
    runs.profile["launcher"] = "slurm"
    return runs


def job_of(run):
    return json.loads((run.path / "launcher.json").read_text())["job_id"]


def wait_for_driver(run, after=None):
    """Wait until a job drives the run, by another process than before; return the process."""

    def found():
        lease = find_holder(run)
        return lease.holder if lease is not None and lease.job and lease.holder != after else None

    return until(found)


@pytest.fixture
def configured_by_nodes(driven_by_jobs, slurm, tmp_path):
    """A site whose jobs get a SLURM_CONF of their node; return the name that the login node has."""
    (tmp_path / "conf-cache").symlink_to(slurm.directory)
    setup = [f"export SLURM_CONF={tmp_path}/conf-cache/slurm.conf"]
    driven_by_jobs.profile["slurm"] = {"setup": setup}
    return slurm.environment["SLURM_CONF"]


def wait_for_end(run):
    return until(lambda: (state := run.read_state())["state"] in ENDED and state)


def test_a_job_that_is_requeued_warned_or_killed_drives_its_run_again_and_no_stage_runs_twice(
    driven_by_jobs, configured_by_nodes, slurm, held, gate, executions
):
    """Fault 64: each start of the job waits for the one before, and finds the stages' jobs."""
    run = driven_by_jobs.start(TWO_STAGES + FAILING_STAGE, held)
    wait_for_stage(run, "train")
    wait_for_stage(run, "bad", "failed")
    job, first = job_of(run), wait_for_driver(run)
    assert read_run_view(run)["launcher"] == f"job {job} on {first.host}"

    faults = {
        "requeue": ("scontrol", "requeue", job),
        "the end of its time": ("scancel", "--signal=URG", job),
        "a kill of the process": ("scancel", "--signal=KILL", f"{job}.0"),
    }
    seen = [first]
    for fault in faults.values():
        slurm.run(*fault)
        seen.append(wait_for_driver(run, after=seen[-1]))
    gate.touch()
    state = wait_for_end(run)

    assert state["stages"]["train"]["state"] == "completed", run.log_path.read_text()
    assert len(set(seen)) == 4
    assert job_of(run) == job
    assert count_lines(executions) == 2
    assert all(len(run.attempts(name)) == 1 for name in state["stages"])
    assert run.attempt("train", 1).read_job()["cluster"] == configured_by_nodes
    slurm.wait_for("the job has ended", lambda: not slurm.jobs())


def test_a_launcher_that_waits_in_the_queue_is_left_for_a_process_of_this_machine(
    driven_by_jobs, slurm, capsys
):
    with slurm.starts_nothing():
        run = driven_by_jobs.start(TWO_STAGES)
        job = job_of(run)
        waits = f"its launcher, job {job}, waits in the queue"
        shown = until(lambda: (view := read_run_view(run))["message"].startswith(waits) and view)
        with pytest.raises(UsageError, match=f"has a launcher: job {job} waits in the queue"):
            resume_run(run)
        removed = run_command(["rm", run.id, "-w", str(driven_by_jobs.workspace.root)])
        resume_run(run, "local")
        slurm.wait_for("the job has left the queue", lambda: job not in slurm.jobs())
        holder = find_holder(run)
        with pytest.raises(UsageError, match="is driven by process"):
            resume_run(run, "slurm")

    assert LaunchRecord.read(run).profile["launcher"] == "local"
    assert shown["state"] == "pending"
    assert removed == 2
    assert f"the launcher of run {run.id}, job {job}, waits" in capsys.readouterr().err
    assert not holder.job
    assert wait_for_end(run)["state"] == "completed", run.log_path.read_text()


def test_a_launcher_that_is_lost_is_shown_and_resume_submits_another_one(
    driven_by_jobs, slurm, held, gate, executions
):
    """Fault 64: scancel ends it for good."""
    run = driven_by_jobs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")
    job = job_of(run)
    wait_for_driver(run)
    slurm.run("scancel", job)
    shown = until(lambda: (view := read_run_view(run))["state"] == "interrupted" and view)
    resume_run(run)
    wait_for_driver(run)
    gate.touch()

    assert f"its launcher, job {job}, is CANCELLED in Slurm" in shown["message"]
    assert wait_for_end(run)["state"] == "completed", run.log_path.read_text()
    assert job_of(run) != job
    assert count_lines(executions) == 2


def test_the_command_follows_a_run_that_a_job_drives_and_cancel_ends_all_its_jobs(
    redco_flow,  # noqa: F811
    runs,
    slurm,
    held,
):
    ended = json.loads(
        redco_flow("run", "sums.yaml", "-p", "slurm", "--launcher", "slurm", "--json")
    )
    assert (ended["state"], ended["exit_code"]) == ("completed", 0)

    runs.profile["launcher"] = "slurm"
    driven = runs.start(TWO_STAGES, held)
    wait_for_stage(driven, "train")
    with slurm.starts_nothing():
        waiting = runs.start(TWO_STAGES, ["preprocess.count=5"])
        cancel_run(waiting)
    cancel_run(driven)

    assert {run.read_state()["state"] for run in (driven, waiting)} == {"cancelled"}
    slurm.wait_for("no job is left", lambda: not slurm.jobs())
