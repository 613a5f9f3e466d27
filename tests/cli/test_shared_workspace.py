"""Several users of one workspace: two real ones, three umasks, and planted symbolic links."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from redco_flow.launch import disk_reserve, work_lock
from redco_flow.launch.supervisor import LogWriter
from redco_flow.orchestrate.run.stage_runner import fingerprint_locked
from redco_flow.records import append_json_line, refuse_link, write_json
from redco_flow.tracking import locks
from redco_flow.tracking.journal import Journal
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import KINDS, PIPELINE

GROUP = 34000
PRIVATE = {"code.patch"}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")


@dataclass(frozen=True)
class User:
    """A user with a home, a umask and one group in common with the others."""

    name: str
    uid: int
    umask: int
    folder: Path

    def __call__(self, *words, code=0):
        home = self.folder / f"home-{self.name}"
        if not home.exists():
            home.mkdir(mode=0o700)
            os.chown(home, self.uid, self.uid)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "USER": self.name,
            "LOGNAME": self.name,
            "PYTHONPATH": str(KINDS),
            "REDCO_FLOW_HOME": str(home / "redco-flow"),
        }
        done = subprocess.run(
            [*_become(self.uid), sys.executable, "-m", "redco_flow.cli.main", *words],
            cwd=self.folder,
            env=environment,
            umask=self.umask,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == code, f"{self.name} {words}: {done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def json(self, *words):
        return json.loads(self(*words, "--json").splitlines()[-1])


def _become(uid):
    """The command that becomes a user; one who may read, not write, where the interpreter is."""
    # It may stand in root's home, as may the checkout. Nothing that is tested hangs on reading.
    may_read = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={GROUP}", *may_read]


@pytest.fixture
def folder():
    """A folder that every user can reach."""
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv: install util-linux")
    path = Path(tempfile.mkdtemp(prefix="redco-flow-shared-"))
    path.chmod(0o755)
    (path / "sums.yaml").write_text(PIPELINE)
    (path / "sums.yaml").chmod(0o644)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def meet(folder):
    """Make two users with a umask, and the directory of their workspace."""

    def meet(umask, *, mode, group):
        home = folder / "shared"
        home.mkdir()
        os.chown(home, 34001, group)
        home.chmod(mode)
        both = (("anna", 34001), ("ben", 34002))
        return [User(name, uid, umask, folder) for name, uid in both]

    return meet


WORKSPACE = "profile.workspace=shared/workspace"


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("umask", "mode", "group"),
    [(0o002, 0o2775, GROUP), (0o000, 0o755, 34001)],
    ids=["002-setgid", "000"],
)
def test_a_second_user_plans_reuses_and_runs(folder, meet, umask, mode, group):
    """Fault 43: with umask 002 in a directory of the group's, and with umask 000."""
    anna, ben = meet(umask, mode=mode, group=group)
    first = anna.json("run", "sums.yaml", WORKSPACE)

    plan = ben.json("plan", "sums.yaml", WORKSPACE)
    claims = {path: path.stat().st_mode for path in folder.glob("shared/workspace/work/*.claim")}
    for path in claims:
        path.chmod(0o644)  # as of a third user with umask 022: reuse needs no lock of theirs
    second = ben.json("run", "sums.yaml", WORKSPACE, "learning_rate=3.0")
    for path, before in claims.items():
        path.chmod(before)

    assert {stage["action"] for stage in plan["stages"].values()} == {"reuse"}
    assert second["state"] == "completed"
    assert second["stages"]["numbers"]["reused"]
    assert not second["stages"]["total"]["reused"]
    listed = anna.json("ls", "--workspace", "shared/workspace")
    assert [run["run"] for run in listed] == [second["run"], first["run"]]
    root = folder / "shared" / "workspace"
    made = {path: path.lstat() for path in (root, *root.rglob("*")) if path.name not in PRIVATE}
    assert {status.st_uid for status in made.values()} == {anna.uid, ben.uid}
    wanted = stat.S_IWGRP if umask else stat.S_IWOTH
    for path, status in made.items():
        is_published = path.is_file() and "artifacts" in path.relative_to(root).parts
        is_linked = path.is_file() and status.st_nlink > 1
        if not (is_published and path.name != ".lock") and not is_linked:
            assert status.st_mode & wanted, f"{path}: {stat.filemode(status.st_mode)}"
        assert status.st_gid == GROUP or not umask, path


