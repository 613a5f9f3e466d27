"""When a job starts among the jobs that run and those that Slurm has planned."""

import random
from dataclasses import replace

import pytest

from redco_flow.launch.slurm.queue import Estimate
from redco_flow.launch.slurm.timeline import Job, Partition, earliest_start, expected_start

NODES = dict.fromkeys("abcd", (4.0, 2.0))
MAIN, LOW = Partition(2, 4, 16, NODES), Partition(1, 4, 16, NODES)
HOUR = 3600.0


def job(nodes, start, end, *, is_waiting=False):
    sizes = {"num_nodes": len(nodes), "num_cpus": 4 * len(nodes), "minutes": (end - start) / 60}
    return Job(["main"], is_waiting, [*nodes], start, end, 4.0, 0.0, **sizes)


def start_by_trying(jobs, share, num_nodes, length):
    """Try one start after the other, with the use of each node at each second of the job's time."""
    for start in range(60):
        free = 0
        for name, (cpus, gpus) in NODES.items():
            used = [
                [one for one in jobs if name in one.nodes and one.start <= second < one.end]
                for second in range(start, start + length)
            ]
            free += all(
                sum(one.cpus for one in present) + share[0] <= cpus
                and sum(one.gpus for one in present) + share[1] <= gpus
                for present in used
            )
        if free >= num_nodes:
            return start
    raise AssertionError


def test_a_job_starts_at_the_first_second_from_which_it_fits_for_its_whole_time():
    draw = random.Random(0)
    for _ in range(300):
        jobs = [
            replace(
                job(draw.sample("abcd", draw.randint(1, 4)), start, start + draw.randint(1, 15)),
                cpus=draw.randint(1, 4),
                gpus=draw.randint(0, 2),
            )
            for start in draw.sample(range(-5, 20), draw.randint(0, 8))
        ]
        share, num_nodes = (draw.randint(1, 4), draw.randint(0, 2)), draw.randint(1, 4)
        length = draw.randint(1, 12)

        start = earliest_start(NODES, jobs, share, num_nodes, length, 0)

        assert start == start_by_trying(jobs, share, num_nodes, length), jobs


# Two of four nodes are taken for an hour; then another job gets three nodes for half an hour.
RUNNING = job("ab", 0, HOUR)
WAITING = job("abc", HOUR, 1.5 * HOUR, is_waiting=True)
DELAY = 0.5 * HOUR * 3 / 4  # which `sbatch --test-only` adds for it
UNPLANNED = replace(WAITING, nodes=[])


@pytest.mark.parametrize(
    ("jobs", "num_nodes", "tested", "start", "source"),
    [
        ([RUNNING], 3, HOUR, HOUR, "sbatch --test-only"),
        ([RUNNING, WAITING], 1, DELAY, 0, "squeue: 1 ahead"),
        ([RUNNING, WAITING], 2, DELAY, 1.5 * HOUR, "squeue: 1 ahead"),
        # Slurm knows of a reservation that lasts for three hours.
        ([RUNNING, WAITING], 2, 3 * HOUR + DELAY, 3 * HOUR, "squeue: 1 ahead"),
        # Jobs of a partition of a lower PriorityTier do not come first.
        ([RUNNING, replace(WAITING, partitions=["low"])], 2, 0, 0, "sbatch --test-only"),
        (
            [RUNNING, UNPLANNED], 2, DELAY, DELAY,
            "sbatch --test-only or later: 1 of 1 ahead not planned",
        ),
        # It waits for another job.
        ([RUNNING, replace(UNPLANNED, is_in_turn=False)], 2, DELAY, 0, "squeue: 0 ahead"),
    ],
)  # fmt: skip
def test_planned_jobs_decide_and_the_test_where_it_knows_more(
    jobs, num_nodes, tested, start, source
):
    answer = Estimate(tested, 4 * num_nodes, num_nodes, "main")

    found = expected_start(answer, 2, 1.25 * HOUR, jobs, {"main": MAIN, "low": LOW}, 0)

    assert found == (start, source)
