"""Sweeps whose points all stand in Slurm's queue at once: with their launchers and without."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from faulty_commands import FaultyCommands
from orchestrate_runs import (
    InProcess,
    Runs,
    count_lines,
    events,
    kill_launcher,
    wait_for_stage,
)
from tiny_stages.calls import wait_until

from redco_flow.cli.sweep_view import read_sweep_view, sweep_text
from redco_flow.cli.view import read_run_view
from redco_flow.orchestrate.run.cancel import cancel_run
from redco_flow.orchestrate.run.driver import Driver
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import write_run
from redco_flow.orchestrate.sweep.control import cancel_sweep, resume_sweep, start_sweep
from redco_flow.orchestrate.sweep.planned_jobs import PlannedPoint
from redco_flow.orchestrate.sweep.submission import submit_points
from redco_flow.orchestrate.sweep.successive_halving import SuccessiveHalving
from redco_flow.records import read_json, write_json
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import profile_model
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.sweep_directory import (
    SweepDirectory,
    SweepPoint,
    read_shared_attempt,
)
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PIPELINE = """
name: sums
stages:
  preprocess:
    kind: orchestrate_kinds.numbers
    executions: {folder}/preprocessed
    gate: {folder}/first-gate
  train:
    kind: orchestrate_kinds.total
    executions: {folder}/trained
    gate: {folder}/gate
  compare: {{kind: orchestrate_kinds.score, metrics: [train]}}
"""
DESCENTS = """
name: descents
stages:
  train: {{kind: orchestrate_kinds.descent, folder: {folder}}}
  reread: {{kind: orchestrate_kinds.reread}}
"""
SMALL = "  small: {{kind: orchestrate_kinds.total, fails_until: {folder}/cured}}"
BRANCHES = PIPELINE.replace("  train:", f"{SMALL}\n  train:").replace("[train]", "[small, train]")
RATES = [(f"train.learning_rate={rate}.0",) for rate in (1, 2, 3, 4)]


class Sweeps:
    """Start sweeps in one workspace; nothing of them outlives the test."""

    def __init__(self, folder):
        self.folder = folder
        self.profile = {"executor": "slurm", "grace_seconds": 2.0}
        self.workspace = Workspace.open(folder / "workspace")
        self.path = folder / "pipeline.yaml"
        self.path.write_text(PIPELINE.format(folder=folder))
        self.started = []

    def plan(self, overrides, **profile):
        settings = profile_model()(workspace=str(self.workspace.root), **self.profile | profile)
        pipeline = load_pipeline(self.path, overrides, settings)
        return PlannedPoint(overrides, pipeline, settings, make_plan(pipeline, self.workspace))

    def start(self, points=RATES, max_parallel=2, *, holds_first=False, **options):
        if not holds_first:
            (self.folder / "first-gate").touch()
        planned = [self.plan(point) for point in points]
        given = {"profile_name": "slurm", "overrides": [], "argv": ["redco-flow"], **options}
        sweep = start_sweep(planned, self.workspace, max_parallel=max_parallel, **given)
        self.started.append(sweep)
        return sweep

    def queue(self, points=RATES, max_parallel=2, *, holds_first=False):
        """Write a sweep and submit its jobs from here: it has no process."""
        if not holds_first:
            (self.folder / "first-gate").touch()
        sweep = self.write(points, max_parallel)
        submit_points(sweep, sweep.runs, print, Driver())
        return sweep

    def write(self, points, max_parallel=2):
        """Write a sweep that has no process, and no jobs yet."""
        sweep = SweepDirectory.create(self.workspace, "sums")
        runs = []
        for point in map(self.plan, points):
            given = {"overrides": point.overrides, "argv": [], "ahead": True, "sweep": sweep.id}
            run = write_run(point.pipeline, point.profile, self.workspace, point.plan, **given)
            runs.append(run)
        listed = [SweepPoint(run.id, list(point)) for run, point in zip(runs, points, strict=True)]
        sweep.write(listed, max_parallel=max_parallel, argv=[], ahead=True)
        return sweep

    def view(self, sweep):
        return read_sweep_view(sweep)

    def states(self, sweep):
        return [point["state"] for point in self.view(sweep)["points"]]

    def wait_until_queued(self, sweep):
        """Wait until the jobs of all points are in the queue, and their records say so."""

        def is_queued():
            lasts = [
                run.latest_attempt("compare") or read_shared_attempt(run, "compare")
                for run in sweep.runs
            ]
            is_submitted = all(last and (last.read_job() or {}).get("job_id") for last in lasts)
            # The leases of all are held until the last point is submitted.
            return is_submitted and not all(map(find_holder, sweep.runs))

        wait_until(is_queued)

    def wait_for_end(self, sweep, seconds=400):
        def ended():
            view = self.view(sweep)
            return view if view["state"] != "running" else None

        return wait_until(ended, seconds)

    def end(self):
        for sweep in self.started:
            kill_launchers(sweep)

    def open_gate(self):
        (self.folder / "gate").touch()


def kill_launchers(sweep):
    """kill -9 of the sweep's process, and of those that drive runs of it."""
    for one in (sweep, *sweep.runs):
        kill_launcher(one)


