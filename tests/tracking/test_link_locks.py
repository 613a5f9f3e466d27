"""Locks without flock: by links, with heartbeats and fencing numbers, on faulty file systems."""

import random
import signal
import subprocess
import sys
import time

import pytest

from redco_flow.tracking.file_lock import LockRequest
from redco_flow.tracking.lock_mechanism import LINKS, establish, mechanism_of
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.workspace import Workspace

STALE_SECONDS = 2.0

# Each holder publishes the ledger's next entry, which it determines when it gets the lock.
PUBLISH = """
import os, random, sys, time
from pathlib import Path
from redco_flow.records import append_json_line, write_new_json
from redco_flow.tracking.file_lock import LockLost, LockRequest

folder = Path(sys.argv[1])
while True:
    request = LockRequest(folder / "lock")
    while (lock := request.try_once()) is None:
        time.sleep(0.02)
    entry = len(list(folder.glob("[0-9]*.json"))) + 1
    time.sleep(random.uniform(0, 0.05))
    try:
        lock.check()
        is_first = write_new_json(folder / f"{entry}.json", os.getpid())
        append_json_line(folder / "outcomes", [os.getpid(), is_first])
    except LockLost:
        append_json_line(folder / "outcomes", [os.getpid(), None])
    lock.release()
"""


def num_published(folder):
    return len(list(folder.glob("[0-9]*.json")))


def wait_for_progress(folder, seconds):
    """Wait until more is published than now."""
    before, deadline = num_published(folder), time.monotonic() + seconds
    while num_published(folder) == before:
        assert time.monotonic() < deadline, f"no process got the lock within {seconds} s"
        time.sleep(0.02)


def test_holders_that_are_killed_or_paused_never_publish_beside_the_next(tmp_path, monkeypatch):
    """Fault 56: random `kill -9`, and SIGSTOP for longer than the time to be stale."""
    monkeypatch.setenv("REDCO_FLOW_LOCK_STALE_SECONDS", str(STALE_SECONDS))
    establish(tmp_path, {"REDCO_FLOW_LOCKS": LINKS})

    def start():
        return subprocess.Popen([sys.executable, "-c", PUBLISH, tmp_path])

    chance, paused = random.Random(0), []
    processes = [start() for _ in range(4)]
    try:
        wait_for_progress(tmp_path, 400)
        for turn in range(6):
            time.sleep(chance.uniform(0, 0.2))
            victim = processes.pop(0)
            if turn % 2:
                victim.kill()
                victim.wait()
                processes.append(start())
            else:
                victim.send_signal(signal.SIGSTOP)
                paused.append(victim)
                wait_for_progress(tmp_path, 400)  # bounded: stale after 2 s, if it held the lock
                time.sleep(STALE_SECONDS)
                victim.send_signal(signal.SIGCONT)
                processes.append(victim)
            wait_for_progress(tmp_path, 400)
    finally:
        for process in processes:
            process.kill()
            process.wait()

    lines = [line.strip("[]\n").split(", ") for line in (tmp_path / "outcomes").open()]
    outcomes = [(int(pid), is_first) for pid, is_first in lines]
    beaten = [pid for pid, is_first in outcomes if is_first == "false"]
    # Only a process paused between its check and its publication: the link then refuses it.
    assert set(beaten) <= {one.pid for one in paused}
    assert len(beaten) <= len(paused)
    entries = sorted(int(path.stem) for path in tmp_path.glob("[0-9]*.json"))
    assert entries == list(range(1, len(entries) + 1))
    assert len(list((tmp_path / "lock.holders").iterdir())) <= 8  # earlier ones are removed


HOLD = """
import sys
from pathlib import Path
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.workspace import Workspace

workspace = Workspace.open(sys.argv[1])
with exclusive(workspace.root / "sequence"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(shim, start_python, tmp_path):
    """Start a process that opens the workspace and holds a lock in it, without a working flock."""
    without_flock = ("env", f"LD_PRELOAD={shim('node_locks')}", "FLOCK=absent")
    return lambda: start_python(HOLD, tmp_path, prefix=without_flock)


def test_a_workspace_without_flock_uses_links_on_every_node(hold, tmp_path):
    """Fault 56: ENOSYS at the first use is recorded, and holds where flock would work."""
    holder = hold()
    assert holder.stdout.readline() == "held\n", holder.stderr.read()

    path = tmp_path / "sequence"
    assert mechanism_of(path) == LINKS
    assert LockRequest(path).try_once() is None
    holder.kill()
    holder.wait()
    with exclusive(path):  # at once: its process is seen to have ended
        pass


def test_a_node_without_flock_never_mixes_locks_in_a_workspace_that_uses_flock(hold, tmp_path):
    Workspace.open(tmp_path)

    process = hold()

    assert process.stdout.readline() == ""
    assert "`redco-flow doctor -p PROFILE`" in process.stderr.read()
