import json
import time

import pytest

from redco_flow.errors import DamagedRecord, UsageError
from redco_flow.orchestrate.checkpoints.export import find_checkpoint
from redco_flow.records import append_json_line, write_json
from redco_flow.tracking.attempt import Cause, ExitRecord
from redco_flow.tracking.run_directory import RunDirectory, find_run, list_runs
from redco_flow.tracking.workspace import Workspace


def test_a_new_run_records_who_started_what_and_is_pending(workspace):
    run = RunDirectory.create(
        workspace,
        "demo",
        argv=["redco-flow", "run", "demo.yaml"],
        pipeline_path="demo.yaml",
        overrides=["learning_rate=1e-4"],
        profile="local",
        code={"commit": "abc", "dirty": False, "patch_digest": None},
    )

    record = json.loads((run.path / "run.json").read_text())
    assert record == run.record
    assert record["id"] == run.id == run.path.name
    assert record["name"] == "demo"
    assert record["overrides"] == ["learning_rate=1e-4"]
    assert record["code"]["commit"] == "abc"
    assert run.read_state()["state"] == "pending"


def test_a_run_name_that_leaves_the_workspace_is_refused(workspace):
    """Fault 29: the path is refused."""
    with pytest.raises(UsageError, match="not a name"):
        RunDirectory.create(workspace, "../../x")


def test_a_run_still_being_made_is_not_listed(workspace):
    (workspace.runs / ".demo-abcdef.x1").mkdir()

    assert list_runs(workspace) == []


def test_runs_are_listed_newest_first_by_sequence_number(workspace):
    """Fault 35: the clock goes back an hour between two runs."""
    first = RunDirectory.create(workspace, "demo", clock=lambda: "2026-01-01T12:00:00+00:00")
    second = RunDirectory.create(workspace, "demo", clock=lambda: "2026-01-01T11:00:00+00:00")

    assert [run.id for run in list_runs(workspace)] == [second.id, first.id]
    assert find_run(workspace, "@last").id == second.id


def test_a_run_is_found_by_id_prefix_short_id_and_path(workspace):
    run = RunDirectory.create(workspace, "alpha")
    RunDirectory.create(workspace, "beta")

    for text in (run.id, "al", run.id[:-2], run.id.removeprefix("alpha-"), str(run.path)):
        assert find_run(workspace, text).path == run.path


def test_an_ambiguous_run_lists_the_candidates(workspace):
    runs = [RunDirectory.create(workspace, "demo") for _ in range(2)]

    for find in (find_run, find_checkpoint):
        with pytest.raises(UsageError) as refusal:
            find(workspace, "demo")

        assert all(run.id in str(refusal.value) for run in runs)


def test_no_run_has_the_id_that_names_the_last_one(workspace):
    with pytest.raises(UsageError, match="'last' would name the last run, too"):
        RunDirectory.create(workspace, "demo", run_id="last")


def test_an_unknown_run_names_the_nearest(workspace):
    run = RunDirectory.create(workspace, "finetune")

    with pytest.raises(UsageError, match=f"no run 'finetun2'.*{run.id}"):
        find_run(workspace, "finetun2")
    with pytest.raises(UsageError, match="redco-flow logs last/train` the log of this one"):
        find_run(workspace, "last/train")


def test_a_workspace_without_runs_says_how_to_start_one(tmp_path):
    with pytest.raises(UsageError, match="redco-flow run"):
        find_run(Workspace(tmp_path / "none"), "@last")
    assert list_runs(Workspace(tmp_path / "none")) == []


def test_a_damaged_run_record_is_named_and_its_run_is_listed_behind_the_others(workspace):
    whole = RunDirectory.create(workspace, "demo")
    run = RunDirectory.create(workspace, "demo")
    (run.path / "run.json").write_text("{")

    with pytest.raises(DamagedRecord, match=r"run\.json"):
        _ = RunDirectory(run.path).record
    assert list_runs(workspace) == [whole, run]
    assert find_run(workspace, "@last") == whole


def test_states_are_replaced_whole_and_must_be_known(workspace):
    run = RunDirectory.create(workspace, "demo")

    run.write_state({"state": "running", "stages": {"train": {"state": "running"}}})

    assert run.read_state()["stages"] == {"train": {"state": "running"}}
    with pytest.raises(ValueError, match="runing"):
        run.write_state({"state": "runing"})


def test_attempts_are_numbered_from_one_and_ordered_by_number(workspace):
    run = RunDirectory.create(workspace, "demo")
    assert run.latest_attempt("train") is None

    made = [run.new_attempt("train") for _ in range(11)]

    assert [attempt.number for attempt in run.attempts("train")] == list(range(1, 12))
    assert run.latest_attempt("train") == made[-1] == run.attempt("train", 11)
    assert made[0].stage == "train"
    assert made[0].log_path(3) == made[0].path / "logs" / "rank3.log"
    assert made[0].logs.is_dir()


def test_the_last_progress_is_that_of_the_result(workspace):
    """A copy of progress.json that was fetched from a host stays, and is older."""
    attempt = RunDirectory.create(workspace, "demo").new_attempt("train")
    last = {"time": "now", "step": 100}

    write_json(attempt.progress_path, {"time": "before", "step": 97})
    write_json(attempt.result_path, {"fingerprint": "f", "outputs": {}, "progress": last})

    assert attempt.read_progress() == last


def test_an_attempts_readers_answer_none_until_the_file_is_there(workspace):
    attempt = RunDirectory.create(workspace, "demo").new_attempt("train")
    readers = {
        attempt.call_path: attempt.read_call,
        attempt.job_path: attempt.read_job,
        attempt.progress_path: attempt.read_progress,
        attempt.error_path: attempt.read_error,
        attempt.exit_path: attempt.read_exit,
        attempt.result_path: attempt.read_result,
    }
    assert [read() for read in readers.values()] == [None] * 6
    assert list(attempt.read_metrics()) == []

    written = {
        attempt.call_path: {"stage": "train", "fingerprint": "f"},
        attempt.job_path: {"executor": "local", "job_id": "1"},
        attempt.progress_path: {"time": "now", "step": 1},
        attempt.error_path: {"type": "ValueError", "message": "no"},
        attempt.exit_path: {"exit_code": 1, "cause": "failed", "message": "no"},
        attempt.result_path: {"fingerprint": "f", "outputs": {}},
    }
    for path, record in written.items():
        write_json(path, record)
    append_json_line(attempt.metrics_path, {"step": 1})

    ending = ExitRecord(exit_code=1, cause=Cause.FAILED, message="no")
    expected = [*written.values()]
    expected[list(written).index(attempt.exit_path)] = ending
    assert [read() for read in readers.values()] == expected
    assert list(attempt.read_metrics()) == [{"step": 1}]


def test_a_request_to_stop_stands_until_the_run_is_resumed(workspace):
    run = RunDirectory.create(workspace, "demo")
    assert not run.cancel_requested()

    run.request_cancel("wrong data")
    run.request_cancel()
    assert run.cancel_requested()

    run.clear_cancel()
    assert not run.cancel_requested()


def test_a_thousand_runs_are_listed_in_a_third_of_a_second(big_workspace):
    for _ in range(1000):
        RunDirectory.create(big_workspace, "demo", overrides=["learning_rate=1e-4"] * 5)

    seconds = []
    for _ in range(3):  # of CPU time; the best of three
        start = time.thread_time()
        runs = list_runs(big_workspace)
        seconds.append(time.thread_time() - start)

    assert len(runs) == 1000
    assert [run.sequence for run in runs] == list(range(1000, 0, -1))
    assert min(seconds) < 0.3
