"""Who has a host: by processes and by the host's own time since boot, never by the time of day."""

import os
import subprocess

import pytest

from redco_flow.launch.hosts import lease
from redco_flow.records import read_json, write_json
from redco_flow.tracking.process_identity import ProcessIdentity


def owner(name):
    return {"attempt": name, "run": f"run-{name}", "stage": "train", "launcher": "me@laptop"}


@pytest.fixture
def record(tmp_path):
    """The lease's file, once it is taken."""
    return lambda: next(tmp_path.glob("leases/*.json"))


def test_a_leased_host_is_refused_to_others_with_the_holders_name(tmp_path):
    assert lease.acquire(tmp_path, owner("a")) == ""
    assert lease.acquire(tmp_path, owner("a")) == ""

    assert lease.acquire(tmp_path, owner("b")) == "run run-a (stage train) of me@laptop"
    assert lease.holder(tmp_path) == "run run-a (stage train) of me@laptop"


def test_a_host_that_is_given_back_is_free_and_only_its_owner_can_give_it_back(tmp_path):
    lease.acquire(tmp_path, owner("a"))

    lease.release(tmp_path, owner("b"))
    assert lease.acquire(tmp_path, owner("b")) != ""
    lease.release(tmp_path, owner("a"))

    assert lease.acquire(tmp_path, owner("b")) == ""


def test_a_lease_lives_as_long_as_one_of_its_runners_and_not_longer(tmp_path):
    runner = subprocess.Popen(["sleep", "60"])
    identity = ProcessIdentity.of(runner.pid).to_json()
    lease.acquire(tmp_path, owner("a"))
    lease.hand_to_runners(tmp_path, owner("a"), [identity])
    assert lease.acquire(tmp_path, owner("b")) != ""

    runner.kill()
    runner.wait()

    assert lease.acquire(tmp_path, owner("b")) == ""


def test_a_runner_whose_process_id_now_belongs_to_another_holds_nothing(tmp_path):
    """Fault 19: the reuse of the process id is seen by the start time; the lease is taken over."""
    identity = ProcessIdentity.of(os.getpid()).to_json()
    lease.acquire(tmp_path, owner("a"))
    reused = identity | {"start_time": identity["start_time"] - 1}
    lease.hand_to_runners(tmp_path, owner("a"), [reused])

    assert lease.acquire(tmp_path, owner("b")) == ""


@pytest.mark.parametrize("change", [{"seconds_since_boot": -61}, {"boot_id": "another boot"}])
def test_a_lease_without_runners_ends_a_minute_after_its_renewal_and_at_a_reboot(
    tmp_path, record, change
):
    """Fault 35: only this host's time since boot counts; there is no other time in the lease."""
    lease.acquire(tmp_path, owner("a"))
    taken = read_json(record())
    for key, value in change.items():
        old = taken["renewed"][key]
        taken["renewed"][key] = old + value if isinstance(value, int) else value
    write_json(record(), taken)

    assert lease.acquire(tmp_path, owner("b")) == ""


def test_a_damaged_lease_holds_nothing(tmp_path, record):
    lease.acquire(tmp_path, owner("a"))
    record().write_text("{")

    assert lease.acquire(tmp_path, owner("b")) == ""
