"""The moment before a rank's first record: it counts as running, and can be cancelled."""

import fcntl

import pytest

from redco_flow.launch.hosts import ranks
from redco_flow.launch.hosts.follow import Follower
from redco_flow.tracking.attempt import AttemptDirectory


@pytest.fixture
def attempt(tmp_path):
    return AttemptDirectory(tmp_path / "runs/r/stages/s/attempts/1")


def test_a_rank_that_holds_its_lock_counts_as_running_before_it_has_written_a_record(attempt):
    said = []
    follower = Follower(attempt, [0], {}, said.append, copies=False)
    attempt.rank_directory(0).mkdir(parents=True)
    with (attempt.rank_directory(0) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        assert not follower.look()

    assert follower.look()
    assert said == [{"ended": {0: "never started"}}]


def test_a_rank_is_not_started_once_the_host_has_been_asked_to_end_its_attempt(attempt):
    ranks.stop(attempt, at_once=False)

    started = ranks.start(ranks.RanksOrder(str(attempt.path), [{"rank": 0}], 60.0, 60.0))

    assert started == []
    assert not attempt.log_path(0).exists()
