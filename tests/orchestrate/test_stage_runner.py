"""Stages as real jobs, driven without Prefect: reuse, failure, waiting, finding again."""

import os

import pytest
from orchestrate_runs import (
    DIAMOND,
    TWO_STAGES,
    InProcess,
    count_lines,
    events,
    until,
    wait_for_stage,
)

from redco_flow.errors import StageFailed
from redco_flow.launch.executor import make_executor, reattach
from redco_flow.orchestrate.run.attempts import _revoke_cancel
from redco_flow.orchestrate.run.calls import write_attempt
from redco_flow.orchestrate.run.cancel import StopRequest
from redco_flow.orchestrate.run.driver import open_session
from redco_flow.orchestrate.run.ingredients import stage_ingredients
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.records import write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.results import fingerprint


@pytest.fixture
def counted(executions):
    """Overrides that have both stages count their executions."""
    return [f"preprocess.executions={executions}", f"train.executions={executions}"]


def test_outputs_of_one_stage_are_the_inputs_of_the_next(runs):
    driven = InProcess(runs.write(TWO_STAGES, ["train.learning_rate=2.0"]))

    outcome = driven.end()

    train = driven.run.read_state()["stages"]["train"]
    assert outcome.state == "completed"
    assert train["metrics"]["total"] == 12.0  # (1 + 2 + 3) * 2
    assert set(train["artifacts"]) == {"checkpoint", "metrics"}


def test_a_second_run_reuses_every_stage_and_executes_nothing(runs, counted, executions):
    InProcess(runs.write(TWO_STAGES, counted)).end()

    second = InProcess(runs.write(TWO_STAGES, counted))
    outcome = second.end()

    stages = second.run.read_state()["stages"]
    assert outcome.message == "2 stages completed, 2 of them reused"
    assert all(stage["reused"] and stage["seconds"] == 0.0 for stage in stages.values())
    assert not (second.run.path / "stages").exists()
    assert count_lines(executions) == 2


def test_without_its_result_a_reused_stage_that_was_not_searched_fails_before_a_job(runs):
    text = "{name: searched, stages: {train: {kind: orchestrate_kinds.searched}}}"
    first = InProcess(runs.write(text))
    first.end()
    planned = runs.write(text, ["train.mesh=auto"])
    digest = first.run.read_state()["stages"]["train"]["fingerprint"]
    (runs.workspace.results / f"{digest}.json").unlink()

    second = InProcess(planned)
    outcome = second.end()

    assert outcome.state == "failed"
    message = second.run.read_state()["stages"]["train"]["message"]
    assert "has been deleted, so 'mesh' was not decided when the run started" in message
    assert not list(second.run.attempts("train"))


def test_a_failed_stage_reports_job_log_and_last_lines_and_its_followers_are_skipped(
    runs, tmp_path
):
    never = tmp_path / "never"
    driven = InProcess(runs.write(DIAMOND, [f"train-small.fails_until={never}"]))

    outcome = driven.end()

    stages = driven.run.read_state()["stages"]
    log = driven.run.attempt("train-small", 1).log_path(0)
    message = stages["train-small"]["message"]
    assert (outcome.state, outcome.exit_code) == ("failed", StageFailed.exit_code)
    assert stages["train-small"]["job_id"] in message
    assert str(log) in message
    assert "RuntimeError: the sum does not converge (at " in message
    assert "orchestrate_kinds/total.py:39)" in message
    assert driven.states() | {"train-small": "failed"} == {
        "preprocess": "completed",
        "train-small": "failed",
        "train-large": "completed",  # it does not depend on the failed one
        "compare": "skipped",
    }
    assert stages["compare"]["message"] == "upstream train-small failed"


@pytest.mark.slow
def test_taking_a_run_up_again_gives_a_failed_stage_a_new_attempt(
    runs, counted, executions, tmp_path
):
    cured = tmp_path / "cured"
    run = runs.write(TWO_STAGES, [*counted, f"train.fails_until={cured}"])
    InProcess(run).end()
    cured.touch()

    outcome = InProcess(run).end()

    assert outcome.state == "completed"
    assert run.read_state()["stages"]["train"]["attempt"] == 2
    assert executions.read_text().split()[::3] == ["preprocess", "train", "train"]