def jobs_in_slurm(slurm):
    """The ids of all jobs that Slurm has had since its start."""
    return set(slurm.run("squeue", "--noheader", "--states=all", "--format=%i").split())


def script_of(run, stage):
    return (run.latest_attempt(stage).path / "job.sh").read_text()


def job_id(run, stage):
    return run.latest_attempt(stage).read_job()["job_id"]


def job_ids(sweep, stage):
    return [job_id(run, stage) for run in sweep.runs]


def causes(sweep, stage):
    ended = [run.latest_attempt(stage).read_exit() for run in sweep.runs]
    return [record and record.cause for record in ended]


def most_at_once(slurm, ids):
    """How many of these jobs have run at one time, by Slurm's own records."""
    options = ["--noheader", "--states=all", f"--job={','.join(ids)}", "--format=%S %e"]
    times = [line.split() for line in slurm.run("squeue", *options).splitlines()]
    return max(sum(start <= moment < end for start, end in times) for moment, _ in times)


def wait_until_empty(slurm, seconds=400):
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs(), seconds)


@pytest.fixture
def sweeps(slurm, tmp_path):
    sweeps = Sweeps(tmp_path)
    yield sweeps
    sweeps.end()


def test_all_points_are_in_the_queue_some_run_at_a_time_and_what_they_share_is_one_job(
    sweeps, slurm, tmp_path
):
    before = jobs_in_slurm(slurm)
    sweep = sweeps.start(
        RATES[:3], holds_first=True
    )  # on a busy machine it might end before all wait for it
    sweeps.wait_until_queued(sweep)
    queued = jobs_in_slurm(slurm) - before
    (tmp_path / "first-gate").touch()
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)
    wait_until(lambda: sweeps.states(sweep) == ["running", "running", "waiting"])
    text = sweep_text(sweeps.view(sweep))
    time.sleep(1.1)  # Slurm's records have whole seconds
    sweeps.open_gate()
    view = sweeps.wait_for_end(sweep)

    assert view["state"] == "completed", sweep.log_path.read_text()
    assert len(queued) == 7  # one preprocessing, and a training and a comparison for each point
    assert jobs_in_slurm(slurm) - before == queued
    assert "train: waits in the queue: Dependency" in text
    shared = job_id(sweep.runs[0], "preprocess")
    train, compare = job_ids(sweep, "train"), job_ids(sweep, "compare")
    after_ids = ["", "", f",afterany:{shared}:{train[0]}:{compare[0]}"]
    for number, run in enumerate(sweep.runs):
        first, last = script_of(run, "train"), script_of(run, "compare")
        assert f"--dependency=afterok:{shared}{after_ids[number]}\n" in first
        assert f"--dependency=afterok:{train[number]}\n" in last
    assert most_at_once(slurm, train) == 2
    assert all((run.latest_attempt("train").logs / "slurm.log").is_file() for run in sweep.runs)
    assert count_lines(tmp_path / "preprocessed") == 1
    assert count_lines(tmp_path / "trained") == 3
    assert [point["metrics"]["compare/best"] for point in view["points"]] == [6.0, 12.0, 18.0]
    for point in RATES[:3]:  # by the fingerprints of a local run, everything is there
        actions = [one.action for one in sweeps.plan(point, executor="local").plan.stages.values()]
        assert actions == ["reuse"] * 3
    (tmp_path / "local").mkdir()
    local = InProcess(Runs(tmp_path / "local").write(PIPELINE.format(folder=tmp_path), RATES[1]))
    assert local.end().state == "completed", local.said
    made = [run.read_state()["stages"]["train"] for run in (local.run, sweep.runs[1])]
    assert made[0]["artifacts"] == made[1]["artifacts"]
    assert made[0]["fingerprint"] == made[1]["fingerprint"]


