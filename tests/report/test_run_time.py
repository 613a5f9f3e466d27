"""What a run's wall time went into: the parts add up, however many stages ran at once."""

from datetime import UTC, datetime, timedelta

import pytest

from redco_flow.records import append_json_line, write_json
from redco_flow.report.run_time import PARTS, add_up, time_shares
from redco_flow.report.stage_facts import read_stages
from redco_flow.tracking.goodput import TimeSpan

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)  # when the builder's runs begin; they take 250 s


def at(seconds):
    return (NOON + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def ended(attempt, seconds, cause="completed"):
    record = {"exit_code": 0, "cause": cause, "message": "", "ended_at": at(seconds)}
    write_json(attempt.exit_path, record)


def submitted(builder, stage, seconds, attempt=1):
    event = {"seq": 1, "time": at(seconds), "event": "job_submitting"}
    append_json_line(builder.run.journal_path, {**event, "stage": stage, "attempt": attempt})


def shares(builder, state="completed"):
    run = builder.close(state)
    stages = read_stages(run, builder.workspace, print).values()
    return {one.part: one for one in time_shares(run, stages, at(900))}


def test_a_moment_counts_as_the_most_useful_of_what_stages_were_at():
    spans = [TimeSpan("steps", 10, 30), TimeSpan("queue", 0, 20), TimeSpan("evaluation", 25, 40)]

    found = add_up(spans, 0, 50)

    assert found == {"steps": 20, "evaluation": 10, "queue": 10, "launcher": 10}
    assert list(found) == [part for part in PARTS if part in found]


def test_what_lies_beyond_the_run_does_not_count():
    assert add_up([TimeSpan("steps", -5, 100)], 0, 10) == {"steps": 10}


def test_a_runs_parts_are_those_of_its_stages_and_add_up_to_its_wall_time(builder):
    dataset = builder.preprocess()["dataset"]
    begun = {"kind": "start", "start_step": 0, "process_started_at": at(30), "time": at(40)}
    step = {"kind": "training", "step": 5, "loss": 1.0, "steps_seconds": 50.0, "time": at(100)}
    builder.train(dataset, records=[begun, step])
    for stage, first, last in (("preprocess", 5, 25), ("train", 26, 110)):
        submitted(builder, stage, first)
        (attempt,) = builder.run.attempts(stage)
        ended(attempt, last)

    found = shares(builder)

    seconds = {part: round(one.seconds, 3) for part, one in found.items()}
    # Of the dataset 12.5 s, as its result says; between the training's records 10 s of compiling.
    assert seconds == {
        "steps": 50,
        "checkpoints": 10,
        "compile": 10,
        "data": 12.5,
        "start-up": 10,
        "queue": 11.5,
        "launcher": 146,
    }
    assert sum(one.seconds for one in found.values()) == pytest.approx(250)
    assert sum(one.share for one in found.values()) == pytest.approx(100)


def test_an_attempt_that_failed_is_lost(builder):
    failed = builder.fail("script")
    submitted(builder, "script", 10)
    ended(failed, 60, "out_of_memory")

    assert shares(builder, "failed")["lost"].seconds == 50


def test_the_page_shows_the_parts_as_a_bar_and_a_table(builder, read_report):
    builder.preprocess()
    submitted(builder, "preprocess", 0)
    (attempt,) = builder.run.attempts("preprocess")
    ended(attempt, 50)

    page = read_report(builder.close())

    bar = [one for one in page.all("span") if (one.get("class") or "").startswith("part ")]
    widths = [float(one["style"].removeprefix("width: ").rstrip("%")) for one in bar]
    assert sum(widths) == pytest.approx(100, abs=0.01)
    assert [one["class"] for one in bar] == ["part data", "part queue", "part launcher"]
    assert "data 12\u2009s 5.0 %".replace("\u2009", " ") in page.text.replace("\u2009", " ")
