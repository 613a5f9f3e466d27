"""Which jobs a sweep has, before there is one."""

import pytest
from orchestrate_runs import DIAMOND, TWO_STAGES

from redco_flow.errors import ConfigError, UsageError
from redco_flow.orchestrate.sweep.control import goes_ahead
from redco_flow.orchestrate.sweep.planned_jobs import (
    PlannedPoint,
    check_packs,
    planned_jobs,
    work_keys,
)
from redco_flow.spec.profile import profile_model


@pytest.fixture
def plan_points(runs):
    """Plan points of a pipeline."""

    def plan_points(text, *points, executor="slurm"):
        profile = profile_model()(executor=executor, workspace=str(runs.workspace.root))
        return [
            PlannedPoint((), runs.load(text, one), profile, runs.plan(text, one)) for one in points
        ]

    return plan_points


@pytest.fixture
def jobs(runs, plan_points):
    """What would be submitted for points of a pipeline, as one line a stage."""

    def jobs(text, *points, points_per_job=None):
        planned = planned_jobs(plan_points(text, *points), runs.workspace, points_per_job)
        return [one.describe() for one in planned]

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


def test_what_points_of_several_packs_share_is_a_job_of_its_own(jobs):
    shared, own = rates(1.0, 2.0, 3.0), ["preprocess.count=4"]

    assert jobs(TWO_STAGES, *shared, points_per_job=2) == [
        "preprocess: 1 job, for 3 points",
        "train: 2 jobs, for 3 points, after preprocess",
    ]
    assert jobs(TWO_STAGES, *shared, points_per_job=3) == ["preprocess, train: 1 job, for 3 points"]
    assert jobs(TWO_STAGES, *shared[:2], own, points_per_job=2) == [
        "preprocess, train: 2 jobs, for 3 points"
    ]


def test_points_that_one_job_cannot_run_are_refused_with_each_reason(plan_points):
    points = [*rates(1.0, 2.0), ["train.group=small"], ["train.resources.memory_gib=2"]]
    stages = [["preprocess", "train"]] * 4

    with pytest.raises(ConfigError) as error:
        check_packs(plan_points(TWO_STAGES, *points), stages, 4, {})
    assert [problem.message for problem in error.value.problems] == [
        "--points-per-job: 'stages.train.group' puts it into a job with other stages of its "
        "point: leave one of the two out.",
        "--points-per-job: 'stages.preprocess.resources.memory_gib' is not set, but it is of other "
        "stages of the job: leave one of the two out.",
    ]
    with pytest.raises(UsageError, match="executor 'local' of profile 'local' has no such jobs"):
        check_packs(plan_points(TWO_STAGES, *points, executor="local"), stages, 4, {})


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
