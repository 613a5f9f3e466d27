"""How local jobs begin and end, by real processes."""

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_stages.calls import make_attempt, wait_until

from redco_flow.errors import StageFailed
from redco_flow.launch.executor import reattach
from redco_flow.launch.host_facts import count_local_gpus
from redco_flow.launch.local.executor import LocalExecutor
from redco_flow.launch.processes import kill_processes_of, processes_of
from redco_flow.tracking.process_identity import ProcessIdentity


def worker_of(job):
    """The process id of the job's worker, once it runs the stage."""
    supervisor = job.record()["supervisor"]["pid"]
    wait_until(lambda: (job.attempt.read_progress() or {}).get("phase"))
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
    return int(children.read_text().split()[0])


def is_running(pid):
    try:
        ProcessIdentity.of(pid)
    except ProcessLookupError:
        return False
    return True


def test_a_job_ends_with_its_result_and_leaves_nothing_half_written(submit):
    job = submit("write")

    job.wait()

    assert job.done()
    assert job.state == "COMPLETED"
    assert job.exception() is None
    assert job.result()["outputs"].keys() == {"dataset"}
    assert job.status().exit_code == 0
    assert {path.name for path in job.attempt.path.iterdir()} == {
        *("call.json", "job.json", "metrics.jsonl", "logs", "result.json", "exit.json"),
    }
    assert job.attempt.read_progress()["phase"]


def test_what_a_job_uses_is_sampled_while_it_runs(submit, folder):
    job = submit("use_a_fifth_of_a_core_until_go", config={"folder": str(folder)})
    samples = job.attempt.system_metrics_path

    samples.write_text('{"time": 1')  # a disk that was full for a moment took a part
    wait_until(lambda: samples.read_bytes().count(b"\n") == 2, 300)
    (folder / "go").touch()
    job.wait()

    assert job.state == "COMPLETED"
    assert list(processes_of(job.attempt.path)) == []
    sample = next(job.attempt.read_system_metrics())
    assert 0.02 < sample["cpu_cores"] < 1.0
    assert 300 << 20 < sample["memory_bytes"] < 1 << 30
    assert sample["disk_free_bytes"] > 0
    assert len(sample["gpus"]) == count_local_gpus({})


def test_a_killed_worker_is_reported_by_signal_and_cause(submit):
    """Fault 2, for the one rank there is."""
    job = submit("hang")
    worker = worker_of(job)

    os.kill(worker, signal.SIGKILL)
    wait_until(job.attempt.exit_path.exists)

    record = job.attempt.read_exit()
    assert (record.signal, record.exit_code, record.cause) == (9, None, "failed")
    assert "SIGKILL (signal 9)" in record.message
    assert "num_model_shards" in record.message
    with pytest.raises(StageFailed, match=r"rank0\.log"):
        job.result()


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_ended_with_its_stacks_and_one_that_reports_is_not(
    submit, tmp_path
):
    """Fault 7, a rank hangs: its stack traces are in the log, all ranks are ended, and the stage is
    retried.
    """
    slow = submit("wait_for_go", stall_seconds=10, config={"folder": str(tmp_path)})
    worker_of(slow)
    silent = submit("hang", number=2, stall_seconds=10, grace_seconds=0.5)
    worker = worker_of(silent)
    os.kill(worker, signal.SIGSTOP)

    silent.wait()

    assert silent.state == "STALLED"
    assert silent.status().cause == "stalled"
    assert "stall_timeout_minutes" in silent.status().message
    assert "act.py" in silent.stdout()
    assert "in hang" in silent.stdout()
    assert not is_running(worker)
    assert not slow.done()  # for longer than the silent one had
    (tmp_path / "go").touch()
    slow.wait()
    assert slow.state == "COMPLETED"


def test_a_cancelled_worker_may_save_first(submit, tmp_path):
    job = submit("save_when_stopped", grace_seconds=20, config={"folder": str(tmp_path)})
    wait_until(lambda: (job.attempt.read_progress() or {}).get("phase") == "training")

    job.cancel()

    assert (tmp_path / "saved").exists()
    record = job.attempt.read_exit()
    assert (record.cause, record.exit_code) == ("cancelled", 75)
    assert job.attempt.read_error()["type"] == "Stopped"


