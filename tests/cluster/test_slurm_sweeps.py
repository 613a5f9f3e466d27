"""Sweeps whose points all stand in Slurm's queue at once: with their launchers and without."""

import pytest
from orchestrate_runs import (
    InProcess,
    Runs,
    count_lines,
    events,
    kill_launcher,
    wait_for_stage,
)
from tiny_stages.calls import wait_until

from redco_flow.cli.run_view import read_run_view
from redco_flow.cli.sweep_view import read_sweep_view, sweep_text
from redco_flow.launch.executor import reattach
from redco_flow.orchestrate.cancelling import cancel_run
from redco_flow.orchestrate.planning import make_plan
from redco_flow.orchestrate.sweep_submission import submit_points
from redco_flow.orchestrate.sweeping import (
    PlannedPoint,
    cancel_sweep,
    resume_sweep,
    start_sweep,
)
from redco_flow.records import read_json, write_json
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import Profile
from redco_flow.tracking.lease import find_holder
from redco_flow.tracking.shared_attempt import read_shared_attempt
from redco_flow.tracking.workspace import Workspace

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

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
RATES = [(f"train.learning_rate={rate}.0",) for rate in (1, 2, 3, 4)]


class Sweeps:
    """Start sweeps in one workspace; nothing of them outlives the test."""

    def __init__(self, folder):
        self.folder = folder
        self.profile = {"executor": "slurm", "grace_seconds": 2.0}
        self.workspace = Workspace.open(folder / "workspace")
        self._path = folder / "pipeline.yaml"
        self._path.write_text(PIPELINE.format(folder=folder))
        self.started = []

    def plan(self, overrides, **profile):
        settings = Profile(workspace=str(self.workspace.root), **self.profile | profile)
        pipeline = load_pipeline(self._path, overrides, settings)
        return PlannedPoint(overrides, pipeline, settings, make_plan(pipeline, self.workspace))

    def start(self, points=RATES, max_parallel=2, *, holds_first=False):
        if not holds_first:
            (self.folder / "first-gate").touch()
        planned = [self.plan(point) for point in points]
        given = {"profile_name": "slurm", "overrides": [], "argv": ["redco-flow"]}
        sweep = start_sweep(planned, self.workspace, max_parallel=max_parallel, **given)
        self.started.append(sweep)
        return sweep

    def view(self, sweep):
        return read_sweep_view(sweep, self.workspace)

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
            own, leases = find_holder(sweep), map(find_holder, sweep.runs)
            return is_submitted and all(one is None or one.holder != own.holder for one in leases)

        wait_until(is_queued, 60)

    def wait_for_end(self, sweep, seconds=120):
        def ended():
            view = self.view(sweep)
            return view if view["state"] != "running" else None

        return wait_until(ended, seconds)

    def open_gate(self):
        (self.folder / "gate").touch()


def kill_launchers(sweep):
    """kill -9 of the sweep's process and of every driver."""
    for one in (sweep, *sweep.runs):
        kill_launcher(one)


def submissions(sweep):
    """Every sbatch file that the sweep's process or a driver has submitted."""
    runs = [path for run in sweep.runs for path in run.path.glob("stages/*/attempts/*/job.sh")]
    return [*sorted((sweep.path / "arrays").glob("*/job.sh")), *runs]


def jobs_in_slurm(slurm):
    """The ids of all jobs that Slurm has had since its start; an array counts once."""
    said = slurm.run("squeue", "--noheader", "--states=all", "--format=%F")
    return set(said.split())


def tasks_in_queue(slurm):
    """The ids of all jobs that have not ended, an array's tasks one by one."""
    return set(slurm.run("squeue", "--array", "--noheader", "--format=%i").split())


def job_ids(sweep, stage):
    records = [run.latest_attempt(stage).read_job() for run in sweep.runs]
    return [record["job_id"] for record in records]


def causes(sweep, stage):
    ended = [run.latest_attempt(stage).read_exit() for run in sweep.runs]
    return [record and record["cause"] for record in ended]


def most_at_once(slurm, array):
    """How many tasks of an array have run at one time, by Slurm's own records."""
    said = slurm.run(
        "squeue", "--array", "--noheader", "--states=all", f"--job={array}", "--format=%S %e"
    )
    times = [line.split() for line in said.splitlines()]
    return max(sum(start <= moment < end for start, end in times) for moment, _ in times)


def wait_until_empty(slurm, seconds=90):
    slurm.wait_for("the queue is empty", lambda: not slurm.jobs(), seconds)


@pytest.fixture
def sweeps(slurm, tmp_path):
    sweeps = Sweeps(tmp_path)
    yield sweeps
    for sweep in sweeps.started:
        kill_launchers(sweep)