def test_points_are_submitted_without_a_question_for_each(sweeps, tmp_path, monkeypatch):
    """A site's administrators count squeue: of 1,000 points there was one for each second."""
    commands = FaultyCommands(tmp_path / "slurm")
    monkeypatch.setenv("PATH", commands.path)

    sweep = sweeps.queue(holds_first=True)
    calls = {name: len(commands.calls(name)) for name in ("sbatch", "squeue")}
    cancel_sweep(sweep, "the test is over")

    assert calls == {"sbatch": 1 + 2 * len(RATES), "squeue": 0}


def test_without_any_launcher_every_point_comes_to_its_end_and_resume_only_collects(
    sweeps, slurm, tmp_path
):
    """Fault 17: `redco-flow resume` finds the running job again; the flow run that died is marked
    as crashed.
    """
    # On a busy machine it might end before all wait for it.
    sweep = sweeps.start(RATES[:3], holds_first=True)
    sweeps.wait_until_queued(sweep)
    (tmp_path / "first-gate").touch()
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)
    kill_launchers(sweep)
    during = wait_until(
        lambda: (v := sweeps.view(sweep))["points"][2]["message"].endswith("Dependency") and v
    )
    stages = read_run_view(sweep.runs[2])["stages"]
    sweeps.open_gate()
    wait_until_empty(slurm)
    done = sweeps.view(sweep)
    known = jobs_in_slurm(slurm)

    assert during["state"] == "running"
    assert during["queued"]
    assert [point["state"] for point in during["points"]] == ["running", "running", "waiting"]
    assert stages["compare"]["message"] == "waits in the queue: Dependency"
    assert [stage["state"] for stage in stages.values()] == ["completed", "waiting", "waiting"]
    assert stages["preprocess"]["message"] == f"made by {sweep.runs[0].id}"
    assert done["state"] == "interrupted"
    for name in ("train", "compare"):
        assert causes(sweep, name) == ["completed"] * 3
    resume_sweep(sweep)
    view = sweeps.wait_for_end(sweep)
    assert view["state"] == "completed", sweep.log_path.read_text()
    assert jobs_in_slurm(slurm) <= known  # it forgets those that ended long ago
    assert count_lines(tmp_path / "trained") == 3
    assert all(len(run.attempts("train")) == 1 for run in sweep.runs)


