import json
import os
import signal
import subprocess
from dataclasses import replace

import pytest

from redco_flow.errors import DamagedRecord, UsageError
from redco_flow.tracking.file_lock import LockRequest
from redco_flow.tracking.lock_mechanism import record_links
from redco_flow.tracking.locks import acquire, find_holder
from redco_flow.tracking.process_identity import ProcessIdentity

HOLD = """
import sys
from redco_flow.tracking.locks import acquire
acquire(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_launcher_is_refused_with_the_holders_pid_host_and_time(start_python, tmp_path):
    """Fault 18: the second is refused, with the first one's process, host and time."""
    holder = start_python(HOLD, tmp_path)
    assert holder.stdout.readline() == "held\n", holder.stderr.read()
    record = json.loads((tmp_path / "lease.json").read_text())

    with pytest.raises(UsageError) as refusal:
        acquire(tmp_path)

    message = str(refusal.value)
    assert f"process {holder.pid} on {os.uname().nodename}" in message
    assert record["acquired_at"] in message
    assert "redco-flow attach" in message
    assert find_holder(tmp_path).holder.pid == holder.pid


def test_the_lease_of_a_killed_launcher_is_taken_over(start_python, tmp_path):
    """Fault 19: the reuse of the process id is seen by the start time; the lease is taken over."""
    holder = start_python(HOLD, tmp_path)
    assert holder.stdout.readline() == "held\n", holder.stderr.read()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert find_holder(tmp_path) is None

    with acquire(tmp_path) as lease:
        assert lease.taken_over_from.pid == holder.pid
        assert find_holder(tmp_path).holder == ProcessIdentity.current()


HOLD_IN_A_JOB = HOLD.replace("acquire(sys.argv[1])", "acquire(sys.argv[1], job='7')")


@pytest.mark.parametrize("uses_links", [False, True], ids=["flock", "links"])
def test_a_lease_of_a_job_is_judged_by_its_lock_and_taken_over_when_the_job_starts_again(
    start_python, tmp_path, uses_links
):
    """Fault 64: the process that drives the run may be on any node."""
    if uses_links:
        record_links(tmp_path, "this test")
    holder = start_python(HOLD_IN_A_JOB, tmp_path)
    assert holder.stdout.readline() == "held\n", holder.stderr.read()
    lease = json.loads((tmp_path / "lease.json").read_text())
    # As another host sees it: the process id says nothing there.
    (tmp_path / "lease.json").write_text(json.dumps(lease | {"host": "node-3", "pid": 1}))

    assert find_holder(tmp_path).job == "7"
    for job in ("", "8"):
        with pytest.raises(UsageError, match="driven by job 7, process 1 on node-3"):
            acquire(tmp_path, job=job)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    before = sorted(tmp_path.rglob("*"))
    assert find_holder(tmp_path) is None
    assert sorted(tmp_path.rglob("*")) == before  # link locks are only read
    other_reader = LockRequest(tmp_path / ".launcher.lock", shared=True).try_once()
    assert find_holder(tmp_path) is None
    other_reader.release()
    with acquire(tmp_path, job="7") as lease:
        assert lease.taken_over_from.host == "node-3"
        assert find_holder(tmp_path).holder == ProcessIdentity.current()
    assert find_holder(tmp_path) is None


REUSE_A_PID = """
import os, sys, time
from redco_flow.tracking.locks import acquire, find_holder

def fork(action):
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return pid

def ticks():
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

first = fork(lambda: acquire(sys.argv[1]))
os.waitpid(first, 0)
ended = ticks()
while ticks() <= ended + 1:
    pass
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(first - 1))
reader, writer = os.pipe()
second = fork(lambda: (os.close(writer), os.read(reader, 1)))  # lives until the pipe closes
assert second == first, (first, second)
os.kill(second, 0)
lease = acquire(sys.argv[1])
print(lease.taken_over_from.pid == second)
os.close(writer)
os.waitpid(second, 0)
"""


def test_a_lease_whose_holders_pid_was_reused_is_taken_over(start_python, tmp_path):
    """Fault 19, with a pid that the kernel really gave twice."""
    prefix = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc")
    try:
        works = subprocess.run([*prefix, "true"]).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("no pid namespaces here: no pid can be given twice on purpose")

    process = start_python(REUSE_A_PID, tmp_path, prefix=prefix)

    output, errors = process.communicate(timeout=400)
    assert output == "True\n", errors


def test_a_lease_with_another_start_time_than_its_pids_process_is_taken_over(tmp_path):
    """Fault 19: the reuse of the process id is seen by the start time; the lease is taken over."""
    me = ProcessIdentity.current()
    acquire(tmp_path, replace(me, start_time=me.start_time - 1))

    assert acquire(tmp_path).taken_over_from.start_time == me.start_time - 1


RACE = """
import sys
from redco_flow.errors import UsageError
from redco_flow.tracking.locks import acquire
print("ready", flush=True)
sys.stdin.readline()
try:
    acquire(sys.argv[1])
    print("held", flush=True)
except UsageError:
    print("refused", flush=True)
sys.stdin.read()
"""


def test_of_several_launchers_taking_over_one_dead_lease_one_gets_it(start_python, tmp_path):
    """Faults 18 and 19: the second is refused, with the first one's process, host and time; the
    reuse of the process id is seen by the start time; the lease is taken over.
    """
    me = ProcessIdentity.current()
    acquire(tmp_path, replace(me, start_time=1))
    racers = [start_python(RACE, tmp_path) for _ in range(4)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"

    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()

    answers = sorted(racer.stdout.readline().strip() for racer in racers)
    assert answers == ["held", "refused", "refused", "refused"]


def test_a_released_lease_is_free(tmp_path):
    acquire(tmp_path).release()

    assert find_holder(tmp_path) is None
    assert acquire(tmp_path).taken_over_from is None


def test_releasing_leaves_the_lease_of_the_process_that_took_over(tmp_path):
    me = ProcessIdentity.current()
    dead = acquire(tmp_path, replace(me, start_time=1))
    acquire(tmp_path)

    dead.release()

    assert find_holder(tmp_path).holder == me


def test_a_lease_on_another_host_is_refused_and_says_what_to_do_if_that_host_is_gone(tmp_path):
    elsewhere = ProcessIdentity(pid=7, start_time=1, boot_id="other", host="login-2")
    acquire(tmp_path, elsewhere)

    with pytest.raises(UsageError, match=r"process 7 on login-2 .* delete .*lease\.json"):
        acquire(tmp_path)


def test_a_damaged_lease_is_named_and_not_taken_over(tmp_path):
    (tmp_path / "lease.json").write_text("{")

    with pytest.raises(DamagedRecord, match=r"lease\.json: damaged record.*delete the file"):
        acquire(tmp_path)


def test_a_jump_of_the_clock_does_not_end_a_lease(start_python, tmp_path):
    """Fault 35: a lease's time of day says nothing about whether it stands."""
    holder = start_python(HOLD, tmp_path)
    assert holder.stdout.readline() == "held\n", holder.stderr.read()
    path = tmp_path / "lease.json"
    for wrong in ("1970-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "acquired_at": wrong}))

        with pytest.raises(UsageError, match=f"process {holder.pid}"):
            acquire(tmp_path)
