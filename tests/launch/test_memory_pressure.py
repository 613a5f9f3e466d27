"""Which counter of the out-of-memory killer's is believed, and what its growth says."""

import os

import pytest

from redco_flow.launch.worker_exit import OomCounters, host_memory_bytes

PID = 42


@pytest.fixture
def system(tmp_path):
    """A file system's proc/ and sys/, with a host that has counted three kills."""
    (tmp_path / f"proc/{PID}").mkdir(parents=True)
    (tmp_path / f"proc/{PID}/cgroup").write_text("4:cpu,memory:/job\n0::/job\n")
    (tmp_path / "proc/vmstat").write_text("pgfault 7\noom_kill 3\nballoon_inflate 0\n")
    return tmp_path


def count(path, kills):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


@pytest.mark.parametrize("name", ["memory/job/memory.oom_control", "job/memory.events"])
def test_a_cgroup_that_counts_is_believed_and_the_host_is_not_asked(system, name):
    counter = system / "sys/fs/cgroup" / name
    count(counter, 1)
    counters = OomCounters.of_process(PID, system)
    (system / "proc/vmstat").write_text("oom_kill 9\n")
    assert counters.growth() == "none"

    count(counter, 2)

    assert counters.growth() == "cgroup"


def test_without_a_cgroup_the_growth_is_only_somewhere_on_the_host(system):
    counters = OomCounters.of_process(PID, system)
    assert counters.growth() == "none"

    (system / "proc/vmstat").write_text("oom_kill 4\n")

    assert counters.growth() == "host"


def test_a_cgroup_of_an_old_kernel_that_counts_no_kills_is_none(system):
    counter = system / "sys/fs/cgroup/memory/job/memory.oom_control"
    counter.parent.mkdir(parents=True)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\n")

    assert OomCounters.of_process(PID, system).scope == "host"


def test_a_cgroup_that_is_gone_in_the_end_proves_nothing(system):
    counter = system / "sys/fs/cgroup/job/memory.events"
    count(counter, 1)
    counters = OomCounters.of_process(PID, system)

    counter.unlink()

    assert counters.growth() == "none"


def test_a_process_that_has_gone_already_has_the_hosts_counter(tmp_path):
    assert OomCounters.of_process(PID, tmp_path).growth() == "none"


def test_the_hosts_memory_is_what_the_kernel_says():
    with open("/proc/meminfo") as file:
        total = next(line for line in file if line.startswith("MemTotal"))

    assert host_memory_bytes() == int(total.split()[1]) * 1024
    assert OomCounters.of_process(os.getpid()).counts