def test_cancelling_ends_the_job_and_what_had_not_begun(runs, gate):
    driven = InProcess(runs.write(TWO_STAGES, [f"preprocess.gate={gate}"]))
    wait_for_stage(driven.run, "preprocess")

    driven.stop.cancel("enough")
    outcome = driven.end()

    assert (outcome.state, outcome.exit_code, outcome.message) == ("cancelled", 5, "enough")
    assert driven.states() == {"preprocess": "cancelled", "train": "cancelled"}
    assert driven.run.attempt("preprocess", 1).read_exit().cause == "cancelled"


@pytest.mark.parametrize(
    ("requests", "is_revoked"),
    [
        ({"": {"is_sent": False}}, True),
        ({"": {"is_sent": True}}, False),
        ({"": {}}, False),  # hosts over SSH: a rank may have been asked already
        ({"": {"is_sent": False}, "tasks/0": {}}, True),
        ({"": {}, "arrays/0": {"is_sent": False}, "tasks/0": {}}, True),
        ({"": {}, "arrays/0": {"is_sent": True}, "arrays/1": {"is_sent": False}}, False),
    ],
    ids=["job", "sent", "other-executor", "array", "arrays", "one-of-two-arrays"],
)
def test_a_request_to_cancel_is_revoked_only_if_slurm_has_taken_no_part_of_it(
    tmp_path, requests, is_revoked
):
    attempt = AttemptDirectory(tmp_path / "1")
    paths = [attempt.path / folder / "cancel.json" for folder in requests]
    for path, request in zip(paths, requests.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, request)

    _revoke_cancel(attempt)

    assert [path.exists() for path in paths] == [not is_revoked] * len(paths)


def test_cancelled_stages_can_be_left_as_they_are(runs, gate, executions):
    run = runs.write(DIAMOND, [f"train-small.gate={gate}", f"train-large.gate={gate}"])
    driven = InProcess(run)
    wait_for_stage(run, "train-small")
    driven.stop.cancel("enough")
    driven.end()

    outcome = InProcess(run, leave_cancelled=True).end()

    assert outcome.state == "cancelled"
    assert len(run.attempts("train-small")) == 1


def test_a_job_outlives_its_launcher_and_is_found_again(runs, counted, executions, gate):
    run = runs.write(TWO_STAGES, [*counted, f"train.gate={gate}"])
    first = InProcess(run)
    wait_for_stage(run, "train")
    first.stop.detach("the laptop is closed")
    assert first.end().state == "detached"
    assert run.read_state()["state"] == "running"

    second = InProcess(run)
    wait_for_stage(run, "train")
    gate.touch()
    outcome = second.end()

    assert outcome.state == "completed"
    assert "job_reattached" in events(run)
    job_id = run.attempt("train", 1).read_job()["job_id"]
    assert f"train | found job {job_id} again (attempt 1)" in second.said
    assert executions.read_text().split()[::3] == ["preprocess", "train"]


def test_a_job_that_ended_while_no_launcher_looked_is_registered_once(
    runs, counted, executions, gate
):
    """Fault 4: the next attempt registers the artifact, exactly once."""
    run = runs.write(TWO_STAGES, [*counted, f"train.gate={gate}"])
    first = InProcess(run)
    job_id = wait_for_stage(run, "train")["job_id"]
    first.stop.detach("the laptop is closed")
    first.end()
    gate.touch()
    job_of(run, "train").wait()

    outcome = InProcess(run).end()

    train = run.read_state()["stages"]["train"]
    assert outcome.state == "completed"
    assert (train["attempt"], train["reused"], train["job_id"]) == (1, False, job_id)
    assert count_lines(executions) == 2


def test_a_job_that_was_submitted_but_never_recorded_is_found_again(
    runs, counted, executions, gate
):
    """Fault 12: the attempt's directory is the job's identity."""
    run = runs.write(TWO_STAGES, [*counted, f"preprocess.gate={gate}"])
    submit_and_say_nothing(run, "preprocess")

    driven = InProcess(run)
    wait_for_stage(run, "preprocess")
    gate.touch()
    outcome = driven.end()

    assert outcome.state == "completed"
    assert len(run.attempts("preprocess")) == 1
    assert executions.read_text().split()[::3] == ["preprocess", "train"]


