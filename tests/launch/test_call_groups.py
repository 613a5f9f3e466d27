"""Which calls are one array, and what an array of calls is submitted as."""

from dataclasses import replace
from pathlib import Path

import pytest

from redco_flow.errors import UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.call_groups import CallGroup, QueuedCall, group_calls
from redco_flow.launch.slurm.script import Submission, render
from redco_flow.spec.slurm_section import SlurmSection

SMALL, LARGE = JobResources(), JobResources(cpus_per_host=8)
SUBMISSION = Submission(
    attempt=Path("/data/ws/sweeps/tiny-sweep-abcd/arrays/train.1"),
    title="tiny-sweep-abcd train",
    directory=Path("/home/me"),
    resources=SMALL,
    settings=SlurmSection(python="python", max_array_tasks=7),
    stall_seconds=1800,
    grace_seconds=30,
    upstream=("17",),
    aligned=("18",),
    tasks=(0, 1, 2, 3, 5, 8, 9),
    at_once=2,
)


def calls(*upstream, resources=SMALL):
    """A call for each list of upstream jobs, numbered from 0."""
    return [QueuedCall(number, resources, tuple(ids)) for number, ids in enumerate(upstream)]


def test_calls_that_ask_for_the_same_behind_one_job_are_one_array():
    (group,) = group_calls(calls(["17"], ["17"], ["17"]))

    assert group == CallGroup((0, 1, 2), (0, 1, 2), SMALL, upstream=("17",), aligned=())
    assert group.is_array


def test_calls_behind_tasks_of_their_own_numbers_wait_for_those_alone():
    (group,) = group_calls(calls(["18_0", "17"], ["18_1", "17"]))

    assert (group.upstream, group.aligned) == (("17",), ("18",))


def test_calls_that_ask_for_more_or_wait_for_something_else_are_not_in_the_array():
    given = [
        *calls(["17"], ["17"]),
        QueuedCall(2, LARGE, ("17",)),
        QueuedCall(3, SMALL, ("19",)),
        QueuedCall(4, SMALL, ("18_0",)),
        QueuedCall(5, LARGE, ("17",)),
    ]

    groups = group_calls(given)

    assert [group.numbers for group in groups] == [(0, 1), (2, 5), (3,), (4,)]


def test_one_call_alone_is_an_ordinary_job_behind_the_very_tasks_that_it_names():
    (group,) = group_calls([QueuedCall(3, SMALL, ("18_3",))])

    assert not group.is_array
    assert (group.upstream, group.aligned) == (("18_3",), ())


def test_a_call_that_is_cut_into_shards_is_an_array_of_its_own():
    groups = group_calls(calls([], [], resources=JobResources(shards=(0, 1))))

    assert [group.numbers for group in groups] == [(0,), (1,)]


def test_what_is_too_large_for_one_array_is_split_and_each_part_waits_for_its_own_tasks():
    first = group_calls(calls(*[["17"]] * 7), max_array_size=3)
    ids = {0: "20", 1: "21", 2: "22"}
    behind = [
        [f"{ids[part]}_{task}"] if len(group.numbers) > 1 else [ids[part]]
        for part, group in enumerate(first)
        for task in group.tasks
    ]

    second = group_calls(calls(*behind), max_array_size=3)

    assert [group.numbers for group in first] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [group.tasks for group in first] == [(0, 1, 2), (0, 1, 2), (0,)]
    assert [group.aligned for group in second] == [("20",), ("21",), ()]
    assert second[2].upstream == ("22",)


def test_where_a_cluster_has_no_arrays_every_call_is_a_job():
    groups = group_calls(calls(["17"], ["17"]), max_array_size=0)

    assert [group.is_array for group in groups] == [False, False]


def test_each_task_of_an_array_of_calls_works_in_the_attempt_that_its_link_names():
    text = render(SUBMISSION)

    assert "#SBATCH --array=0-3,5,8,9%2\n" in text
    assert "#SBATCH --dependency=afterok:17,aftercorr:18\n" in text
    assert "#SBATCH --output=tasks/%a/logs/slurm.log\n" in text
    link = 'REDCO_FLOW_ATTEMPT="$(readlink tasks/"$SLURM_ARRAY_TASK_ID")" || exit\n'
    own_id = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" > "$REDCO_FLOW_ATTEMPT"/slurm.jobid\n'
    assert f"{link}export REDCO_FLOW_ATTEMPT\n" in text
    assert own_id in text
    assert text.count('"$REDCO_FLOW_ATTEMPT" ') == 3  # the rank, and twice how it ended


def test_an_operators_dependency_may_not_take_the_place_of_an_arrays_own():
    settings = SlurmSection(options=["--dependency=singleton"])

    with pytest.raises(UsageError, match=r"slurm.options has '--dep"):
        render(replace(SUBMISSION, settings=settings, upstream=()))
