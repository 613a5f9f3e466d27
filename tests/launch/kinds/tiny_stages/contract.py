"""What every executor promises: each executor's tests have a subclass of `ExecutorContract`.

Fixtures: `workspace`; `new_executor(**settings)`; `submit(action, **call)`; `folder`, a directory
that tests and jobs see; `attempt_of(job)`, the attempt as the job's machine sees it; `written`, the
directories that a job writes to; `submit_secret(value)`, which gives a job that prints it;
`time_limit`, what to submit for the shortest time that the executor can give.
"""

import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from job_processes import phase_of, processes_of
from submitit.core.core import Executor
from tiny_stages.calls import make_attempt, new_attempt, wait_until

from redco_flow.errors import RunCancelled, StageFailed, UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.executor import reattach
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

REATTACH = """
import sys, json
sys.path[:0] = json.loads(sys.argv[2])
from redco_flow.launch.executor import reattach
job = reattach(json.load(open(sys.argv[1] + "/job.json")))
print(job.job_id, job.done(), job.status().state)
"""


def seen_by_another_process(job):
    search = json.dumps([path for path in sys.path if path])
    command = [sys.executable, "-c", REATTACH, str(job.attempt.path), search]
    return subprocess.check_output(command, text=True).split()


class ExecutorContract:
    """One executor's tests, whatever it is."""

    def test_a_job_ends_with_its_result_in_the_workspace(self, submit, workspace):
        job = submit("write")

        assert job.wait_seconds(400), job.status()

        assert job.done()
        assert job.state == "COMPLETED", job.status()
        assert job.status().source == "exit.json"
        assert job.exception() is None
        (artifact,) = job.result()["outputs"].values()
        assert ArtifactStore(Workspace(workspace)).verify(artifact) == []
        assert [record["loss"] for record in job.attempt.read_metrics()] == [0.5]
        record = job.attempt.read_exit()
        assert (record.cause, record.exit_code) == ("completed", 0)
        assert "stage 'act' of run tiny-abcd" in job.stdout()

    def test_a_job_is_the_same_from_its_record_a_pickle_and_in_another_process(
        self, submit, folder
    ):
        """Fault 17. submitit's own local job says `done` in another process while it runs."""
        job = submit("wait_for_go", config={"folder": str(folder)})
        wait_until(lambda: phase_of(job.attempt) == "waiting")

        again = [reattach(job.record()), pickle.loads(pickle.dumps(job))]
        running = seen_by_another_process(job)
        (folder / "go").touch()
        assert job.wait_seconds(400), job.status()

        assert running == [job.job_id, "False", "running"]
        assert seen_by_another_process(job) == [job.job_id, "True", "completed"]
        assert all(one.result() == job.result() for one in again)
        assert (folder / "starts").read_text() == "x"

    def test_a_worker_that_raises_is_reported_with_its_error_and_log(self, submit):
        job = submit("raise_beside_a_running_thread")

        assert job.wait_seconds(400), job.status()

        assert job.state == "FAILED"
        with pytest.raises(StageFailed, match=r"(?s)ValueError: the loss went away.*rank0\.log"):
            job.result()

    def test_a_worker_that_is_killed_is_named_by_its_signal(self, submit, attempt_of):
        """Fault 2."""
        job = submit("hang")
        wait_until(lambda: phase_of(job.attempt) == "hanging")

        (worker,) = processes_of(attempt_of(job), "redco_flow.worker")
        os.kill(worker, signal.SIGKILL)
        assert job.wait_seconds(400), job.status()

        assert job.state == "FAILED"
        assert "SIGKILL" in job.status().message

    def test_a_job_that_is_killed_whole_is_known_to_have_failed(self, submit, attempt_of):
        job = submit("hang")
        wait_until(lambda: phase_of(job.attempt) == "hanging")

        for pid in processes_of(attempt_of(job)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert job.wait_seconds(400), job.status()

        assert job.state not in ("COMPLETED", "CANCELLED"), job.status()
        assert isinstance(job.exception(), StageFailed)
        wait_until(lambda: processes_of(attempt_of(job)) == [])

    def test_a_cancelled_worker_may_save_first(self, submit, folder, attempt_of):
        job = submit("save_when_stopped", grace_seconds=20, config={"folder": str(folder)})
        wait_until(lambda: phase_of(job.attempt) == "training")

        job.cancel()

        assert job.state == "CANCELLED"
        assert (folder / "saved").exists()
        wait_until(lambda: processes_of(attempt_of(job)) == [])
        with pytest.raises(RunCancelled):
            job.result()

    @pytest.mark.parametrize("seconds", [0.0, 0.4])
    def test_a_job_that_is_cancelled_while_it_starts_leaves_nothing(
        self, submit, attempt_of, seconds
    ):
        job = submit("hang")
        time.sleep(seconds)  # the moments of its start: whichever it is, nothing may be left

        job.cancel()

        assert job.state == "CANCELLED", job.status()
        wait_until(lambda: processes_of(attempt_of(job)) == [])

    def test_a_second_cancel_kills_what_refuses_to_stop_with_all_its_children(
        self, submit, folder, attempt_of
    ):
        """Fault 9: children and their children in other sessions, all deaf to SIGTERM."""
        job = submit("ignore_termination", grace_seconds=600, config={"folder": str(folder)})
        wait_until(lambda: len(list(folder.glob("*.pid"))) == 2)

        job.cancel(check=False)
        wait_until(lambda: "asking the worker" in (job.stdout() or ""))
        job.cancel()

        assert job.state == "CANCELLED"
        wait_until(lambda: processes_of(attempt_of(job)) == [])

    @pytest.mark.slow
    def test_a_silent_worker_is_stopped_after_its_stacks_are_in_the_log(self, submit, attempt_of):
        """Fault 7."""
        job = submit("hang", stall_seconds=10, grace_seconds=0.5)

        assert job.wait_seconds(400), job.status()

        assert job.state == "STALLED"
        assert "stall_timeout_minutes" in job.status().message
        assert "in hang" in job.stdout()
        wait_until(lambda: processes_of(attempt_of(job)) == [])

    @pytest.mark.slow
    def test_a_job_whose_time_is_over_saves_and_ends_as_timeout(self, submit, folder, time_limit):
        job = submit("save_when_stopped", config={"folder": str(folder)}, **time_limit)

        assert job.wait_seconds(400), job.status()

        assert (job.state, (folder / "saved").exists()) == ("TIMEOUT", True), job.status()
        assert "walltime_minutes" in job.status().message

    def test_a_secret_reaches_the_job_but_no_file_and_no_list_of_processes(
        self, submit_secret, written
    ):
        """Fault 31."""
        secret = f"sk-test-{secrets.token_hex(8)}"
        job = submit_secret(secret)

        shown = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
        assert job.wait_seconds(400), job.status()

        assert job.state == "FAILED"
        assert "a [redacted] z" in job.stdout()
        assert secret not in shown
        assert "the server refused [redacted]" in job.status().message
        for path in (path for folder in written for path in folder.rglob("*")):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path

    def test_odd_values_and_names_are_taken_as_they_are(self, submit):
        """Fault 30."""
        job = submit("write", run="--run", config={"text": "$(touch X); touch X\n'\"%j"})

        assert job.wait_seconds(400), job.status()

        assert job.result()["outputs"].keys() == {"dataset"}

    def test_jobs_of_a_batch_are_submitted_when_its_block_ends(self, new_executor, workspace):
        executor = new_executor()
        attempts = [make_attempt(workspace, number=number) for number in (1, 2)]

        with executor.batch():
            jobs = [executor.submit_call(attempt) for attempt in attempts]
            assert not attempts[0].job_path.exists()

        assert all(job.wait_seconds(400) for job in jobs)
        assert jobs[0].result()["outputs"] == jobs[1].result()["outputs"]

    def test_an_attempt_is_submitted_once(self, submit, new_executor):
        job = submit("write")

        with pytest.raises(UsageError, match=f"submitted before, as job {job.job_id}"):
            new_executor().submit_call(job.attempt)
        assert job.wait_seconds(400), job.status()

    def test_what_is_no_call_is_refused_and_leaves_no_file(self, new_executor, workspace):
        """Fault 36."""
        attempt = new_attempt(workspace)
        executor = new_executor()

        with pytest.raises(UsageError, match="pickles no functions"):
            executor.submit(print, 1)
        with pytest.raises(UsageError, match="pickles no functions"):
            executor.map_array(print, [1, 2])
        with pytest.raises(UsageError, match="no call to submit"):
            executor.submit_call(attempt)

        assert list(attempt.path.iterdir()) == []

    def test_what_would_be_submitted_is_shown_and_nothing_is_written(self, new_executor, tmp_path):
        executor = new_executor()
        attempt = AttemptDirectory(tmp_path / "runs/tiny-RUN/stages/act/attempts/1")

        text = executor.render(attempt, "tiny-RUN act 1", JobResources())

        assert isinstance(executor, Executor)
        assert isinstance(text, str)
        assert not attempt.path.exists()
