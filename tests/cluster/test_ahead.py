"""Runs whose jobs are all in the queue at once, on a real cluster: with a launcher and without."""

import pytest
from orchestrate_runs import (
    DIAMOND,
    InProcess,
    count_lines,
    events,
    kill_launcher,
    wait_for_end,
    wait_for_stage,
)
from tiny_stages.calls import wait_until

from redco_flow.cli.view import read_run_view
from redco_flow.orchestrate.run.cancel import cancel_run
from redco_flow.orchestrate.run.start import resume_run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHAIN = """
name: chain
stages:
  preprocess: {kind: orchestrate_kinds.numbers}
  train: {kind: orchestrate_kinds.total}
  compare: {kind: orchestrate_kinds.score, metrics: [train]}
"""


@pytest.fixture
def held(executions, gate):
    """Overrides: executions are counted, and the first stage waits for the gate."""
    files = [f"{stage}.executions={executions}" for stage in ("preprocess", "train")]
    return [*files, f"preprocess.gate={gate}"]


def causes(run):
    """How the last attempt of each stage ended."""
    stages = run.read_state()["stages"]
    ended = {name: run.latest_attempt(name).read_exit() for name in stages}
    return {name: record and record.cause for name, record in ended.items()}


def wait_until_empty(slurm, seconds=400):
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs(), seconds)


def is_as_queued(view):
    """Whether a run's first stage is seen at work and its last one behind it."""
    waits = view["stages"]["compare"]["message"]
    return view["state"] == "running" and waits == "waits in the queue: Dependency"


def test_every_stage_runs_in_order_though_the_launcher_is_killed_and_resume_repeats_none(
    runs, slurm, held, gate, executions
):
    run = runs.start(CHAIN, held, ahead=True)
    wait_for_stage(run, "compare", "waiting")
    kill_launcher(run)
    queued = slurm.jobs()
    # Slurm says why a job waits a moment after it has started another.
    during = wait_until(lambda: is_as_queued(view := read_run_view(run)) and view)
    gate.touch()
    wait_until_empty(slurm)
    after = read_run_view(run)

    assert len(queued) == 3
    assert during["queued"]
    assert during["stages"]["compare"]["message"] == "waits in the queue: Dependency"
    assert (after["state"], after["queued"]) == ("interrupted", False)
    assert after["metrics"] == {"compare/best": pytest.approx(6e-4)} | after["metrics"]
    assert set(causes(run).values()) == {"completed"}
    assert run.read_state()["state"] == "running"  # no launcher was there to write more
    resume_run(run)
    state = wait_for_end(run)

    assert state["state"] == "completed", run.log_path.read_text()
    assert state["stages"]["compare"]["metrics"] == {"best": pytest.approx(6e-4)}
    assert [line.split()[0] for line in executions.read_text().splitlines()] == [
        "preprocess",
        "train",
    ]
    wait_until(run.report_path.is_file)
    assert all(len(run.attempts(name)) == 1 for name in state["stages"])
    plain = InProcess(runs.write(CHAIN, held))
    assert plain.end().message == "3 stages completed, 3 of them reused"


def test_a_stage_that_fails_leaves_nothing_in_the_queue_and_clear_records(runs, slurm, tmp_path):
    never = tmp_path / "never"
    driven = InProcess(runs.write(DIAMOND, [f"train-small.fails_until={never}"], ahead=True))

    outcome = driven.end()

    assert outcome.state == "failed"
    assert driven.states() == {
        "preprocess": "completed",
        "train-small": "failed",
        "train-large": "completed",
        "compare": "skipped",
    }
    ended = driven.run.latest_attempt("compare").read_exit()
    assert ended.message == "it never began: upstream train-small failed."
    assert driven.run.read_state()["stages"]["compare"]["message"] == "upstream train-small failed"
    wait_until_empty(slurm)  # a job's record of its end comes before Slurm's


def test_without_a_launcher_slurm_drops_what_waits_for_a_failed_stage_and_resume_goes_on(
    runs, slurm, held, gate, executions, tmp_path
):
    cured = tmp_path / "cured"
    run = runs.write(CHAIN, [*held, f"train.fails_until={cured}"], ahead=True)
    first = InProcess(run)
    wait_for_stage(run, "compare", "waiting")
    first.stop.detach("the laptop is closed")
    assert first.end().state == "detached"
    gate.touch()
    wait_until_empty(slurm)

    assert causes(run) == {"preprocess": "completed", "train": "failed", "compare": None}
    cured.touch()
    second = InProcess(run)
    outcome = second.end()

    assert outcome.state == "completed", second.said
    assert executions.read_text().split()[::3] == ["preprocess", "train", "train"]
    assert run.read_state()["stages"]["compare"]["attempt"] == 2
    message = run.attempt("compare", 1).read_exit().message
    assert message == "it never began: its inputs are computed again."


