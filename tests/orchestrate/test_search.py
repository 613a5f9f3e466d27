"""The points of a sweep that a sampler chooses: each is made once, whenever a process is killed."""

import json
import sys
from argparse import Namespace
from dataclasses import asdict, replace

import pytest

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'redco-flow[optuna]'")

from redco_flow.cli.sweep import choose_points
from redco_flow.errors import UsageError
from redco_flow.orchestrate.prefect.report import state_left_by
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.orchestrate.sweep.control import cancel_sweep
from redco_flow.orchestrate.sweep.optuna_sampler import suggest
from redco_flow.orchestrate.sweep.search import PointMaker, Search, require_optuna
from redco_flow.spec.profile import profile_model
from redco_flow.spec.sweep_points import Trial, ends_of, read_space
from redco_flow.spec.yaml import read_yaml
from redco_flow.tracking.sweep_directory import SampledPoint, SweepDirectory

DESCENT = """
name: descents
stages:
  train: {kind: orchestrate_kinds.descent, folder: "${env:DESCENTS}"}
"""


def profile_of(runs):
    defaults = {"stages": {"train": {"steps": 2}}}
    return profile_model()(workspace=str(runs.workspace.root), defaults=defaults)


@pytest.fixture
def sweep(runs, monkeypatch):
    """Write a sweep whose points a sampler chooses; nothing drives it."""
    monkeypatch.chdir(runs.folder)
    monkeypatch.setenv("DESCENTS", "here")

    def sweep(*settings, number, overrides=()):
        profile = profile_of(runs)
        ends = ends_of(read_space(settings))
        pipelines = [runs.load(DESCENT, [*overrides, *end], profile) for end in ends]
        search = Search(
            sampler="tpe", seed=1, number=number, settings=settings,
            stage="train", metric="val/loss", mode="min",
            path=str(pipelines[0].path), text=DESCENT, overrides=overrides, profile_name="local",
            from_stage=None, until_stage=None, force=[],
            documents=[one.document for one in pipelines],
        )  # fmt: skip
        made = SweepDirectory.create(runs.workspace, "descents")
        own = pipelines[0].profiles
        LaunchRecord.of_this_process(runs.workspace.root, profile, stage_profiles=own).write(made)
        made.write((), max_parallel=1, argv=["redco-flow"], search=asdict(search))
        return made

    return sweep


def end(run, state, *losses):
    """Write a run's end, and what its training has logged."""
    attempt = run.attempt("train", 1)
    attempt.metrics_path.parent.mkdir(parents=True)
    records = [{"step": step, "metrics": {"loss": loss}} for step, loss in enumerate(losses, 1)]
    attempt.metrics_path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    run.write_state(run.read_state() | {"state": state})


def test_each_point_is_a_run_like_one_of_a_plain_sweep_and_follows_from_the_ends_before(
    sweep, runs
):
    settings = ["loss=loguniform(0.1, 10)"]
    made, said = sweep(*settings, number=5), []
    ends = [("completed", 3.0, 1.5), ("stopped_early", 9.0), ("failed", 1.0), ("completed",)]

    ended = []
    for state, *losses in ends:
        ended.append(PointMaker(made, said.append).make())  # as a resumed sweep's process
        end(ended[-1], state, *losses)
    ended[0].attempt("train", 1).metrics_path.unlink()  # its score is in points.jsonl
    ended[2].state_path.write_text("{")
    last = PointMaker(made, said.append)

    assert last.is_open
    last.make()
    assert not last.is_open
    points = [one.overrides for one in made.points]
    told = [("complete", 1.5, 2), ("pruned", 9.0, 1), ("fail",), ("fail",)]
    trials = [Trial(point, *one) for point, one in zip(points, told, strict=False)]
    for number, point in enumerate(points):
        assert list(suggest(read_space(settings), trials[:number], seed=1, mode="min")) == point
    assert f"{ended[3].id} counts as failed: it has no val/loss" in said
    plain = runs.load(DESCENT, points[1], profile_of(runs))
    assert read_yaml(ended[1].resolved_path.read_text(), "").values == plain.document
    assert plain.stages["train"].config.steps == 2
    assert ended[1].record["overrides"] == points[1]


def test_a_point_that_was_being_written_when_its_process_was_killed_is_made_again(sweep, runs):
    made = sweep("loss=uniform(1, 2)", number=1)
    half = runs.workspace.runs / "descents-half"
    half.mkdir()
    (runs.workspace.runs / ".descents-half.removed" / "logs").mkdir(parents=True)
    asked = SampledPoint(0, half.name, ["loss=1.5"], "asked")
    made.add_sampled_point(asked)

    assert (made.points, made.num_open) == ([], 1)
    run = PointMaker(made, print).make()

    assert [(one.run, one.overrides) for one in made.points] == [(half.name, ["loss=1.5"])]
    assert run.path == half
    assert run.read_state()["state"] == "pending"
    assert [path.name for path in runs.workspace.runs.iterdir()] == [half.name]


