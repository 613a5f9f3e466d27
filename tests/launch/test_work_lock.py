import os
import signal
import subprocess
import sys

import pytest

from redco_flow.launch.work_lock import acquire, describe_holder

HOLDER = {"run": "r-1", "stage": "s", "attempt": 1, "pid": 7, "host": "h", "since": "noon"}
HOLD = f"""
import os, sys
from pathlib import Path
from redco_flow.launch.work_lock import acquire
lock = acquire(Path(sys.argv[1]), {HOLDER!r}, print)
if sys.argv[2] == "fork" and os.fork() == 0:
    print("child", os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


class StillHeldError(Exception):
    pass


def give_up(holder):
    raise StillHeldError(holder)


@pytest.fixture
def hold(tmp_path):
    """A process that holds the lock `tmp_path/lock`, perhaps with a forked child."""
    processes = []

    def hold(mode="alone"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "lock"), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        for _ in range(2 if mode == "fork" else 1):
            process.stdout.readline()
        return process

    yield hold
    for process in processes:
        process.kill()
        process.stdin.close()
        process.wait()


def test_the_second_one_is_told_who_holds_the_lock(hold, tmp_path):
    hold()

    with pytest.raises(StillHeldError, match=r"run r-1 \(stage s, attempt 1\), process 7 on h"):
        acquire(tmp_path / "lock", HOLDER, give_up)


@pytest.mark.parametrize("mode", ["alone", "fork"])
def test_the_lock_is_free_as_soon_as_its_holder_is_killed_whatever_it_forked(hold, tmp_path, mode):
    holder = hold(mode)

    holder.send_signal(signal.SIGKILL)
    holder.wait()

    acquire(tmp_path / "lock", HOLDER, give_up).release()


def test_a_released_lock_closes_no_file_of_a_child_that_is_forked_later(tmp_path):
    lock = acquire(tmp_path / "lock", HOLDER, give_up)
    lock.release()

    with (tmp_path / "other").open("wb") as file:  # it gets the number that the lock's file had
        child = os.fork()
        if child == 0:
            os._exit(os.write(file.fileno(), b"x"))
        _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 1
    assert (tmp_path / "other").read_bytes() == b"x"


def test_waiting_ends_when_the_holder_lets_go(hold, tmp_path):
    holder = hold()
    told = []

    def let_go(words):
        told.append(words)
        holder.stdin.close()

    acquire(tmp_path / "lock", HOLDER | {"run": "r-2"}, let_go)

    assert told
    assert "r-2" in describe_holder(tmp_path / "lock")


def test_a_torn_holders_record_still_gives_an_answer(tmp_path):
    (tmp_path / "lock").write_text('{"run": "r')

    assert "another worker" in describe_holder(tmp_path / "lock")


def test_a_lock_that_cannot_be_written_names_its_path(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match=str(tmp_path / "file")):
        acquire(tmp_path / "file" / "lock", HOLDER, give_up)
