import json

import pytest

from redco_flow.cli.main import run_command
from redco_flow.records import digest_file
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory


@pytest.fixture
def run_with_checkpoint(workspace):
    """A completed run; its work directory has the checkpoint's file too, and another one."""
    work = workspace.work_directory("0" * 64)
    work.mkdir()
    (work / "weights").write_bytes(b"w" * 1000)
    (work / "optimizer").write_bytes(b"o" * 300)
    made = ArtifactStore(workspace).publish(
        "checkpoint",
        work / "weights",
        digests={"weights": digest_file(work / "weights")},
        produced_by={"stage": "train"},
    )
    run = RunDirectory.create(workspace, "demo")
    stage = {"state": "completed", "artifacts": {"checkpoint": made.id}, "fingerprint": "0" * 64}
    run.write_state({"state": "completed", "stages": {"train": stage}})
    logs = run.new_attempt("train").logs
    (logs / "rank0.log").write_bytes(b"l" * 70)
    return run


def test_hard_linked_files_count_once(workspace, run_with_checkpoint, capsys):
    assert run_command(["du", "--json", "-w", str(workspace.root)]) == 0

    found = json.loads(capsys.readouterr().out)
    rows = {(row["what"], row["stage"]): row for row in found["rows"]}
    assert 1000 < rows["artifacts/checkpoint", "train"]["bytes"] < 2000  # with its manifest
    assert rows["work", ""]["bytes"] == 300
    assert rows["work", ""]["files"] == 2
    assert rows["logs", "train"]["bytes"] == 70
    inodes = {path.lstat().st_ino: path for path in workspace.root.rglob("*")}
    assert found["files"] == len(inodes)
    assert found["bytes"] == sum(p.stat().st_size for p in inodes.values() if p.is_file())


def test_a_runs_size_has_its_records_logs_artifacts_and_work(
    workspace, run_with_checkpoint, capsys
):
    assert run_command(["ls", "--size", "--json", "-w", str(workspace.root)]) == 0

    (run,) = json.loads(capsys.readouterr().out)
    records = sum(p.stat().st_size for p in run_with_checkpoint.path.rglob("*") if p.is_file())
    manifest = next(workspace.artifacts.rglob("manifest.json")).stat().st_size
    assert run["bytes"] == records + manifest + 1000 + 300
