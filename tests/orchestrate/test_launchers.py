"""A run's launcher process without a Prefect server: its lease, and runs that have none."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from orchestrate_runs import (
    TWO_STAGES,
    events,
    kill_launcher,
    until,
    wait_for_end,
    wait_for_stage,
)

from redco_flow.errors import ClusterUnreachable, DamagedRecord, UsageError
from redco_flow.orchestrate.run.cancel import cancel_run
from redco_flow.orchestrate.run.launcher import process_words
from redco_flow.orchestrate.run.start import resume_run, spawn
from redco_flow.records import read_json, write_json
from redco_flow.tracking.deletions import forget_deletion, new_deletion, write_deletion
from redco_flow.tracking.locks import acquire, find_holder

pytestmark = pytest.mark.slow


@pytest.fixture
def no_server_answers(monkeypatch):
    """Name an API that is not there to the launchers of this test."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")


def test_a_second_launcher_is_refused_with_the_first_ones_process(runs, held, gate):
    """Fault 18: the second is refused, with the first one's process, host and time."""
    run = runs.start(TWO_STAGES, held)
    lease = find_holder(run)

    with pytest.raises(UsageError) as refused:
        resume_run(run)
    second = subprocess.run(
        [sys.executable, "-m", "redco_flow.orchestrate.run.orchestrator", str(run.path)],
        capture_output=True,
        text=True,
        check=False,
    )

    for message in (str(refused.value), second.stderr):
        assert f"process {lease.holder.pid} on {lease.holder.host}" in message
        assert lease.acquired_at in message
    assert second.returncode == 2
    gate.touch()
    assert wait_for_end(run)["state"] == "completed"


def test_a_job_that_starts_late_leaves_a_deleted_run_and_reports_a_damaged_one(runs, capfd):
    run = runs.write(TWO_STAGES)
    write_json(run.path / "launcher.json", {"job_id": "7", "job_name": "launcher"})
    program = [sys.executable, "-m", *process_words(run), "--job", "7", "--job-name", "launcher"]
    write_deletion(run.path, new_deletion("redco-flow rm"))
    codes = [subprocess.run(program, check=False).returncode]
    forget_deletion(run)
    run.state_path.write_text("{")
    codes.append(subprocess.run(program, check=False).returncode)
    run.state_path.unlink()

    assert codes == [0, DamagedRecord.exit_code]
    assert f"{run.state_path}" in capfd.readouterr().err
    assert not (run.path / "stages").exists()


def test_a_lease_whose_holders_pid_was_reused_is_taken_over(runs):
    """Fault 19: the reuse of the process id is seen by the start time; the lease is taken over."""
    run = runs.write(TWO_STAGES)
    lease = acquire(run)
    record = lease.path.read_text().replace(
        f'"start_time": {lease.holder.start_time}', '"start_time": 1'
    )
    lease.path.write_text(record)

    resume_run(run)

    assert wait_for_end(run)["state"] == "completed"
    assert "lease_taken_over" in events(run)


NO_ANSWER = "#!/bin/sh\necho 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1\n"


def test_a_launcher_job_that_was_not_submitted_leaves_no_record_and_one_that_may_be_leaves_its_own(
    runs, monkeypatch, tmp_path
):
    runs.profile = {"executor": "slurm", "launcher": "slurm"}
    run = runs.write(TWO_STAGES)
    monkeypatch.setenv("PATH", str(tmp_path))

    for start in (spawn, resume_run):
        with pytest.raises(ClusterUnreachable, match=r"was not submitted: there is no command"):
            start(run)
        assert not (run.path / "launcher.json").exists()
    words = [sys.executable, "-m", *process_words(run), "--job", "7", "--job-name", "before"]
    (tmp_path / "sbatch").write_text(NO_ANSWER)
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(ClusterUnreachable, match=r"may have accepted it: .*Socket timed out"):
        resume_run(run)
    subprocess.run(words, check=True)  # a job of before, which Slurm has started again

    assert read_json(run.path / "launcher.json")["job_id"] == ""
    assert run.read_state()["state"] == "pending"


def test_cancelling_a_run_whose_launcher_is_gone_ends_its_jobs(runs, held, capfd):
    """Where its end cannot be seen, as of another container, who cancels is told what to do."""
    run = runs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")
    kill_launcher(run)
    lease = run.path / "lease.json"
    write_json(lease, read_json(lease) | {"pid_namespace": "1"})

    with pytest.raises(UsageError, match=f"cannot be seen from here; .* delete {lease}"):
        resume_run(run)
    with ThreadPoolExecutor() as pool:
        cancelling = pool.submit(cancel_run, run, "it has no orchestrator")
        try:
            until(lambda: f"delete {lease}" in capfd.readouterr().err)
        finally:
            lease.unlink()
    cancelling.result()

    state = run.read_state()
    assert (state["state"], state["exit_code"]) == ("cancelled", 5)
    assert state["stages"]["train"]["message"] == "cancelled: it has no orchestrator"
    assert run.attempt("train", 1).read_exit().cause == "cancelled"


def test_a_run_that_cannot_be_read_ends_as_failed_with_the_reason(runs):
    run = runs.write(TWO_STAGES)
    run.resolved_path.write_text("stages: [")

    resume_run(run)

    state = wait_for_end(run)
    assert (state["state"], state["exit_code"]) == ("failed", 2)
    assert "resolved.yaml" in state["message"]


def test_without_the_named_server_the_run_completes_with_a_warning(runs, no_server_answers):
    run, state = runs.complete(TWO_STAGES)

    assert state.get("prefect_url") is None
    assert "no answer from the Prefect API at http://127.0.0.1:9/api" in run.log_path.read_text()
