"""Whose logs the page leads to, where a stage has several."""

import pytest

from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory


@pytest.fixture
def array(builder):
    """An array of a stage: each task's words as its log, and how it ended."""

    def array(causes, state="failed"):
        attempt = builder.fail("preprocess", state=state)
        for shard, cause in enumerate(causes):
            task = attempt.task(shard)
            task.logs.mkdir(parents=True)
            if cause != "waiting":
                task.log_path().write_text(f"task {shard} was here\n")
            if cause not in ("running", "waiting"):
                write_json(task.exit_path, {"exit_code": 1, "cause": cause, "message": "it ended"})
        return attempt

    return array


def logs_of(page):
    return [one["href"] for one in page.all("a") if one["href"].endswith(".log")]


def test_every_task_of_an_array_has_its_log_and_its_state(builder, array, read_report):
    array(["completed", "running", "waiting"], state="cancelled")
    run = builder.close("cancelled")

    page = read_report(run)

    linked = {f"stages/preprocess/attempts/1/tasks/{shard}/logs/rank0.log" for shard in (0, 1)}
    assert linked <= set(logs_of(page))
    assert all((run.path / log).is_file() for log in logs_of(page) if "/2/" not in log)
    for words in ("task 0 ✓ completed", "task 1 ▶ running", "task 2 … waiting"):
        assert words in page.text


def test_many_tasks_are_counted_by_their_states(builder, array, read_report):
    array(["completed"] * 5 + ["failed"])

    page = read_report(builder.close("failed"))

    assert "6 logs: 5 completed, 1 failed" in page.text
    assert len({log for log in logs_of(page) if "/tasks/" in log}) == 6


def test_a_failed_array_shows_the_log_and_the_error_of_the_task_that_failed(
    builder, array, read_report
):
    attempt = array(["completed", "failed", "cancelled"])
    write_json(
        attempt.task(1).error_path,
        {"type": "ValueError", "message": "odd rows", "traceback": "in task one"},
    )

    page = read_report(builder.close("failed"))

    assert "task 1 was here" in page.text
    assert "task 0 was here" not in page.text
    assert "in task one" in page.text


def test_a_failed_group_shows_the_log_of_the_rank_that_ended_it(builder, read_report):
    attempt = builder.fail("train", log="rank 0 waits\n")
    attempt.log_path(1).write_text("rank 1 has no memory left\n")
    ended = {"exit_code": 1, "cause": "failed", "message": "rank 1 failed", "rank": 1}
    write_json(attempt.exit_path, ended)
    attempt.rank_directory(1).mkdir(parents=True)
    own = AttemptDirectory(attempt.path, 1)
    write_json(own.error_path, {"type": "MemoryError", "message": "", "traceback": "in rank one"})

    page = read_report(builder.close("failed"))

    assert "rank 1 has no memory left" in page.text
    assert "rank 0 waits" not in page.text
    assert "in rank one" in page.text
    assert {"rank0.log", "rank1.log"} <= {log.rpartition("/")[2] for log in logs_of(page)}