def test_what_a_finished_worker_leaves_running_is_killed(submit, tmp_path):
    job = submit("leave_a_child_behind", config={"folder": str(tmp_path)})

    job.wait()

    (child,) = tmp_path.glob("*.pid")
    assert job.state == "COMPLETED"
    assert not is_running(int(child.stem))


def test_a_left_over_temporary_result_is_cleaned_and_the_result_returned(workspace, submit):
    """Fault 13: the partial records are removed; the result is returned."""
    attempt = make_attempt(workspace)
    (attempt.path / ".result.json.abc.tmp").write_text('{"outputs"')
    request = attempt.path / ".cancel.json.abc.tmp"  # a command is about to rename it
    request.touch()

    job = LocalExecutor(workspace).submit_call(attempt)

    assert job.result()["outputs"].keys() == {"dataset"}
    assert list(attempt.path.glob(".*")) == [request]


SUBMIT = """
import sys, time
kinds, workspace, action, folder = sys.argv[1:]
sys.path.append(kinds)
from tiny_stages.calls import make_attempt
from redco_flow.launch.local.executor import LocalExecutor
attempt = make_attempt(workspace, action, config={"folder": folder})
LocalExecutor(workspace).submit_call(attempt)
print(attempt.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def submit_and_die(workspace, tmp_path):
    """Submit from a process that is killed with its whole group right after; reattach."""
    jobs = []

    def submit_and_die(action, *, first="", folder=tmp_path):
        kinds = str(Path(__file__).parent / "kinds")
        submitter = subprocess.Popen(
            [sys.executable, "-c", first + SUBMIT, kinds, str(workspace), action, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        attempt = submitter.stdout.readline().strip()
        os.killpg(submitter.pid, signal.SIGKILL)
        submitter.communicate()
        jobs.append(reattach(json.loads(Path(attempt, "job.json").read_text())))
        return jobs[-1]

    yield submit_and_die
    for job in jobs:
        kill_processes_of(job.attempt.path)


def test_a_reused_process_id_is_not_taken_for_the_job(submit):
    """Fault 19, for jobs."""
    job = submit("hang")
    record = job.record()
    worker_of(job)

    this = ProcessIdentity.current()
    for other in (replace(this, start_time=1), replace(this, pid_namespace="1")):
        stranger = reattach(record | {"supervisor": other.to_json()})

        assert stranger.status().state == "lost"
        stranger.cancel()  # signals no process: this very process carries the id
    job.cancel()


def test_the_worker_dies_with_its_supervisor_and_the_job_is_lost(submit, tmp_path):
    job = submit("ignore_termination", config={"folder": str(tmp_path)})
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    worker = worker_of(job)

    os.kill(job.record()["supervisor"]["pid"], signal.SIGKILL)
    wait_until(lambda: not is_running(worker))
    status = job.status()

    assert (status.state, status.cause) == ("lost", "lost")
    assert "supervisor" in status.message
    assert "redco-flow resume" in status.message
    assert isinstance(job.exception(), StageFailed)
    job.cancel()
    left = [int(path.stem) for path in tmp_path.glob("*.pid")]
    wait_until(lambda: not any(is_running(pid) for pid in left))


def test_odd_names_and_values_never_reach_a_shell(tmp_path):
    """Fault 30, shell words, quotes, line breaks in names and values: they are passed on as text
    and never interpreted; control characters are refused.
    """
    odd = tmp_path / "$(touch X) `touch X`; touch X 'a' \"b\"\nünï %j --stall-seconds"
    odd.mkdir()
    config = {"text": "$(touch X); touch X\n'\"", "folder": "--help"}
    attempt = make_attempt(odd, "write", run="--run", config=config)
    environment = {**os.environ, "ODD": "$(touch X)\n;touch X"}

    job = LocalExecutor(odd, environment=environment).submit_call(attempt)

    assert job.result()["outputs"].keys() == {"dataset"}
    assert list(Path.cwd().glob("X")) == list(tmp_path.rglob("X")) == []


def test_code_that_differs_from_the_plan_stops_the_job_before_anything_runs(submit, tmp_path):
    """Fault 34: the job is refused before anything runs."""
    code = {"tiny_stages.act": "0" * 64}
    job = submit("count_starts", config={"folder": str(tmp_path)}, ingredients={"code": code})

    job.wait()

    assert job.state == "FAILED"
    assert "CallRejected" in job.status().message
    assert "tiny_stages.act differ" in job.status().message
    assert not (tmp_path / "starts").exists()


def test_fifty_megabytes_without_a_line_end_pass_in_little_memory(submit, tmp_path):
    """Fault 37: no reader hangs, memory stays small, and what is shown is capped."""
    job = submit("print_fifty_megabytes", config={"folder": str(tmp_path)})
    wait_until(lambda: (tmp_path / "starts").exists())
    supervisor = job.record()["supervisor"]["pid"]

    status = Path(f"/proc/{supervisor}/status").read_text()
    (tmp_path / "go").touch()
    job.wait()

    (peak_kib,) = (int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    assert peak_kib < 64 * 1024
    assert job.state == "COMPLETED"
    assert job.paths.stdout.stat().st_size > 50 << 20
    assert len(job.stdout()) < 2 << 20
    assert "bytes before this are left out" in job.stdout()


def test_running_out_of_open_files_is_reported_with_what_to_do(submit):
    """Fault 39: the job's record names the cause and what to do."""
    job = submit("exhaust_files")

    job.wait()

    assert job.state == "FAILED"
    assert "Too many open files" in job.status().message
    assert "ulimit -n" in job.status().message
    assert "in exhaust_files" in job.attempt.read_error()["traceback"]


