"""Which of several ranks a job's ending is blamed on."""

import pytest

from redco_flow.launch.rank_endings import RankEnding, judge_group, read_endings
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory


def ending(rank, cause, at=0, *, lost=False, message="", restart=0):
    return RankEnding(
        {
            "rank": rank,
            "cause": cause,
            "message": message or f"message of {rank}",
            "ended_at": f"2030-01-01T00:00:{at:02d}.000+00:00",
            "host": f"n{rank}",
            "restart": restart,
            "exit_code": 1,
            "signal": None,
            "lost_another_rank": lost,
            "peak_memory_bytes": rank,
        }
    )


def test_a_job_is_completed_when_all_its_ranks_are():
    record = judge_group([ending(0, "completed"), ending(1, "completed")], 2)

    assert (record["cause"], record["peak_memory_bytes"]) == ("completed", 1)


def test_the_first_rank_that_failed_is_the_culprit():
    endings = [ending(0, "failed", 3), ending(1, "terminated", 2), ending(2, "out_of_memory", 1)]

    record = judge_group(endings, 3)

    assert (record["cause"], record["rank"]) == ("out_of_memory", 2)
    assert record["message"] == "rank 2 of 3 on n2: message of 2"


def test_a_rank_that_only_lost_another_is_not_the_culprit_though_its_clock_is_ahead():
    endings = [ending(0, "failed", 1, lost=True), ending(1, "failed", 5)]

    assert judge_group(endings, 2)["rank"] == 1


def test_a_rank_that_fell_silent_is_named_by_those_who_noticed():
    endings = [ending(0, "failed", 1, lost=True), ending(1, "terminated", 2)]

    record = judge_group(endings, 2)

    assert (record["cause"], record["rank"]) == ("stalled", 1)
    assert record["message"].startswith("rank 1 of 2 no longer answered the others")


@pytest.mark.parametrize("others", [[], [ending(0, "failed", 1, lost=True)]])
def test_ranks_that_left_no_word_mean_that_their_host_went_down(others):
    record = judge_group(others, 3)

    assert record["cause"] == "node_failure"
    assert "left no word" in record["message"]


def test_a_group_that_was_asked_to_stop_is_not_called_failed():
    endings = [ending(0, "completed"), ending(1, "terminated")]

    assert judge_group(endings, 2)["cause"] == "terminated"


def test_endings_of_an_earlier_start_of_the_job_do_not_count(tmp_path):
    attempt = AttemptDirectory(tmp_path)
    for rank, restart in ((0, 1), (1, 0)):
        attempt.rank_directory(rank).mkdir(parents=True)
        write_json(
            attempt.rank_exit_path(rank), dict(ending(rank, "failed", restart=restart).record)
        )

    assert [one.rank for one in read_endings(attempt, 1)] == [0]