def test_a_failed_point_is_tried_again_alone_a_preempted_one_goes_on_a_cancelled_one_is_left(
    sweeps, slurm, tmp_path
):
    sweeps.profile["retries"] = {"failed": 1}
    cured = tmp_path / "cured"
    points = [*RATES[:2], (*RATES[2], f"train.fails_until={cured}"), RATES[3]]
    sweep = sweeps.start(points, max_parallel=3)
    wait_until(lambda: count_lines(tmp_path / "trained") == 3)
    preempted, cancelled = job_ids(sweep, "train")[1:4:2]

    slurm.run("scancel", cancelled)
    slurm.run("scancel", "--signal=TERM", preempted)
    slurm.wait_for("it is queued again", lambda: slurm.jobs().get(preempted) == "PENDING")
    sweeps.open_gate()
    wait_until(lambda: "job_retried" in events(sweep.runs[2]))
    cured.touch()
    view = sweeps.wait_for_end(sweep)

    ends = [point["state"] for point in view["points"]]
    logs = [one.log_path.read_text() for one in (sweep, *sweep.runs) if one.log_path.exists()]
    assert ends == [*["completed"] * 3, "cancelled"], "\n\n".join(logs)
    assert [len(run.attempts("train")) for run in sweep.runs] == [1, 1, 2, 1]
    assert [len(run.attempts("compare")) for run in sweep.runs] == [1, 1, 2, 1]
    assert causes(sweep, "train")[3] == "cancelled"
    wait_until_empty(slurm)
    assert sweep.runs[1].latest_attempt("train").read_exit().restart == 1
    assert count_lines(tmp_path / "preprocessed") == 1


def test_a_point_begins_when_the_one_before_it_has_ended_however_but_not_when_it_is_preempted(
    sweeps, slurm, tmp_path
):
    never = (*RATES[0], f"train.fails_until={tmp_path / 'never'}")
    sweep = sweeps.queue([never, *RATES[1:3]], max_parallel=1)
    wait_until(lambda: count_lines(tmp_path / "trained") == 1)
    first, second, _ = job_ids(sweep, "train")

    slurm.run("scancel", "--signal=TERM", first)
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)
    while_restarted = slurm.jobs()
    sweeps.open_gate()
    wait_until_empty(slurm)

    assert (while_restarted[first], while_restarted[second]) == ("RUNNING", "PENDING")
    assert causes(sweep, "train") == ["failed", "completed", "completed"]
    assert count_lines(tmp_path / "trained") == 4


def test_a_point_whose_shared_job_is_cancelled_with_another_point_makes_it_by_itself(
    sweeps, slurm, tmp_path
):
    sweep = sweeps.queue(RATES[:2], holds_first=True)
    first, second = sweep.runs
    shared = job_id(first, "preprocess")
    wait_until(lambda: count_lines(tmp_path / "preprocessed") == 1)

    driven = InProcess(second, judges_ended=True)
    waits_for = wait_for_stage(second, "preprocess", "waiting")["message"]
    cancel_run(first, "not this one")
    wait_until(lambda: count_lines(tmp_path / "preprocessed") == 2)
    for gate in ("first-gate", "gate"):
        (tmp_path / gate).touch()
    outcome = driven.end()

    assert waits_for == f"waits for job {shared} of run {first.id}"
    assert outcome.state == "completed", driven.said
    assert [len(second.attempts(stage)) for stage in ("preprocess", "train")] == [1, 2]
    wait_until_empty(slurm)  # a job's record of its end comes before Slurm's


def test_cancelling_a_sweep_empties_the_queue_also_of_points_without_a_driver(
    sweeps, slurm, tmp_path
):
    sweep = sweeps.queue(RATES[:3])
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)

    cancel_sweep(sweep, "enough")

    assert sweeps.states(sweep) == ["cancelled"] * 3
    wait_until_empty(slurm)
    assert causes(sweep, "train") == causes(sweep, "compare") == ["cancelled"] * 3
    assert count_lines(tmp_path / "trained") == 2


def held(sweeps, points=RATES):
    """A sweep that is written but has no process, and whose jobs are not to be started."""
    sweeps.profile["slurm"] = {"options": ["--begin=now+1hour"]}
    return sweeps.queue(points)