@needs_root
@pytest.mark.slow
def test_a_second_user_who_may_only_read_plans_and_is_told_why_a_run_cannot_be(folder, meet):
    """Fault 43: with umask 022."""
    anna, ben = meet(0o022, mode=0o755, group=34001)
    first = anna.json("run", "sums.yaml", WORKSPACE)
    root = folder / "shared" / "workspace"
    before = sorted(root.rglob("*"))

    plan = ben.json("plan", "sums.yaml", WORKSPACE)
    listed = ben.json("ls", "--workspace", "shared/workspace")
    why = ben("why", "total", "--workspace", "shared/workspace")
    told = ben("run", "sums.yaml", WORKSPACE, "learning_rate=3.0", code=2)

    assert {stage["action"] for stage in plan["stages"].values()} == {"reuse"}
    assert [run["run"] for run in listed] == [first["run"]]
    assert f"by stage total of run {first['run']}" in why
    for word in ("Permission denied", "34001", "mode 0755", "you are", "34002", "`umask 002`"):
        assert word in told, told
    assert sorted(root.rglob("*")) == before


def _lock_fingerprint(workspace):
    with fingerprint_locked(workspace, "f" * 64, lambda _: None):
        pass


def _lock(workspace, path):
    with exclusive(path):
        pass


WORK = "work/ffffffffffffffff"
WRITERS = {
    "sequence": lambda workspace, path: workspace.next_sequence(),
    "artifacts/.lock": _lock,
    "cache/.digests.lock": _lock,
    f"{WORK}.claim": lambda workspace, path: _lock_fingerprint(workspace),
    f"{WORK}/lock": lambda workspace, path: work_lock.acquire(path, {"run": "x"}, lambda _: None),
    f"{WORK}/lock ": lambda workspace, path: locks.is_locked(
        workspace.work_directory("f" * 64) / "lock"
    ),
    "runs/r/.lease.lock": lambda workspace, path: locks.acquire(path.parent),
    "runs/r/journal.jsonl": lambda workspace, path: Journal(path).append("x"),
    "runs/r/metrics.jsonl": lambda workspace, path: append_json_line(path, {}),
    "runs/r/rank0.log": lambda workspace, path: LogWriter(path, []),
    WORK: lambda workspace, path: refuse_link(path),
}


@pytest.mark.parametrize("is_dangling", [False, True])
@pytest.mark.parametrize("where", WRITERS)
def test_what_is_written_through_no_link_names_the_link(tmp_path, where, is_dangling):
    """Fault 43: a link in the place of a lock, counter, log or directory is not followed."""
    workspace = Workspace.open(tmp_path / "workspace")
    victim = tmp_path / "victim"
    if not is_dangling:
        victim.write_text('{"seq": 5, "time": "", "event": "precious"}\n')
    path = workspace.root / where.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(victim)

    with pytest.raises(OSError, match=f"it is a link to {victim}") as error:
        WRITERS[where](workspace, path)

    assert error.value.filename == str(path)
    assert victim.exists() != is_dangling
    assert is_dangling or "precious" in victim.read_text()


@pytest.mark.parametrize("write", [write_json, lambda path, _: disk_reserve.take(path.parent)])
def test_what_replaces_a_record_leaves_alone_what_a_link_in_its_place_leads_to(tmp_path, write):
    """Fault 43: of records that are renamed into their place, and of a disk reserve."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "folder").mkdir()
    for name in ("x.json", disk_reserve.ERROR, disk_reserve.EXIT):
        (tmp_path / "folder" / name).symlink_to(victim)

    write(tmp_path / "folder" / "x.json", {"a": 1})

    assert victim.read_text() == "precious"


def test_a_planted_link_stops_a_run_before_anything_starts(tmp_path, monkeypatch, capfd):
    """Fault 43: the message names the link and where it leads."""
    from redco_flow.cli.main import run_command

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(KINDS))
    (tmp_path / "sums.yaml").write_text(PIPELINE)
    workspace = Workspace.open(tmp_path / "redco-workspace")
    (tmp_path / "victim").write_text("precious")
    (workspace.root / "sequence").symlink_to(tmp_path / "victim")

    code = run_command(["run", "sums.yaml"])

    told = capfd.readouterr().err
    assert code == 2
    assert f"{workspace.root / 'sequence'}: it is a link to {tmp_path / 'victim'}" in told
    assert (tmp_path / "victim").read_text() == "precious"
    assert list(workspace.runs.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_records_and_locks_have_the_mode_that_the_umask_leaves(tmp_path, umask, mode):
    """Fault 43: none is narrower or wider than its user asked for."""
    before = os.umask(umask)
    try:
        workspace = Workspace.open(tmp_path / "workspace")
        workspace.next_sequence()
        write_json(workspace.root / "record.json", {})
        Journal(workspace.root / "journal.jsonl").append("x")
        LogWriter(workspace.root / "rank0.log", []).close()
    finally:
        os.umask(before)

    files = [path for path in workspace.root.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"sequence", "record.json", "rank0.log"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}
