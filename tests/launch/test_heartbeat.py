"""A rank that has written lately lives, whatever a cluster's empty answer suggests."""

import os
import time

import pytest

from redco_flow.launch.rank import HeartbeatWatch, beat, heartbeat_path
from redco_flow.tracking.attempt import AttemptDirectory


@pytest.fixture
def attempt(tmp_path):
    attempt = AttemptDirectory(tmp_path)
    attempt.rank_directory(1).mkdir(parents=True)
    return attempt


def test_a_rank_lives_for_two_intervals_after_its_last_heartbeat_was_seen(attempt):
    """Fault 53: ages are those of this machine's clock, so a node's wrong clock does not matter."""
    now = [0.0]
    watch = HeartbeatWatch(attempt, clock=lambda: now[0])
    path = heartbeat_path(attempt, 1)
    assert not watch.is_alive()  # no rank has begun

    beat(path)
    os.utime(path, (time.time() - 300, time.time() - 300))
    lives = [watch.is_alive()]
    now[0] = 59.0
    path.write_text("a later time")
    lives.append(watch.is_alive())
    now[0] = 118.0
    lives.append(watch.is_alive())
    now[0] = 119.0

    assert lives == [True] * 3
    assert not watch.is_alive()


def test_a_heartbeat_of_yesterday_is_not_waited_for(attempt):
    beat(path := heartbeat_path(attempt, 1))
    os.utime(path, (time.time() - 86400, time.time() - 86400))

    assert not HeartbeatWatch(attempt).is_alive()