def test_a_sweep_is_one_array_for_each_stage_and_what_its_points_share_is_one_job(
    sweeps, slurm, tmp_path, prefect_server
):
    before = jobs_in_slurm(slurm)
    sweep = sweeps.start()
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)
    queued = slurm.run("squeue", "--array", "--noheader", "--states=pending", "--format=%T %r")
    wait_until(lambda: sweeps.states(sweep) == ["running", "running", "waiting", "waiting"], 60)
    text = sweep_text(sweeps.view(sweep))
    sweeps.open_gate()
    view = sweeps.wait_for_end(sweep)

    assert view["state"] == "completed", sweep.log_path.read_text()
    assert len(jobs_in_slurm(slurm) - before) == 3  # one for each stage
    assert queued.count("JobArrayTaskLimit") == 2
    assert "train: waits in the queue: JobArrayTaskLimit" in text
    train, compare = (
        (sweep.path / "arrays" / f"{stage}.1" / "job.sh").read_text()
        for stage in ("train", "compare")
    )
    shared = sweep.runs[0].latest_attempt("preprocess").read_job()["job_id"]
    array = job_ids(sweep, "train")[0].partition("_")[0]
    assert "#SBATCH --array=0-3%2\n" in train
    assert f"--dependency=afterok:{shared}\n" in train
    assert f"--dependency=aftercorr:{array}\n" in compare
    assert job_ids(sweep, "train") == [f"{array}_{number}" for number in range(4)]
    assert most_at_once(slurm, array) == 2
    assert all((run.latest_attempt("train").logs / "slurm.log").is_file() for run in sweep.runs)
    assert count_lines(tmp_path / "preprocessed") == 1
    assert count_lines(tmp_path / "trained") == 4
    assert [point["metrics"]["best"] for point in view["points"]] == [6.0, 12.0, 18.0, 24.0]
    for point in RATES:  # by the fingerprints of a local run, everything is there
        actions = [one.action for one in sweeps.plan(point, executor="local").plan.stages.values()]
        assert actions == ["reuse"] * 3
    (tmp_path / "local").mkdir()
    local = InProcess(Runs(tmp_path / "local").write(PIPELINE.format(folder=tmp_path), RATES[1]))
    assert local.end().state == "completed", local.said
    made = [run.read_state()["stages"]["train"] for run in (local.run, sweep.runs[1])]
    assert made[0]["artifacts"] == made[1]["artifacts"]
    assert made[0]["fingerprint"] == made[1]["fingerprint"]


def test_without_any_launcher_every_point_comes_to_its_end_and_resume_only_collects(
    sweeps, slurm, tmp_path, prefect_server
):
    """Fault 17."""
    sweep = sweeps.start()
    sweeps.wait_until_queued(sweep)
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)
    kill_launchers(sweep)
    during = wait_until(
        lambda: (v := sweeps.view(sweep))["points"][3]["message"].endswith("TaskLimit") and v, 30
    )
    stages = read_run_view(sweep.runs[3])["stages"]
    sweeps.open_gate()
    wait_until_empty(slurm)
    done = sweeps.view(sweep)
    known = jobs_in_slurm(slurm)

    assert during["state"] == "running"
    assert during["queued"]
    assert [point["state"] for point in during["points"]] == ["running"] * 2 + ["waiting"] * 2
    assert stages["compare"]["message"] == "waits in the queue: Dependency"
    assert [stage["state"] for stage in stages.values()] == ["completed", "waiting", "waiting"]
    assert stages["preprocess"]["message"] == f"made by {sweep.runs[0].id}"
    assert done["state"] == "interrupted"
    for name in ("train", "compare"):
        assert causes(sweep, name) == ["completed"] * 4
    resume_sweep(sweep)
    view = sweeps.wait_for_end(sweep)
    assert view["state"] == "completed", sweep.log_path.read_text()
    assert jobs_in_slurm(slurm) <= known  # it forgets those that ended long ago
    assert count_lines(tmp_path / "trained") == 4
    assert all(len(run.attempts("train")) == 1 for run in sweep.runs)


