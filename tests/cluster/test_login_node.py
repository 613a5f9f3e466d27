"""Runs that are started on a login node from another machine: `--ssh`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from login_node import another_account, missing_programs, running_login_node
from tiny_stages.calls import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KINDS = Path(__file__).parent.parent / "orchestrate" / "kinds"
PIPELINE = """\
name: sums
stages:
  numbers: {kind: orchestrate_kinds.numbers, count: 3}
  total: {kind: orchestrate_kinds.total, learning_rate: 2.0}
"""


@pytest.fixture(scope="module")
def login_node(cluster, tmp_path_factory):
    if missing := missing_programs():
        pytest.skip(f"not here: {', '.join(missing)}; install openssh-server (apt)")
    if os.geteuid() != 0:
        pytest.skip("sshd for another account needs root")
    variables = cluster.environment | {"JAX_PLATFORMS": "cpu"}
    with running_login_node(tmp_path_factory.mktemp("login"), variables) as node:
        yield node


class Laptop:
    """An account with a home of its own: no Slurm, no workspace, only the project's folder."""

    def __init__(self, folder, login_node):
        self.home, self.project = folder / "home", folder / "project"
        self.workspace = folder / "cluster" / "workspace"
        for made in (self.home, self.project / "cluster_profiles"):
            made.mkdir(parents=True)
        (self.project / "sums.yaml").write_text(PIPELINE)
        self._login_node = login_node
        self.write_profile()

    def write_profile(self, executor="local", **changes):
        ssh = self._login_node.settings(workspace=str(self.workspace), **changes)
        profile = {"extends": executor, "workspace": "${env:SCRATCH_OF_CLUSTER}/x", "ssh": ssh}
        path = self.project / "cluster_profiles" / "site.yaml"
        path.write_text(yaml.safe_dump(profile))

    def start(self, *words):
        hidden = ("SLURM_CONF", "REDCO_FLOW_WORKSPACE")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"HOME": str(self.home), "REDCO_FLOW_HOME": str(self.home / "state")}
        environment |= {"PYTHONPATH": str(KINDS), "TERM": "dumb"}
        return subprocess.Popen(
            [sys.executable, "-m", "redco_flow.cli.main", *words],
            cwd=self.project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words, code=0):
        process = self.start(*words)
        output, errors = process.communicate(timeout=500)
        assert process.returncode == code, f"{words}: {process.returncode}\n{output}\n{errors}"
        return output if code == 0 else errors

    def notes(self):
        return list((self.home / "state" / "submissions").glob("*.json"))

    def runs(self):
        return [path.name for path in sorted(self.workspace.glob("runs/*-*"))]


@pytest.fixture
def laptop(tmp_path, login_node):
    return Laptop(tmp_path, login_node)


def test_a_laptop_without_slurm_submits_follows_and_reads_a_run(slurm, laptop):
    laptop.write_profile("slurm")
    code = "def double(x):\n    return 2 * x\n"
    (laptop.project / "own.py").write_text(code)

    run = json.loads(laptop("run", "sums.yaml", "-p", "site", "--json"))
    again = laptop("plan", "sums.yaml", "-p", "site", "learning_rate=3")
    page = laptop("report", run["run"], "-p", "site").strip()

    assert (run["state"], run["metrics"]) == ("completed", {"total": 12.0})
    job = laptop.workspace / "runs" / run["run"] / "stages/total/attempts/1/job.json"
    assert json.loads(job.read_text())["executor"] == "slurm"
    assert "unchanged since" in again
    assert "learning_rate: 2 → 3" in again
    assert f"{run['run']}: completed" in laptop("status", "-p", "site")
    assert "learning rate 2.0" in laptop("logs", "-f", f"{run['run']}/total", "-p", "site")
    assert Path(page).parent == laptop.project
    assert run["run"] in Path(page).read_text()
    (sent,) = laptop.workspace.glob("submissions/root/code/*/*/own.py")
    assert sent.read_text() == code


