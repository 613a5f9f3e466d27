"""Which jobs a sweep has, before there is one."""

import pytest
from orchestrate_runs import DIAMOND, TWO_STAGES

from redco_flow.errors import UsageError
from redco_flow.orchestrate.sweep.control import PlannedPoint, goes_ahead
from redco_flow.orchestrate.sweep.process import planned_jobs, work_keys
from redco_flow.spec.profile import profile_model


@pytest.fixture
def jobs(runs):
    """What would be submitted for points of a pipeline, as one line a stage."""

    def jobs(text, *points):
        profile = profile_model()(executor="slurm", workspace=str(runs.workspace.root))
        planned = [
            PlannedPoint((), runs.load(text, one), profile, runs.plan(text, one)) for one in points
        ]
        return [one.describe() for one in planned_jobs(planned, runs.workspace)]

    return jobs


def rates(*values):
    return [[f"train.learning_rate={value}"] for value in values]


def test_what_points_share_is_one_job_and_the_rest_wait_for_it(jobs):
    assert jobs(TWO_STAGES, *rates(1.0, 2.0, 3.0)) == [
        "preprocess: 1 job, for 3 points",
        "train: 3 jobs, after preprocess",
    ]


def test_points_that_share_nothing_have_a_job_for_each_stage(jobs):
    assert jobs(TWO_STAGES, ["preprocess.count=4"], ["preprocess.count=5"]) == [
        "preprocess: 2 jobs",
        "train: 2 jobs, after preprocess",
    ]


def test_points_that_differ_in_nothing_that_decides_a_result_share_every_job(jobs):
    cpus = [["train.resources.cpus_per_host=1"], ["train.resources.cpus_per_host=2"]]

    assert jobs(TWO_STAGES, *cpus) == [
        "preprocess: 1 job, for 2 points",
        "train: 1 job, for 2 points, after preprocess",
    ]


def test_each_point_has_its_own_job_for_a_group(jobs):
    grouped = TWO_STAGES.replace("}", ", group: small}")

    assert jobs(grouped, *rates(1.0, 2.0, 3.0)) == ["preprocess, train: 3 jobs"]


@pytest.mark.slow
def test_what_is_published_is_not_submitted(jobs, runs):
    runs.complete(TWO_STAGES, ["train.learning_rate=1.0"])
    grouped = TWO_STAGES.replace("}", ", group: small}")

    assert jobs(TWO_STAGES, *rates(1.0, 2.0, 3.0)) == ["train: 2 jobs"]
    assert jobs(grouped, *rates(1.0, 2.0), ["preprocess.count=4"]) == [
        "preprocess, train: 1 job",
        "train: 1 job",
    ]


def test_a_stage_has_the_key_of_another_points_only_where_all_that_it_takes_from_has(runs):
    plain, other_small, other_root = (
        work_keys(runs.load(DIAMOND, overrides), runs.workspace)
        for overrides in ([], ["train-small.learning_rate=5.0"], ["preprocess.count=9"])
    )

    same = {name for name in plain if plain[name] == other_small[name]}
    assert same == {"preprocess", "train-large"}
    assert set(plain.values()).isdisjoint(other_root.values())


def test_points_do_not_wait_in_the_queue_where_the_operator_has_a_dependency_of_his_own(runs):
    text = "{name: one, stages: {preprocess: {kind: orchestrate_kinds.numbers}}}"
    given = {"executor": "slurm", "workspace": str(runs.workspace.root)}
    plain = profile_model()(**given)
    own = profile_model()(**given, slurm={"options": ["--dependency=singleton"]})
    points = {
        profile: [PlannedPoint((), runs.load(text), settings, runs.plan(text))]
        for profile, settings in (("plain", plain), ("own", own))
    }

    assert goes_ahead(points["plain"], runs.workspace, asked=False)
    assert not goes_ahead(points["own"], runs.workspace, asked=False)
    with pytest.raises(UsageError, match=r"slurm.options has '--dep"):
        goes_ahead(points["own"], runs.workspace, asked=True)