def test_all_points_of_a_cancelled_sweep_are_asked_before_the_end_of_any_is_awaited(sweeps, slurm):
    sweep = held(sweeps)

    cancel_sweep(sweep, "enough")

    requests = [run.latest_attempt("compare").cancel_path for run in sweep.runs]
    asked = [read_json(path)["time"] for path in requests]
    ended = [run.read_state()["ended_at"] for run in sweep.runs]
    assert max(asked) <= min(ended)
    assert sweeps.states(sweep) == ["cancelled"] * 4
    wait_until_empty(slurm)


def test_a_job_whose_id_was_lost_is_found_by_its_name_and_what_slurm_never_got_is_submitted(
    sweeps, slurm
):
    """Fault 12: the job is found by its name; nothing is submitted twice."""
    sweep = held(sweeps, RATES[:2])
    ids, queued = job_ids(sweep, "train"), set(slurm.jobs())
    for run in sweep.runs:
        attempt = run.latest_attempt("train")
        write_json(attempt.job_path, attempt.read_job() | {"job_id": ""})
        attempt = run.latest_attempt("compare")
        write_json(attempt.job_path, attempt.read_job() | {"job_id": "", "job_name": "another"})

    said = []
    submit_points(sweep, sweep.runs, said.append, Driver())

    assert job_ids(sweep, "train") == ids, said
    assert set(job_ids(sweep, "compare")).isdisjoint(queued)
    assert [run.attempt("compare", 1).cause for run in sweep.runs] == ["never_submitted"] * 2
    again = set(slurm.jobs())
    assert len(again) == len(queued) + 2
    submit_points(sweep, sweep.runs, said.append, Driver())
    assert set(slurm.jobs()) == again


def test_points_that_differ_in_nothing_that_decides_a_result_share_every_job(sweeps, slurm):
    cpus = "train.resources.cpus_per_host="
    points = [(*RATES[0], f"{cpus}1"), (*RATES[1], f"{cpus}2"), (*RATES[1], f"{cpus}1"), RATES[2]]
    sweep = held(sweeps, points)

    first, second, same, last = sweep.runs
    shared = [read_shared_attempt(same, stage) for stage in ("train", "compare")]
    ids = [job_id(first, stage) for stage in ("preprocess", "train", "compare")]
    assert "--cpus-per-task=2\n" in script_of(second, "train")
    assert shared == [second.latest_attempt(stage) for stage in ("train", "compare")]
    assert same.latest_attempt("train") is None
    assert len(slurm.jobs()) == 7
    # A point without jobs takes no place: the last one is the second after the first.
    assert f",afterany:{':'.join(ids)}\n" in script_of(last, "train")


def test_a_point_that_is_tried_again_waits_for_those_that_are_in_the_queue(sweeps, slurm):
    sweep = held(sweeps)
    again, before = sweep.runs[1:3]
    cancel_run(again, "a mistake")

    submit_points(sweep, sweep.runs, print, Driver())

    assert [len(run.attempts("train")) for run in sweep.runs] == [1, 2, 1, 1]
    ids = [job_id(before, stage) for stage in ("train", "compare")]
    assert f",afterany:{':'.join(ids)}\n" in script_of(again, "train")


def test_points_that_an_earlier_version_made_tasks_of_an_array_are_shown_and_cancelled(
    sweeps, slurm
):
    sweep = held(sweeps, RATES[:2])
    options = ["--array=0-1", "--begin=now+1hour", "--job-name=sums-train", "--output=/dev/null"]
    array = slurm.run("sbatch", "--parsable", *options, "--wrap=true").strip()
    for task, run in enumerate(sweep.runs):
        attempt = run.latest_attempt("train")
        slurm.run("scancel", attempt.read_job()["job_id"])
        known = f"{array}_{task}" if task else ""  # its launcher died before it learnt the id
        own = {"job_id": known, "job_name": "sums-train", "task": task}
        new = ("shards", "slurm_submitted_at")
        record = {key: value for key, value in attempt.read_job().items() if key not in new}
        write_json(attempt.job_path, record | own | {"array": f"{sweep.path}/arrays/train.1"})

    def are_shown():
        trained = [read_run_view(run)["stages"]["train"] for run in sweep.runs]
        return {stage["message"] for stage in trained} == {"waits in the queue: BeginTime"}

    wait_until(are_shown)
    cancel_sweep(sweep, "enough")

    assert job_ids(sweep, "train") == [f"{array}_{task}" for task in range(2)]
    assert sweeps.states(sweep) == ["cancelled"] * 2
    wait_until_empty(slurm)
    assert causes(sweep, "train") == ["cancelled"] * 2


