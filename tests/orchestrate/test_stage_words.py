"""What a task's page says of a stage that has not ended, by the run's files."""

import pytest

from redco_flow.orchestrate.prefect.live import StageWords, words_of
from redco_flow.records import append_json_line, write_json
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

QUEUED = {
    "state": "running",
    "attempt": 1,
    "message": "job 12 waits in the queue: Priority",
    "told_at": "2026-01-31T12:00:00.000+00:00",
}
RUNS = {**QUEUED, "message": ""}


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(Workspace.open(tmp_path / "workspace"), "weekly")


@pytest.fixture
def attempt(run):
    attempt = run.new_attempt("train")
    write_json(attempt.job_path, {"executor": "slurm", "job_id": "12"})
    return attempt


def begin(attempt, start_step, time="2026-01-31T12:00:30.000+00:00"):
    """What a training writes when it starts."""
    append_json_line(attempt.metrics_path, {"kind": "start", "start_step": start_step})
    write_json(attempt.progress_path, {"phase": "training", "time": time})


def test_a_job_in_the_queue_says_of_which_cluster_and_why(run, attempt):
    assert words_of(run, "train", QUEUED) == StageWords("Pending", "queued on Slurm: Priority")


def test_a_heartbeat_knows_better_than_an_older_answer_of_the_cluster(run, attempt):
    begin(attempt, 0)

    assert words_of(run, "train", QUEUED) == StageWords("Running")


def test_a_stage_without_a_job_says_what_it_waits_for(run):
    entry = {"state": "waiting", "attempt": None, "message": "waits for a free slot"}

    assert words_of(run, "train", entry) == StageWords("Pending", "waits for a free slot")


@pytest.mark.parametrize(
    ("cause", "said"), [("preempted", "preempted"), ("terminated", "stopped by the cluster")]
)
def test_a_requeued_job_says_why_and_from_which_step_it_resumes(run, attempt, cause, said):
    begin(attempt, 0)
    ending = {"rank": 0, "restart": 0, "cause": cause, "exit_code": 0, "message": ""}
    attempt.rank_directory(0).mkdir(parents=True)
    write_json(attempt.rank_exit_path(0), ending)
    begin(attempt, 4200)

    words = words_of(run, "train", RUNS)

    assert words == StageWords("Retrying", f"{said}, resumes at step 4200")


def test_a_further_attempt_says_how_the_one_before_ended(run, attempt):
    ended = {"exit_code": 1, "cause": "out_of_memory", "message": "killed", "signal": None}
    write_json(attempt.exit_path, ended)
    again = run.new_attempt("train")
    entry = {**RUNS, "attempt": 2}

    before = words_of(run, "train", entry)
    begin(again, 0)

    assert before == StageWords("Running")  # it has not begun
    assert words_of(run, "train", entry) == StageWords("Retrying", "out of memory, starts again")