def test_a_job_runs_under_a_limit_of_64_open_files(submit_and_die, tmp_path):
    """Fault 39: the job's record names the cause and what to do."""
    (tmp_path / "go").touch()

    job = submit_and_die(
        "wait_for_go",
        first="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n",
    )
    job.wait()

    assert job.state == "COMPLETED"


def test_a_memory_error_is_reported_as_the_cause_with_what_to_do(submit):
    """Fault 39: the job's record names the cause and what to do."""
    job = submit("exhaust_memory")

    job.wait()

    assert job.state == "OUT_OF_MEMORY"
    assert "MemoryError" in job.status().message
    assert "num_model_shards" in job.status().message


@pytest.fixture
def small_cgroup():
    """A memory cgroup of 200 MB that this process's children can be put into."""
    root = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes"
    if not root.is_dir():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = root / f"redco-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup here: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_the_kernels_out_of_memory_killer_is_named_as_the_cause(submit_and_die, small_cgroup):
    """Fault 39: the job's record names the cause and what to do."""
    enter = f"import os; open('{small_cgroup}/cgroup.procs', 'w').write(str(os.getpid()))\n"

    job = submit_and_die("fill_memory", first=enter)
    job.wait()

    assert job.state == "OUT_OF_MEMORY", job.stdout()
    assert "out-of-memory killer" in job.status().message
    assert job.attempt.read_exit().signal == 9


@pytest.fixture
def small_disk(workspace):
    """The workspace on a disk of its own of 2 MB."""
    workspace.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(workspace)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small disk here")
    yield
    subprocess.run(["umount", "--lazy", str(workspace)], check=True)


def test_a_full_disk_is_named_in_the_records_although_it_is_full(small_disk, submit, workspace):
    """Fault 20: the error names the disk, earlier checkpoints are intact, and a background save
    fails before "done".
    """
    job = submit("fill_disk")

    job.wait()

    assert job.status().source == "exit.json"
    assert job.state == "FAILED"
    assert f"full: {job.attempt.path}" in job.status().message
    assert f"The file system at {workspace} is full: " in job.status().message
    assert "Free space" in job.status().message
    assert job.attempt.read_error()["type"] == "OSError"


def test_an_unwritable_log_neither_hangs_nor_fails_the_job(workspace, submit):
    """Fault 20, for logs."""
    attempt = make_attempt(workspace, "write")
    attempt.logs.mkdir()
    try:
        os.mknod(attempt.log_path(0), stat.S_IFCHR | 0o666, Path("/dev/full").stat().st_rdev)
    except PermissionError:
        pytest.skip("only root can make a device that is always full")

    job = LocalExecutor(workspace).submit_call(attempt)
    job.wait()

    assert job.state == "COMPLETED"
    assert "part of the log is lost: No space left" in job.status().message


def test_an_attempt_whose_supervisor_cannot_start_says_why(workspace):
    attempt = make_attempt(workspace)

    with pytest.raises(StageFailed, match="did not start"):
        LocalExecutor(workspace, stall_seconds="soon").submit_call(attempt)

    assert not attempt.job_path.exists()