@pytest.mark.slow
def test_a_result_made_from_inputs_that_were_replaced_since_is_not_taken(runs, tmp_path):
    data, never = tmp_path / "numbers.json", tmp_path / "never"
    data.write_text("[1, 2]")
    overrides = [f"preprocess.file={data}", f"train-large.fails_until={never}"]
    run = runs.write(DIAMOND, overrides)
    InProcess(run).end()
    before = run.read_state()["stages"]
    dataset = ArtifactStore(runs.workspace).get(before["preprocess"]["artifacts"]["dataset"])
    (dataset.path / "numbers.json").unlink()
    data.write_text("[30]")
    never.touch()

    again = InProcess(run)
    again.end()

    after = run.read_state()["stages"]
    totals = [stages["train-small"]["metrics"]["total"] for stages in (before, after)]
    assert totals == pytest.approx([3e-4, 30e-4])
    assert after["compare"]["metrics"]["best"] == pytest.approx(60e-4)
    why = "starts over: since attempt 1 there are changes: input dataset changed"
    assert any(why in line for line in again.said)


def test_a_job_that_another_runs_dead_launcher_left_is_waited_for(runs, counted, executions, gate):
    overrides = [*counted, f"preprocess.gate={gate}"]
    first = InProcess(runs.write(TWO_STAGES, overrides))
    wait_for_stage(first.run, "preprocess")
    until(lambda: count_lines(executions) == 1)
    first.stop.detach("the laptop is closed")
    first.end()
    second = InProcess(runs.write(TWO_STAGES, overrides))
    left = "waits for a job of another run that makes the same result"
    until(lambda: second.run.read_state()["stages"]["preprocess"]["message"] == left)

    gate.touch()
    outcome = second.end()

    assert outcome.message == "2 stages completed, 1 of them reused"
    assert count_lines(executions) == 2


def test_an_attempt_that_was_never_submitted_is_not_waited_for(runs):
    run = runs.write(TWO_STAGES)
    run.new_attempt("preprocess")

    outcome = InProcess(run).end()

    assert outcome.state == "completed"
    assert run.read_state()["stages"]["preprocess"]["attempt"] == 2


def test_of_two_runs_with_one_fingerprint_the_second_waits_and_reuses(
    runs, counted, executions, gate
):
    overrides = [*counted, f"preprocess.gate={gate}"]
    first = InProcess(runs.write(TWO_STAGES, overrides))
    wait_for_stage(first.run, "preprocess")
    second = InProcess(runs.write(TWO_STAGES, overrides))
    waiting = wait_for_stage(second.run, "preprocess", "waiting")

    gate.touch()
    outcomes = [first.end(), second.end()]

    assert "fingerprint" in waiting
    assert [outcome.state for outcome in outcomes] == ["completed", "completed"]
    assert second.run.read_state()["stages"]["preprocess"]["reused"]
    assert count_lines(executions) == 2


@pytest.mark.slow
def test_a_result_is_taken_when_its_run_has_had_the_time_to_hand_over_to_the_next_stage(runs):
    """Its launcher sees the end of a stage later than others see the result."""
    first = InProcess(runs.write(TWO_STAGES))
    first.end()
    digest = first.run.read_state()["stages"]["preprocess"]["fingerprint"]

    with exclusive(runs.workspace.work_directory(digest).with_suffix(".claim")):
        second = InProcess(runs.write(TWO_STAGES))
        waits = f"waits for what run {first.run.id} makes next"
        until(lambda: second.run.read_state()["stages"]["preprocess"]["message"] == waits)
        outcome = second.end()  # the holder may be another run, which waits itself

    assert outcome.message == "2 stages completed, 2 of them reused"


