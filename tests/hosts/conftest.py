"""Two real hosts behind sshd for all tests of this folder; none of their jobs outlives its test."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
KINDS = HERE.parent / "launch" / "kinds"
RUNS = HERE.parent / "orchestrate" / "kinds"
CLUSTER = HERE.parent / "cluster"
sys.path += [str(HERE), str(KINDS), str(CLUSTER), str(RUNS)]  # jobs search where the submitter does

from job_processes import phase_of, processes_of  # noqa: E402
from ssh_hosts import (  # noqa: E402
    INSTALL,
    missing_programs,
    running_hosts,
    why_not_permitted,
)
from tiny_stages.calls import make_attempt, wait_until  # noqa: E402

from redco_flow.launch.call import JobResources  # noqa: E402
from redco_flow.launch.hosts.config import Config  # noqa: E402
from redco_flow.launch.hosts.executor import HostsExecutor  # noqa: E402
from redco_flow.tracking.attempt import AttemptDirectory  # noqa: E402

LAUNCH = """
import json, sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from redco_flow.launch.hosts.executor import HostsExecutor
from redco_flow.launch.hosts.config import Config
from redco_flow.tracking.attempt import AttemptDirectory
settings, variables = json.loads(sys.argv[1])
attempt = AttemptDirectory(Path(sys.argv[2]))
executor = HostsExecutor(attempt.path, Config.from_json(settings), variables=variables)
executor.submit_call(attempt).wait()
"""
ON_HOSTS = {
    name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TOKENIZERS_PARALLELISM")
}


@pytest.fixture(scope="session")
def ssh_hosts():
    """The hosts that the session's tests share."""
    if missing := missing_programs():
        pytest.skip(f"not here: {', '.join(missing)}; {INSTALL}")
    if reason := why_not_permitted():
        pytest.skip(reason)
    with running_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="session")
def on_hosts_environment():
    """What this session sets for JAX; hosts inherit nothing of it."""
    return ON_HOSTS


@pytest.fixture
def hosts(ssh_hosts):
    """The hosts, up and idle at the start and at the end."""
    yield ssh_hosts
    for host in ssh_hosts.hosts:
        for path in host.directory.glob("workspace/runs/*/stages/*/attempts/*"):
            kill_all(path)
    for path in ssh_hosts.shared.glob("*/workspace/runs/*/stages/*/attempts/*"):
        kill_all(path)


def kill_all(attempt):
    """Kill what runs for an attempt, wherever."""

    def are_gone():
        left = processes_of(SimpleNamespace(path=attempt))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not left

    wait_until(are_gone)


@pytest.fixture
def workspace(hosts, request):
    """A workspace that the hosts do not see."""
    folder = hosts.private / request.node.name.replace("[", "-").replace("]", "")
    folder.mkdir()
    return folder / "workspace"


@pytest.fixture
def shared_workspace(hosts, request):
    """A workspace that every host sees."""
    folder = hosts.shared / request.node.name
    folder.mkdir()
    return folder / "workspace"


@pytest.fixture
def folder(hosts, request):
    """A directory that the hosts see too."""
    path = hosts.shared / f"seen-{request.node.name.replace('[', '-').replace(']', '')}"
    path.mkdir()
    return path


@pytest.fixture
def written(hosts, workspace):
    return [workspace, *(host.directory for host in hosts.hosts)]


@pytest.fixture
def attempt_of(hosts):
    """The attempt of a job of one host, as a host without the launcher's disk sees it."""

    def attempt_of(job):
        labels = wait_until(lambda: job.record()["hosts"] or (job.done() and [""]))
        host = next((one for one in hosts.hosts if one.address == labels[0]), hosts.hosts[0])
        run = f"{job.attempt.read_call()['run']}-{job.job_id}"
        path = host.directory / "workspace/runs" / run / "stages/act/attempts"
        return AttemptDirectory(path / job.attempt.path.name)

    return attempt_of


@pytest.fixture
def time_limit():
    """Part of a minute, so that the test needs no whole one."""
    return {"resources": JobResources(walltime_minutes=0.1)}


@pytest.fixture
def submit_secret(submit, monkeypatch):
    """A secret goes to the hosts by its variable's name."""

    def submit_secret(value):
        monkeypatch.setenv("TINY_API_TOKEN", value)
        return submit("print_secret", settings={"forward_environment": ["TINY_API_TOKEN"]})

    return submit_secret


@pytest.fixture
def new_executor(hosts, workspace):
    def new_executor(
        *, into=workspace, environment=None, stall_seconds=600, grace_seconds=5, settings=None
    ):
        return HostsExecutor(
            into,
            Config.from_json(hosts.profile(**(settings or {}))),
            variables={**ON_HOSTS, **(environment or {})},
            stall_seconds=stall_seconds,
            grace_seconds=grace_seconds,
        )

    return new_executor


@pytest.fixture
def submit(workspace, new_executor):
    """Submit an action of the tiny stage to the hosts."""

    def submit(
        action="write",
        *,
        into=workspace,
        environment=None,
        stall_seconds=600,
        grace_seconds=5,
        settings=None,
        **call,
    ):
        attempt = make_attempt(into, action, **call)
        executor = new_executor(
            into=into,
            environment=environment,
            stall_seconds=stall_seconds,
            grace_seconds=grace_seconds,
            settings=settings,
        )
        return executor.submit_call(attempt)

    return submit


@pytest.fixture
def launch(hosts, on_hosts_environment):
    """Submit an attempt's call from a process of its own."""
    started = []

    def launch(attempt):
        said = json.dumps([hosts.profile(), on_hosts_environment])
        search = [path for path in sys.path if "tests" in path]
        command = [sys.executable, "-c", LAUNCH, said, str(attempt.path), *search]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def lose_launcher(launch, hosts):
    """Kill an attempt's launcher once its stage is at work; return the attempt's place there."""

    def lose_launcher(attempt):
        launcher = launch(attempt)
        wait_until(lambda: phase_of(attempt) == "waiting")
        launcher.kill()
        launcher.wait()
        run = f"tiny-abcd-{attempt.read_job()['job_id']}/stages/act/attempts/1"
        return AttemptDirectory(hosts.hosts[0].directory / "workspace/runs" / run)

    return lose_launcher