def test_a_point_is_stopped_early_whose_jobs_were_queued_and_keeps_its_checkpoint(sweeps):
    sweeps.path.write_text(DESCENTS.format(folder=sweeps.folder))
    for name in ("go-1.0", "go-0.5"):
        (sweeps.folder / name).touch()
    halving = SuccessiveHalving("train", "val/loss", "min", min_steps=1, reduction_factor=2)
    points = [(f"train.loss={loss}",) for loss in (1.0, 3.0, 0.5)]

    sweep = sweeps.start(points, max_parallel=1, early_stopping=halving)
    view = sweeps.wait_for_end(sweep)

    assert sweeps.states(sweep) == ["completed", "stopped_early", "completed"]
    assert "val/loss 3 is not among the best 1 of 2" in view["points"][1]["message"]
    stopped = sweep.runs[1]
    assert [attempt.cause for attempt in stopped.attempts("train")] == ["cancelled"]
    fingerprint = stopped.latest_attempt("train").read_call()["fingerprint"]
    saved = sweeps.workspace.work_directory(fingerprint) / "checkpoint.json"
    assert read_json(saved) == {"total": 1}


def test_one_job_runs_many_points_and_the_end_of_one_is_not_that_of_others(sweeps, slurm, tmp_path):
    before = jobs_in_slurm(slurm)
    sweeps.open_gate()
    gates = [f"train.gate={tmp_path}/gate{number}" for number in (1, 2)]
    fails = f"train.fails_until={tmp_path}/never"
    more = [(gates[0],), (fails,), (gates[1],), (), ()]
    points = [(f"train.learning_rate={n}.0", *one) for n, one in enumerate(more, 1)]
    sweep = sweeps.start(points, max_parallel=1, points_per_job=5)
    first, _, at_work, waiting, _ = sweep.runs
    wait_until(lambda: count_lines(tmp_path / "trained") == 1)
    cancel_run(waiting, "not this one")
    is_first_at_work = first.latest_attempt("train").cause is None
    slurm.run("scancel", "--signal=TERM", job_id(first, "train"))
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)  # Slurm has queued the job again
    (tmp_path / "gate1").touch()
    wait_until(lambda: count_lines(tmp_path / "trained") == 4)
    cancel_run(at_work, "enough")
    view = sweeps.wait_for_end(sweep)

    ends = [point["state"] for point in view["points"]]
    logs = [one.log_path.read_text() for one in (sweep, *sweep.runs) if one.log_path.exists()]
    expected = ["completed", "failed", "cancelled", "cancelled", "completed"]
    assert ends == expected, "\n\n".join(logs)
    assert is_first_at_work
    (job,) = jobs_in_slurm(slurm) - before
    assert [job_id(first, "preprocess"), *job_ids(sweep, "train")] == [job] * 6
    assert causes(sweep, "train") == expected
    assert causes(sweep, "compare") == ["completed", *["cancelled"] * 3, "completed"]
    assert count_lines(tmp_path / "trained") == 5
    assert count_lines(tmp_path / "preprocessed") == 1
    assert all(
        len(run.attempts(stage)) == 1 for run in sweep.runs for stage in ("train", "compare")
    )
    wait_until_empty(slurm)