@pytest.mark.slow
def test_no_more_stages_run_at_once_than_the_profile_allows(runs, gate):
    runs.profile["max_parallel_stages"] = 1
    run = runs.write(DIAMOND, [f"train-small.gate={gate}", f"train-large.gate={gate}"])
    driven = InProcess(run)
    wait_for_stage(run, "preprocess", "completed")
    waits = "waits for a free slot (max_parallel_stages)"

    def one_of_two_waits():
        trainings = [run.read_state()["stages"][f"train-{size}"] for size in ("small", "large")]
        return sorted((one["state"], one["message"]) for one in trainings)

    until(lambda: one_of_two_waits() == [("running", ""), ("waiting", waits)])
    gate.touch()

    assert driven.end().state == "completed"


@pytest.mark.slow
def test_a_forced_stage_is_executed_although_its_result_stands(runs, counted, executions):
    InProcess(runs.write(TWO_STAGES, counted)).end()

    outcome = InProcess(runs.write(TWO_STAGES, counted, force=["train"])).end()

    assert outcome.message == "2 stages completed, 1 of them reused"
    assert executions.read_text().split()[::3] == ["preprocess", "train", "train"]


@pytest.mark.slow
def test_the_old_result_stands_when_a_forced_stage_fails(runs, tmp_path):
    InProcess(runs.write(TWO_STAGES)).end()
    never = tmp_path / "never"
    forced = runs.write(TWO_STAGES, [f"train.fails_until={never}"], force=["train"])
    assert InProcess(forced).end().state == "failed"

    plan = runs.plan(TWO_STAGES)

    assert plan.stages["train"].action == "reuse"


@pytest.mark.slow
def test_a_deleted_artifact_is_made_again_and_no_stale_path_is_used(runs, counted, executions):
    """Fault 40: the artifact is made again; no path to the deleted one is used."""
    first = InProcess(runs.write(TWO_STAGES, counted))
    first.end()
    dataset = first.run.read_state()["stages"]["preprocess"]["artifacts"]["dataset"]
    (ArtifactStore(runs.workspace).get(dataset).path / "numbers.json").unlink()

    second = InProcess(runs.write(TWO_STAGES, counted))
    outcome = second.end()

    assert outcome.message == "2 stages completed, 1 of them reused"  # the same numbers again
    assert executions.read_text().split()[::3] == ["preprocess", "train", "preprocess"]


def damage_dataset(run, workspace):
    """Change the numbers that a run has made, and not their size; return their file."""
    dataset = run.read_state()["stages"]["preprocess"]["artifacts"]["dataset"]
    path = ArtifactStore(workspace).get(dataset).path / "numbers.json"
    path.chmod(0o644)
    path.write_text(path.read_text().replace("2", "7"))
    return path


@pytest.mark.slow
def test_a_damaged_artifact_is_made_again_and_nothing_is_made_from_it(runs, counted, executions):
    """Faults 22 and 41: the flip is detected in any file; the flip is detected before a stage reads
    the artifact; it is made again, and nothing made from it is reused.
    """
    first = InProcess(runs.write(TWO_STAGES, counted))
    first.end()
    numbers = damage_dataset(first.run, runs.workspace)

    second = InProcess(runs.write(TWO_STAGES, [*counted, "train.learning_rate=2.0"]))
    outcome = second.end()

    assert outcome.message == "2 stages completed"
    assert executions.read_text().split()[::3] == ["preprocess", "train", "preprocess", "train"]
    assert numbers.read_text() == "[1, 2, 3]"
    assert second.run.read_state()["stages"]["train"]["metrics"]["total"] == 12.0


@pytest.mark.slow
def test_what_was_damaged_between_two_stages_is_made_again_by_resume(
    runs, counted, executions, gate
):
    """Fault 41: the flip is detected before a stage reads the artifact; it is made again, and
    nothing made from it is reused.
    """
    run = runs.write(TWO_STAGES, [*counted, f"train.fails_until={gate}"])
    assert InProcess(run).end().state == "failed"
    damage_dataset(run, runs.workspace)
    gate.touch()

    outcome = InProcess(run).end()

    assert outcome.state == "completed"
    assert executions.read_text().split()[::3] == ["preprocess", "train", "preprocess", "train"]
    assert run.read_state()["stages"]["train"]["metrics"]["total"] == pytest.approx(6e-4)