def test_a_run_that_was_written_when_its_process_was_killed_stays(sweep):
    made = sweep("loss=uniform(1, 2)", number=1)
    run = PointMaker(made, print).make()
    end(run, "completed", 1.0)
    made.add_sampled_point(replace(made.read_sampled_points()[0], state="asked"))

    assert PointMaker(made, print).make() == run

    assert run.read_state()["state"] == "completed"
    assert made.num_open == 0


def test_repeated_points_become_no_runs(sweep):
    made = sweep("loss=1.0,2.0", number=8)
    maker = PointMaker(made, print)

    found = [maker.make() for _ in range(8)]

    assert not maker.is_open
    assert sum(run is not None for run in found) == made.num_points == 2
    states = sorted(one.state for one in made.read_sampled_points())
    assert states == ["made", "made", *["repeated"] * 6]


@pytest.mark.parametrize(
    ("override", "said"),
    [("loss=-1.0", "greater than 0"), ("train.resources.num_hosts=2", "runs in one process")],
)
def test_a_point_whose_settings_cannot_be_a_run_is_refused(sweep, override, said):
    made = sweep("loss=1.0,2.0", number=1)
    made.add_sampled_point(SampledPoint(0, "descents-a", [override], "asked"))

    assert PointMaker(made, print).make() is None

    (point,) = made.read_sampled_points()
    assert point.state == "refused"
    assert said in point.message
    assert made.num_open == 0


def test_a_point_waits_where_what_it_names_is_missing_for_a_while(sweep, monkeypatch):
    monkeypatch.setenv("OTHER", "there")
    made = sweep("folder=here,${env:OTHER}", number=8)
    maker = PointMaker(made, print)
    maker.make()
    monkeypatch.delenv("OTHER")

    while not made.problem:
        maker.make()
    assert "OTHER" in made.problem
    assert maker.is_open
    assert not maker.is_due  # it is tried again later
    assert made.read_sampled_points()[-1].state == "asked"
    monkeypatch.setenv("OTHER", "there")

    assert maker.make().id == made.points[-1].run
    assert not made.problem


def test_a_sweep_that_was_cancelled_before_its_last_point_has_ended(sweep):
    made = sweep("loss=uniform(1, 2)", number=2)
    end(PointMaker(made, print).make(), "completed", 1.0)
    assert state_left_by(made).is_crashed()

    cancel_sweep(made, "enough")

    assert state_left_by(made).is_cancelled()
    with pytest.raises(UsageError, match="has ended already"):
        cancel_sweep(made, "enough")


def test_a_stages_profile_stays_as_it_was_at_the_start(sweep, runs):
    (runs.folder / "cluster_profiles").mkdir()
    other = runs.folder / "cluster_profiles" / "other.yaml"
    other.write_text("executor: local\ngrace_seconds: 7\n")
    made = sweep("loss=uniform(1, 2)", number=1, overrides=["train.runs_on=other"])
    other.write_text("executor: local\ngrace_seconds: 8\n")

    run = PointMaker(made, print).make()

    assert LaunchRecord.read(run).stage_profiles["train"]["grace_seconds"] == 7


def test_no_further_point_is_made_where_the_pipeline_now_means_something_else(sweep, monkeypatch):
    made = sweep("loss=uniform(1, 2)", number=2)
    monkeypatch.setenv("DESCENTS", "elsewhere")

    maker = PointMaker(made, print)
    assert maker.make() is None

    assert "train.folder' was 'here' and is 'elsewhere'" in made.problem
    assert not maker.is_open
    assert made.num_open == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": "a.csv"}, "--points gives the points"),
        ({"ahead": True}, "--ahead submits points before others have ended"),
        ({"points_per_job": 2}, "--points-per-job submits points before others have ended"),
        ({"num_samples": 0}, "needs --num-samples N"),
        ({"metric": None}, "needs --metric METRIC"),
        ({"sweep": ["profile.grace_seconds=uniform(1,2)"]}, "is of a profile"),
        ({"sweep": ["train.runs_on=a,b"]}, "is of a profile"),
        ({"sampler": None}, "--metric is for --sampler tpe"),
    ],
)
def test_what_cannot_be_combined_with_a_sampler_is_refused(options, message):
    given = {
        "sampler": "tpe", "points": None, "ahead": False, "num_samples": 3, "sweep_seed": 0,
        "metric": "val/loss", "stop_early": None, "sweep": ["loss=uniform(1, 2)"],
        "points_per_job": None,
    }  # fmt: skip

    with pytest.raises(UsageError, match=message):
        choose_points(Namespace(**given | options))


def test_a_missing_optuna_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)  # as where it is not installed

    with pytest.raises(UsageError, match=r"redco-flow\[optuna\]"):
        require_optuna()