def kill_script(job_id):
    """kill -9 of a job's batch script, as of a node's that is short of memory."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_script = b"slurm_script" in (path / "cmdline").read_bytes()
            if is_script and f"SLURM_JOB_ID={job_id}".encode() in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def test_what_a_killed_job_and_a_killed_process_leave_over_is_packed_again(sweeps, slurm, tmp_path):
    sweeps.profile["retries"] = {"failed": 1}
    before = jobs_in_slurm(slurm)
    sweeps.open_gate()
    held = f"train.gate={tmp_path}/gate2"
    more = [(), (held,), (), ()]
    points = [(f"train.learning_rate={n}.0", *one) for n, one in enumerate(more, 1)]
    sweep = sweeps.start(points, max_parallel=1, points_per_job=3)
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)
    first, last = (job_id(sweep.runs[number], "train") for number in (0, 3))
    scripts = [(sweep.jobs_path / name / "job.sh").read_text() for name in "12"]
    kill_launchers(sweep)
    resume_sweep(sweep)
    wait_until(lambda: find_holder(sweep.runs[1]))
    kill_script(first)
    wait_until(lambda: len(sweep.runs[1].attempts("train")) == 2)
    (tmp_path / "gate2").touch()
    view = sweeps.wait_for_end(sweep)

    assert view["state"] == "completed", sweep.log_path.read_text()
    shared = job_id(sweep.runs[0], "preprocess")
    assert f"--dependency=afterok:{shared}\n" in scripts[0]
    assert f"--dependency=afterok:{shared},afterany:{first}\n" in scripts[1]
    ids = job_ids(sweep, "train")
    assert ids[0] == first
    assert ids[3] == last
    assert len({ids[2], first, last}) == 3  # one more job has what had not begun
    assert [len(run.attempts("train")) for run in sweep.runs] == [1, 2, 2, 1]
    assert count_lines(tmp_path / "trained") == 5
    assert count_lines(tmp_path / "preprocessed") == 1
    assert len(jobs_in_slurm(slurm) - before) == 6


def test_a_stage_is_tried_again_beside_one_that_the_packed_job_still_runs(sweeps, tmp_path):
    """The packed job fails with the stage, and what needs both branches starts all the same."""
    sweeps.path.write_text(BRANCHES.format(folder=tmp_path))
    sweeps.profile["retries"] = {"failed": 1}
    sweep = sweeps.start(RATES[:1], points_per_job=1)
    (run,) = sweep.runs
    wait_until(lambda: "job_retried" in events(run))
    (tmp_path / "cured").touch()
    wait_until(lambda: len(run.attempts("compare")) == 2)
    sweeps.open_gate()
    view = sweeps.wait_for_end(sweep)

    assert view["state"] == "completed", run.log_path.read_text()
    assert f"afterany:{job_id(run, 'train')}\n" in script_of(run, "compare")
    assert [len(run.attempts(stage)) for stage in ("small", "train", "compare")] == [2, 1, 2]


@pytest.mark.parametrize(("points_per_job", "num_jobs"), [(2, 6), (3, 2)])
def test_points_whose_shared_stage_is_cancelled_with_another_point_are_packed_again(
    sweeps, slurm, tmp_path, points_per_job, num_jobs
):
    """The stage is a job of its own where points of several packs need it, or in their pack."""
    before = jobs_in_slurm(slurm)
    sweeps.open_gate()
    sweep = sweeps.start(RATES[:3], points_per_job=points_per_job, holds_first=True)
    sweeps.wait_until_queued(sweep)
    wait_until(lambda: count_lines(tmp_path / "preprocessed") == 1)
    cancel_run(sweep.runs[0], "not this one")
    wait_until(lambda: count_lines(tmp_path / "preprocessed") == 2)
    (tmp_path / "first-gate").touch()
    sweeps.wait_for_end(sweep)

    states = ["cancelled", "completed", "completed"]
    assert sweeps.states(sweep) == states, sweep.log_path.read_text()
    assert [len(run.attempts("train")) for run in sweep.runs] == [1, 2, 2]
    assert len(jobs_in_slurm(slurm) - before) == num_jobs
