"""How a job ended: which rank is to blame, and what counts more than its record."""

import pytest

from redco_flow.launch.endings import ClusterWord, RankEnding, judge, read_endings
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause


def ending(rank, cause, at=0, *, lost=False, message="", restart=0):
    return RankEnding(
        rank=rank,
        cause=Cause(cause),
        message=message or f"message of {rank}",
        ended_at=f"2030-01-01T00:00:{at:02d}.000+00:00",
        host=f"n{rank}",
        restart=restart,
        exit_code=1,
        lost_another_rank=lost,
        peak_memory_bytes=rank,
    )


def judged(endings, num_processes, *, has_result=False, was_cancelled=False, **word):
    return judge(
        endings,
        num_processes,
        ClusterWord(**word),
        has_result=has_result,
        was_cancelled=was_cancelled,
    )


def test_a_job_is_completed_when_all_its_ranks_are():
    record = judged([ending(0, "completed"), ending(1, "completed")], 2, has_result=True)

    assert (record.cause, record.peak_memory_bytes) == ("completed", 1)


def test_the_first_rank_that_failed_is_the_culprit():
    endings = [ending(0, "failed", 3), ending(1, "terminated", 2), ending(2, "out_of_memory", 1)]

    record = judged(endings, 3)

    assert (record.cause, record.rank) == ("out_of_memory", 2)
    assert record.message == "rank 2 of 3 on n2: message of 2"


def test_a_rank_that_only_lost_another_is_not_the_culprit_though_its_clock_is_ahead():
    endings = [ending(0, "failed", 1, lost=True), ending(1, "failed", 5)]

    assert judged(endings, 2).rank == 1


def test_a_rank_that_fell_silent_is_named_by_those_who_noticed():
    endings = [ending(0, "failed", 1, lost=True), ending(1, "terminated", 2)]

    record = judged(endings, 2)

    assert (record.cause, record.rank) == ("stalled", 1)
    assert record.message.startswith("rank 1 of 2 no longer answered the others")


@pytest.mark.parametrize(
    ("others", "silent"),
    [
        ([], "ranks 0, 1, 2 of 3"),
        ([ending(0, "failed", 1, lost=True)], "ranks 1, 2 of 3"),
        ([ending(1, "failed", 1, lost=True), ending(2, "failed", 1, lost=True)], "rank 0 of 3"),
    ],
)
def test_ranks_that_left_no_word_mean_that_their_host_went_down(others, silent):
    record = judged(others, 3)

    assert record.cause == "node_failure"
    assert record.message.startswith(f"{silent} left no word")


def test_a_job_whose_ranks_the_cluster_stopped_was_preempted():
    endings = [ending(0, "completed"), ending(1, "terminated")]

    assert judged(endings, 2).cause == "preempted"


def test_endings_of_an_earlier_start_of_the_job_do_not_count(tmp_path):
    attempt = AttemptDirectory(tmp_path)
    for rank, restart in ((0, 1), (1, 0)):
        attempt.rank_directory(rank).mkdir(parents=True)
        record = ending(rank, "failed", restart=restart)
        write_json(attempt.rank_exit_path(rank), record.to_json())

    assert [one.rank for one in read_endings(attempt, 1)] == [0]


DECIDED = (Cause.TIMEOUT, "its time was over")
STOPPED = (Cause.CANCELLED, "a user stopped it")
SILENT = (Cause.NODE_FAILURE, "the host was restarted")
UNSTARTED = (Cause.FAILED, "no rank started")
WORD = {"decided": DECIDED, "stopped": STOPPED, "silent": SILENT, "unstarted": UNSTARTED}


@pytest.mark.parametrize("endings", [[], [ending(0, "failed")], [ending(0, "terminated")]])
def test_a_published_result_counts_more_than_everything_else(endings):
    record = judged(endings, 1, has_result=True, was_cancelled=True, **WORD)

    assert (record.cause, record.exit_code) == ("completed", 0)


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        ([], "cancelled"),
        ([ending(0, "terminated"), ending(1, "terminated")], "cancelled"),
        ([ending(0, "failed", lost=True)], "cancelled"),  # the other host was killed at once
        ([ending(0, "lost")], "cancelled"),
        ([ending(0, "out_of_memory"), ending(1, "terminated")], "out_of_memory"),
        ([ending(0, "timeout"), ending(1, "terminated")], "cancelled"),
    ],
)
def test_a_cancellation_explains_every_end_but_a_ranks_own_failure(endings, cause):
    assert judged(endings, 2, was_cancelled=True).cause == cause


def test_what_the_cluster_decided_counts_more_than_what_ranks_wrote():
    record = judged([ending(0, "failed")], 1, **WORD)

    assert (record.cause, record.message) == DECIDED


@pytest.mark.parametrize(
    ("endings", "said"),
    [
        ([], UNSTARTED),
        ([ending(0, "terminated"), ending(1, "completed")], STOPPED),
        ([ending(0, "completed")], SILENT),
        ([ending(0, "failed", lost=True)], SILENT),
        ([ending(0, "failed")], (Cause.FAILED, "rank 0 of 2 on n0: message of 0")),
    ],
)
def test_the_cluster_explains_only_what_no_rank_explains(endings, said):
    record = judged(endings, 2, **(WORD | {"decided": None}))

    assert (record.cause, record.message) == said


def test_a_result_that_is_gone_though_every_rank_completed_is_the_hosts_failure():
    record = judged([ending(0, "completed")], 1)

    assert (record.cause, record.message) == (
        "node_failure",
        "n0 lost the result before it was copied here.",
    )


def test_a_rank_that_a_supervisor_could_not_judge_is_written_and_read_as_it_was(tmp_path):
    attempt = AttemptDirectory(tmp_path)
    attempt.rank_directory(0).mkdir(parents=True)
    written = ending(0, "lost", lost=True)

    write_json(attempt.rank_exit_path(0), written.to_json())

    assert read_endings(attempt, 0) == [written]