def test_a_failed_point_is_tried_again_alone_a_preempted_one_goes_on_a_cancelled_one_is_left(
    sweeps, slurm, tmp_path, prefect_server
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
    wait_until(lambda: "job_retried" in events(sweep.runs[2]), 60)
    cured.touch()
    view = sweeps.wait_for_end(sweep)

    ends = [point["state"] for point in view["points"]]
    assert ends == [*["completed"] * 3, "cancelled"], sweep.log_path.read_text()
    assert [len(run.attempts("train")) for run in sweep.runs] == [1, 1, 2, 1]
    assert [len(run.attempts("compare")) for run in sweep.runs] == [1, 1, 2, 1]
    assert causes(sweep, "train")[3] == "cancelled"
    assert slurm.jobs() == {}
    assert sweep.runs[1].latest_attempt("train").read_exit()["restart"] == 1
    again = sweep.runs[2].latest_attempt("train").read_job()["job_id"]
    assert "_" not in again  # an ordinary job
    assert count_lines(tmp_path / "preprocessed") == 1


def test_a_point_whose_shared_job_is_cancelled_with_another_point_makes_it_by_itself(
    sweeps, slurm, tmp_path
):
    sweep = sweeps.start(RATES[:2], holds_first=True)
    sweeps.wait_until_queued(sweep)
    kill_launchers(sweep)
    first, second = sweep.runs
    shared = first.latest_attempt("preprocess").read_job()["job_id"]
    wait_until(lambda: count_lines(tmp_path / "preprocessed") == 1)

    driven = InProcess(second, judges_ended=True)
    waits_for = wait_for_stage(second, "preprocess", "waiting")["message"]
    cancel_run(first, "not this one")
    wait_until(lambda: count_lines(tmp_path / "preprocessed") == 2, 60)
    for gate in ("first-gate", "gate"):
        (tmp_path / gate).touch()
    outcome = driven.end(120)

    assert waits_for == f"waits for job {shared} of run {first.id}"
    assert outcome.state == "completed", driven.said
    assert [len(second.attempts(stage)) for stage in ("preprocess", "train")] == [1, 2]
    wait_until_empty(slurm)  # a job's record of its end comes before Slurm's


def test_cancelling_a_sweep_empties_the_queue_also_of_points_without_a_driver(
    sweeps, slurm, tmp_path, prefect_server
):
    sweep = sweeps.start()
    wait_until(lambda: count_lines(tmp_path / "trained") == 2)
    sweeps.wait_until_queued(sweep)
    kill_launchers(sweep)

    cancel_sweep(sweep, "enough")

    assert sweeps.states(sweep) == ["cancelled"] * 4
    wait_until_empty(slurm)
    assert causes(sweep, "train") == causes(sweep, "compare") == ["cancelled"] * 4
    assert count_lines(tmp_path / "trained") == 2


def held(sweeps, points=RATES):
    """A sweep that is written but has no process, and whose jobs nobody will start."""
    sweeps.profile["slurm"] = {"options": ["--begin=now+1hour"]}
    sweep = sweeps.start(points)
    sweeps.wait_until_queued(sweep)
    kill_launchers(sweep)
    return sweep


def test_all_points_of_a_cancelled_sweep_are_asked_before_the_end_of_any_is_awaited(sweeps, slurm):
    points = [(f"train.learning_rate={rate}.0",) for rate in range(1, 21)]
    sweep = held(sweeps, points)

    cancel_sweep(sweep, "enough")

    requests = [run.latest_attempt("compare").cancel_path for run in sweep.runs]
    asked = [read_json(path)["time"] for path in requests]
    ended = [run.read_state()["ended_at"] for run in sweep.runs]
    assert max(asked) <= min(ended)
    assert sweeps.states(sweep) == ["cancelled"] * 20
    wait_until_empty(slurm)


def test_an_array_whose_id_was_lost_is_found_by_its_name_and_what_slurm_never_got_is_submitted(
    sweeps, slurm
):
    """Fault 12."""
    sweep = held(sweeps)
    ids, queued = job_ids(sweep, "train"), tasks_in_queue(slurm)
    for run in sweep.runs:
        attempt = run.latest_attempt("train")
        write_json(attempt.job_path, attempt.read_job() | {"job_id": ""})
        attempt = run.latest_attempt("compare")
        write_json(attempt.job_path, attempt.read_job() | {"job_id": "", "job_name": "another"})

    said = []
    submit_points(sweep, sweep.runs, said.append)

    assert job_ids(sweep, "train") == ids, said
    assert set(job_ids(sweep, "compare")).isdisjoint(queued)
    assert len({one.partition("_")[0] for one in job_ids(sweep, "compare")}) == 1
    again = tasks_in_queue(slurm)
    assert len(again) == len(queued) + 4
    submit_points(sweep, sweep.runs, said.append)
    assert tasks_in_queue(slurm) == again
    job = reattach(sweep.runs[2].latest_attempt("train").read_job())
    wait_until(lambda: job.status().message == "waits in the queue: Dependency", 30)
    slurm.run("scancel", ids[2])  # of which Slurm then knows nothing
    wait_until(job.done, 40)
    assert job.status().message.startswith("it never began: Slurm took it out of the queue")


def test_points_of_other_resources_are_an_array_of_their_own_and_an_alike_point_has_no_job(
    sweeps, slurm
):
    cpus = "train.resources.cpus_per_host="
    points = [
        *[(*RATES[index], f"{cpus}1") for index in (0, 1)],
        *[(*RATES[index], f"{cpus}2") for index in (2, 3)],
        (*RATES[3], f"{cpus}1"),  # makes what the one before it makes
    ]
    sweeps.profile["slurm"] = {"options": ["--begin=now+1hour"]}
    sweep = sweeps.start(points)
    sweeps.wait_until_queued(sweep)
    kill_launchers(sweep)

    arrays = {path.parent.name: path.read_text() for path in submissions(sweep)}
    singles = [path for path in submissions(sweep) if path.parent.name == "1"]
    alike = [read_shared_attempt(sweep.runs[4], stage) for stage in ("train", "compare")]
    assert "--array=0,1%2\n" in arrays["train.1"]
    assert "--array=2,3%2\n" in arrays["train.2"]
    assert "--cpus-per-task=2\n" in arrays["train.2"]
    assert alike == [sweep.runs[3].latest_attempt(stage) for stage in ("train", "compare")]
    assert sweep.runs[4].latest_attempt("train") is None
    assert len(singles) == 1  # the preprocessing that all of them share