def test_a_stage_that_cannot_be_prepared_fails_and_the_run_ends(runs, tmp_path):
    data = tmp_path / "numbers.json"
    data.write_text("[1]")
    run = runs.write(TWO_STAGES, [f"preprocess.file={data}"])
    session = open_session(run, StateStore(run), StopRequest(), leave_cancelled=False)
    data.unlink()

    session.run_stages(print)

    outcome = session.conclude()
    assert outcome.state == "failed"
    assert f"stage 'preprocess': {data}: cannot be read" in outcome.message


def test_the_records_of_a_run_contain_no_pickles(runs):
    driven = InProcess(runs.write(TWO_STAGES))
    driven.end()

    names = [path.name for path in runs.workspace.root.rglob("*")]

    assert not [name for name in names if name.endswith((".pkl", ".pickle"))]


def submit_and_say_nothing(run, stage):
    """What a launcher does that dies between the submission and its record of it."""
    session = open_session(run, StateStore(run), StopRequest(), leave_cancelled=False)
    context, stage = session.context, session.context.pipeline.stages[stage]
    ingredients = stage_ingredients(stage, {}, context.workspace)
    attempt = write_attempt(context, stage, {}, ingredients, fingerprint(ingredients))
    make_executor(context.profile, os.environ).submit_call(attempt)


def job_of(run, stage):
    return reattach(run.latest_attempt(stage).read_job())


def test_a_crash_is_retried_in_new_attempts_as_often_as_the_profile_allows(
    runs, executions, counted, tmp_path
):
    never = tmp_path / "never"
    runs.profile = {"retries": {"failed": 2}}
    driven = InProcess(runs.write(TWO_STAGES, [*counted, f"train.fails_until={never}"]))

    outcome = driven.end()

    assert outcome.state == "failed"
    assert len(driven.run.attempts("train")) == 3
    assert events(driven.run).count("job_retried") == 2
    assert all(one.read_exit().cause == "failed" for one in driven.run.attempts("train"))


def test_a_continued_run_judges_what_ended_since_it_was_opened_and_tries_again_what_ended_before(
    runs, gate, tmp_path
):
    cured = tmp_path / "cured"
    fails = [f"train-{size}.fails_until={cured}" for size in ("small", "large")]
    run = runs.write(DIAMOND, [*fails, f"train-large.gate={gate}"])
    first = InProcess(run)
    wait_for_stage(run, "train-small", "failed")
    wait_for_stage(run, "train-large")
    first.stop.detach("the node is needed")
    first.end()
    gate.touch()
    until(lambda: run.attempt("train-large", 1).exit_path.exists())
    judged = InProcess(run, judges_ended=True).end()
    after_judging = [len(run.attempts(f"train-{size}")) for size in ("small", "large")]
    cured.touch()
    open_session(run, StateStore(run), StopRequest(), leave_cancelled=False)  # then it is killed

    outcome = InProcess(run, judges_ended=True).end()

    assert (judged.state, after_judging) == ("failed", [1, 1])
    assert outcome.state == "completed"


def test_a_retry_that_succeeds_makes_the_stage_complete(runs, tmp_path):
    cured = tmp_path / "cured"
    runs.profile = {"retries": {"failed": 5}}
    run = runs.write(TWO_STAGES, [f"train.fails_until={cured}"])
    driven = InProcess(run)
    until(lambda: len(run.attempts("train")) > 1)
    cured.touch()

    outcome = driven.end()

    assert outcome.state == "completed"
    assert run.read_state()["stages"]["train"]["attempt"] == len(run.attempts("train"))


@pytest.mark.slow
def test_a_budget_that_is_used_up_stays_used_up_for_the_next_launcher(runs, tmp_path):
    never = tmp_path / "never"
    runs.profile = {"retries": {"failed": 1}}
    run = runs.write(TWO_STAGES, [f"train.fails_until={never}"])
    InProcess(run).end()

    InProcess(run).end()

    assert len(run.attempts("train")) == 3  # resuming by hand is one more, and no retry of it