def test_a_stage_that_may_be_tried_again_has_its_downstream_submitted_again(
    runs, executions, tmp_path
):
    runs.profile["retries"] = {"failed": 1}
    cured = tmp_path / "cured"
    overrides = [f"train-small.fails_until={cured}", f"train-large.gate={cured}"]
    driven = InProcess(runs.write(DIAMOND, overrides, ahead=True))
    wait_until(lambda: "job_retried" in events(driven.run))
    cured.touch()

    outcome = driven.end()

    assert outcome.state == "completed", driven.said
    numbers = {name: len(driven.run.attempts(name)) for name in driven.states()}
    assert numbers == {"preprocess": 1, "train-small": 2, "train-large": 1, "compare": 2}
    message = driven.run.attempt("compare", 1).read_exit().message
    assert message == "it never began: upstream train-small failed (attempt 1)."


def test_a_preempted_stage_keeps_its_followers_waiting_and_needs_no_launcher(
    runs, slurm, held, gate, executions, strict_site
):
    """Fault 57: the last command, which has the job requeued, finds all that the ranks do."""
    runs.profile |= strict_site
    run = runs.write(CHAIN, held, ahead=True)
    driven = InProcess(run)
    wait_for_stage(run, "compare", "waiting")
    wait_until(lambda: count_lines(executions) == 1)
    driven.stop.detach("the laptop is closed")
    driven.end()
    first = run.latest_attempt("preprocess").read_job()["job_id"]

    slurm.run("scancel", "--signal=TERM", first)
    slurm.wait_for("it is queued again", lambda: slurm.jobs().get(first) == "PENDING")
    waiting = slurm.jobs()
    gate.touch()
    slurm.run("scontrol", "update", f"JobId={first}", "StartTime=now+3")
    wait_until_empty(slurm)

    assert list(waiting.values()) == ["PENDING"] * 3
    assert set(causes(run).values()) == {"completed"}
    assert run.latest_attempt("preprocess").read_exit().restart == 1


def test_a_stage_whose_node_dies_keeps_its_followers_waiting(runs, slurm, held, gate, executions):
    run = runs.write(CHAIN, held, ahead=True)
    driven = InProcess(run)
    wait_until(lambda: count_lines(executions) == 1)
    first = run.latest_attempt("preprocess").read_job()["job_id"]
    (node,) = slurm.run("squeue", "--noheader", "--job", first, "--format=%N").split()

    slurm.kill_node(node)
    try:
        wait_until(lambda: count_lines(executions) == 2)
        waiting = slurm.jobs()
        gate.touch()
        outcome = driven.end()
    finally:
        slurm.start_node(node)

    assert outcome.state == "completed", driven.said
    assert sorted(waiting.values()) == ["PENDING", "PENDING", "RUNNING"]
    assert all(len(run.attempts(name)) == 1 for name in driven.states())


@pytest.mark.parametrize("launcher", ["alive", "gone"])
def test_cancelling_empties_the_queue(runs, slurm, held, launcher):
    run = runs.write(CHAIN, held, ahead=True)
    driven = InProcess(run)
    wait_for_stage(run, "compare", "waiting")
    wait_until(lambda: "RUNNING" in slurm.jobs().values())

    if launcher == "alive":
        driven.stop.cancel("enough")
        assert driven.end().state == "cancelled"
    else:
        driven.stop.detach("the laptop is closed")
        driven.end()
        cancel_run(run, "enough")

    assert set(driven.states().values()) == {"cancelled"}
    wait_until_empty(slurm)
    wait_until(lambda: set(causes(run).values()) == {"cancelled"})


def test_what_is_published_is_not_submitted(runs, held, gate, executions):
    gate.touch()
    assert InProcess(runs.write(CHAIN, held, ahead=True)).end().state == "completed"

    changed = InProcess(runs.write(CHAIN, [*held, "train.learning_rate=2.0"], ahead=True))
    outcome = changed.end()

    assert outcome.message == "3 stages completed, 1 of them reused"
    assert changed.run.attempts("preprocess") == []
    assert executions.read_text().split()[::3] == ["preprocess", "train", "train"]


def test_a_chain_that_slurm_refuses_fails_in_its_words_and_leaves_no_job(runs, slurm):
    runs.profile["slurm"] = {"partition": "nowhere"}
    driven = InProcess(runs.write(CHAIN, ahead=True))

    outcome = driven.end()

    assert outcome.state == "failed"
    assert "'preprocess' could not be submitted: sbatch failed" in outcome.message
    assert driven.states() == {"preprocess": "failed", "train": "skipped", "compare": "skipped"}
    assert slurm.jobs() == {}