@pytest.fixture
def open_folder(cluster):
    """A folder that every account may enter, as the cluster's then is."""
    system = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    if missing_programs() or os.geteuid() != 0 or not system.exists():
        pytest.skip(f"needs root, and: install openssh-server and {system} (apt)")
    cluster.directory.chmod(0o755)
    folder = Path(tempfile.mkdtemp(prefix="redco-login-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_run_is_of_the_account_that_submits_it(slurm, open_folder, tmp_path):
    with (
        another_account(open_folder) as account,
        running_login_node(
            open_folder,
            slurm.environment | {"JAX_PLATFORMS": "cpu"},
            account.python,
        ) as node,
    ):
        laptop = Laptop(tmp_path, node)
        workspace = laptop.workspace = account.home / "workspace"
        laptop.write_profile("slurm", user=account.name)

        run = json.loads(laptop("run", "sums.yaml", "-p", "site", "--json"))
        (page,) = laptop("report", run["run"], "-p", "site").splitlines()
        said = [laptop("status", "-p", "site"), laptop("logs", f"{run['run']}/total", "-p", "site")]
        made = [*workspace.rglob("*")]
        job = json.loads(
            (workspace / "runs" / run["run"] / "stages/total/attempts/1/job.json").read_text()
        )

        assert (run["state"], run["metrics"]) == ("completed", {"total": 12.0})
        assert job["executor"] == "slurm"
        assert f"{run['run']}: completed" in said[0]
        assert "learning rate 2.0" in said[1]
        assert run["run"] in Path(page).read_text()
        assert {account.owner_of(path) for path in made} == {account.name}


def test_a_connection_that_drops_while_code_is_copied_starts_nothing(laptop, login_node):
    """Fault 63."""
    (laptop.project / "data.bin").write_bytes(os.urandom(3 << 20))
    words = ("run", "sums.yaml", "-p", "site", "--send", "data.bin", "--detach")
    login_node.link.num_bytes = 1 << 20

    dropped = laptop(*words, code=4)
    before = laptop.runs()
    run = laptop(*words).strip()

    assert "the connection broke" in dropped
    assert "No run was started." in dropped
    assert dropped.count("\n") == 1
    assert (before, laptop.runs()) == ([], [run])
    assert not list(laptop.workspace.glob("submissions/root/incoming/*"))


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_command_that_is_repeated_after_a_lost_answer_starts_one_run(laptop, login_node, place):
    """Fault 63: the first command is held before it starts the run, or before it says so."""
    words = ("run", "sums.yaml", "-p", "site", "--detach")
    held, reached = (Path(f"{login_node.python}.{name}") for name in (place, "reached"))
    held.touch()
    try:
        lost = laptop.start(*words)
        wait_until(reached.exists)
        login_node.link.cut()
        errors = lost.communicate(timeout=500)[1]
        held.unlink()  # held before its work, the first command starts the run beside the second
        run = laptop(*words).strip()
    finally:
        held.unlink(missing_ok=True)
        reached.unlink(missing_ok=True)
    state = laptop.workspace / "runs" / run / "state.json"
    wait_until(lambda: json.loads(state.read_text())["state"] == "completed")

    assert (lost.returncode, errors.count("\n")) == (4, 1)
    assert f"whether run {run} was started there" in errors
    assert (laptop.runs(), laptop.notes()) == ([run], [])  # the same words mean another run now


def test_a_run_whose_start_was_cut_off_for_good_is_not_reported_as_started(laptop, login_node):
    words = ("run", "sums.yaml", "-p", "site", "--detach")
    held, reached = (Path(f"{login_node.python}.{name}") for name in ("after", "reached"))
    held.touch()
    try:
        lost = laptop.start(*words)
        wait_until(reached.exists)
        login_node.link.cut()
        lost.communicate(timeout=500)
    finally:
        held.unlink()
        reached.unlink(missing_ok=True)
    (run,) = laptop.runs()
    folder = laptop.workspace / "runs" / run
    wait_until(lambda: json.loads((folder / "state.json").read_text())["state"] == "completed")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"state": "pending"}))
    (folder / "launch.json").unlink()  # as if the disk had been full

    said = laptop(*words, code=1)

    assert f"run {run}" in said
    assert "cannot be continued" in said
    assert "launch.json" in said
    assert [path.stem for path in laptop.notes()] == [run]


