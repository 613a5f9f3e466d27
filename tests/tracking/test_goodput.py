"""What a training's time went into: every second in one part, by the records of its attempts."""

from datetime import UTC, datetime, timedelta

import pytest

from redco_flow.records import append_json_line, write_json
from redco_flow.tracking.attempt import Cause, ExitRecord
from redco_flow.tracking.goodput import TimeParts, find_goodput, read_goodput
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def at(seconds):
    return (NOON + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


class Training:
    """Writes a training's records, at seconds after noon."""

    def __init__(self, folder):
        self.run = RunDirectory.create(Workspace.open(folder), "demo")

    def submit(self, seconds, fingerprint="f"):
        self.attempt = self.run.new_attempt("train")
        number = self.attempt.number
        event = {"seq": number, "time": at(seconds), "event": "job_submitting"}
        append_json_line(self.run.journal_path, {**event, "stage": "train", "attempt": number})
        call = {"stage": "train", "fingerprint": fingerprint}
        write_json(self.attempt.call_path, call)

    def start(self, seconds, prepared, step=0):
        self._log(prepared, kind="start", start_step=step, process_started_at=at(seconds))

    def log(self, seconds, step, steps, evaluation=0.0, checkpoints=0.0):
        self._log(
            seconds,
            kind="training",
            step=step,
            steps_seconds=steps,
            evaluation_seconds=evaluation,
            checkpoints_seconds=checkpoints,
        )

    def end(self, seconds, cause=Cause.COMPLETED):
        record = ExitRecord(exit_code=0, cause=cause, message="", ended_at=at(seconds))
        write_json(self.attempt.exit_path, record.to_json())

    def stopped(self):
        write_json(self.attempt.error_path, {"type": "Stopped", "message": ""})

    def _log(self, seconds, **record):
        append_json_line(self.attempt.metrics_path, {"time": at(seconds), **record})

    def parts(self):
        return read_goodput(self.run, "train")


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def test_a_training_without_faults_is_parted_into_what_it_did(training):
    training.submit(0)
    training.start(30, prepared=40)
    training.log(60, step=10, steps=9)  # 11 s compiling
    training.log(75, step=20, steps=10, evaluation=4, checkpoints=1)
    training.end(80)

    parts = training.parts()

    assert parts == TimeParts(
        steps=19, waiting=30, starting=21, evaluation=4, checkpoints=1, ending=5
    )
    assert (parts.total, parts.goodput) == (80, 19 / 80)


def test_after_a_kill_the_steps_that_are_computed_again_do_not_count(training):
    training.submit(0)
    training.start(10, prepared=20)
    training.log(40, step=10, steps=20)
    training.log(60, step=20, steps=20)
    training.end(70, Cause.LOST)  # ten more seconds of steps that nothing tells of
    training.submit(90)
    training.start(100, prepared=110, step=15)
    training.log(130, step=25, steps=20)
    training.end(131)

    parts = training.parts()

    # Of 20 steps 15 count, and of the second attempt all.
    assert parts == TimeParts(
        steps=20 + 10 + 20, repeated=10 + 10, waiting=10 + 20 + 10, starting=20, ending=1
    )
    assert parts.total == 131


def test_of_a_stop_the_steps_after_the_last_record_count_for_they_were_saved(training):
    training.submit(0)
    training.start(0, prepared=0)
    training.log(20, step=10, steps=20)
    training.stopped()
    training.end(31, Cause.CANCELLED)
    training.submit(31)
    training.start(31, prepared=31, step=15)
    training.log(41, step=20, steps=10)
    training.end(41)

    assert training.parts() == TimeParts(steps=20 + 10 + 10, ending=1)


def test_a_job_that_its_cluster_started_again_goes_on_in_the_same_attempt(training):
    training.submit(0)
    training.start(5, prepared=5)
    training.log(15, step=10, steps=10)
    training.start(45, prepared=50, step=10)
    training.log(60, step=20, steps=10)
    training.end(60)

    assert training.parts() == TimeParts(steps=20, waiting=5 + 30, starting=5)


def test_a_training_that_runs_is_told_up_to_its_last_record(training):
    training.submit(0)
    training.start(2, prepared=3)
    training.log(10, step=5, steps=6)

    assert training.parts() == TimeParts(steps=6, waiting=2, starting=2)


def test_an_attempt_that_never_trained_was_starting_all_the_time(training):
    training.submit(0)
    training.end(20, Cause.FAILED)
    training.submit(25)
    training.start(30, prepared=35)
    training.log(45, step=5, steps=10)
    training.end(45)

    assert training.parts() == TimeParts(steps=10, waiting=5 + 5, starting=20 + 5)


def test_clocks_of_other_hosts_never_make_a_part_negative_or_the_sum_wrong(training):
    training.submit(10)  # the launcher's clock is ahead of the worker's
    training.start(5, prepared=8)
    training.log(20, step=5, steps=30)
    training.end(19)

    parts = training.parts()

    assert parts == TimeParts(steps=10)


def test_what_was_computed_by_other_code_is_left_out(training):
    training.submit(0, fingerprint="old")
    training.start(0, prepared=0)
    training.log(50, step=10, steps=50)
    training.end(50, Cause.FAILED)
    training.submit(60)
    training.start(60, prepared=60)
    training.log(70, step=5, steps=10)
    training.end(70)

    assert training.parts() == TimeParts(steps=10)


def test_without_a_training_there_is_no_goodput(training):
    assert training.parts() is None

    training.submit(0)
    training.end(3)

    assert training.parts() is None


def test_a_damaged_record_hides_the_goodput_alone(training):
    training.submit(0)
    training.attempt.metrics_path.write_text("no record\n")

    assert find_goodput(training.run, "train") is None