def test_equal_commands_at_once_start_a_run_each(laptop):
    commands = [laptop.start("run", "sums.yaml", "-p", "site", "--detach") for _ in range(2)]
    runs = [one.communicate(timeout=500)[0].strip() for one in commands]

    assert [one.returncode for one in commands] == [0, 0]
    assert sorted(runs) == laptop.runs()
    assert len(set(runs)) == 2
    refused = laptop("run", "sums.yaml", "-p", "site", "--detach", "--run-id", runs[0], code=2)
    assert "there is a run" in refused
    assert laptop.notes() == []


def test_ctrl_c_leaves_a_run_that_is_followed(laptop):
    gate = laptop.project / "gate"

    following = laptop.start("run", "sums.yaml", "-p", "site", f"stages.numbers.gate={gate}")
    wait_until(lambda: list(laptop.workspace.glob("runs/*/stages/numbers/attempts/1/progress*")))
    wait_until(lambda: not laptop.notes())  # the answer has arrived, too
    following.send_signal(signal.SIGINT)
    errors = following.communicate(timeout=500)[1]
    state = json.loads(laptop("status", "--json", "-p", "site"))["state"]
    gate.touch()

    assert following.returncode == 130
    assert "attach" in errors.splitlines()[-1]
    assert state == "running"
    assert "completed" in laptop("attach", "-p", "site")


def test_what_a_login_node_refuses_is_said_in_one_line_and_leaves_nothing(laptop, login_node):
    empty = laptop.home / "known_hosts"
    empty.touch()
    cases = {
        "the host key of 127.0.0.1": {"known_hosts": str(empty)},
        "accepts none of our keys": {"key": str(login_node.folder / "other_key")},
        "has no redco-flow: install it there": {"python": "/usr/bin/python3"},
        "has no nothing: name the interpreter": {"python": "nothing"},
        "cannot be reached": {"port": 1},
    }

    said = {}
    for words, changes in cases.items():
        laptop.write_profile(**changes)
        said[words] = laptop("run", "sums.yaml", "-p", "site", code=4)

    assert {words: text.count("\n") for words, text in said.items()} == dict.fromkeys(cases, 1)
    assert all(words in text for words, text in said.items())
    assert not laptop.workspace.exists()
    assert not (laptop.home / "state").exists()


def test_mistakes_are_found_before_anything_is_sent(laptop):
    laptop.write_profile(address="login.invalid")
    wrong = PIPELINE.replace("count", "cuont")
    (laptop.project / "wrong.yaml").write_text(wrong)

    assert "did you mean 'count'" in laptop("run", "wrong.yaml", "-p", "site", code=2)
    assert "does not run over SSH" in laptop("gc", "--ssh", "me@login", code=2)
    assert "has no `ssh:`" in laptop("status", "-p", "local", code=2)
    assert "[USER@]HOST" in laptop("status", "--ssh", "@", code=2)
    assert "must begin with /" in laptop("status", "--ssh", "me@login:work", code=2)


def test_tracked_files_that_are_too_large_for_code_are_named(laptop):
    laptop.write_profile(address="login.invalid")
    for name in ("weights.bin", "rows.bin"):
        (laptop.project / name).write_bytes(bytes(3 << 19))
    for words in (["init", "-q"], ["add", "weights.bin", "rows.bin"]):
        subprocess.run(["git", *words], cwd=laptop.project, check=True)

    said = laptop("run", "sums.yaml", "-p", "site", "--send", "rows.bin", code=4)

    line = "not sent, as code is at most 1.0 MiB: weights.bin (1.5 MiB); --send"
    assert line in said
