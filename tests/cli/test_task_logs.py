"""`logs` of an array: each task's, and of one that is tried again those of the tasks left."""

import pytest

from redco_flow.cli.main import run_command
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace


@pytest.fixture
def logs(tmp_path, capsys):
    """What `logs` prints of a stage whose last attempt has these tasks."""
    workspace = Workspace.open(tmp_path / "workspace")

    def logs(shards, *words, code=0):
        run = RunDirectory.create(workspace, "tiny", argv=["redco-flow"], code={})
        attempt = run.new_attempt("preprocess")
        for shard in shards:
            attempt.task(shard).logs.mkdir(parents=True)
            attempt.task(shard).log_path().write_text(f"task {shard}\n")
        stages = {"preprocess": {"state": "completed", "attempt": 1}}
        run.write_state({"state": "completed", "exit_code": 0, "message": "", "stages": stages})
        given = ["logs", f"{run.id}/preprocess", "--workspace", str(workspace.root), *words]
        assert run_command(given) == code
        said = capsys.readouterr()
        return said.out or said.err

    return logs


@pytest.mark.parametrize("words", [(), ("--follow",)])
def test_without_a_rank_the_first_task_is_meant(logs, words):
    assert logs([0, 1, 2], *words) == "task 0\n"
    assert logs([2, 3], *words) == "task 2\n"


def test_every_task_has_its_log_by_its_number(logs):
    assert logs([0, 1, 2], "--rank", "1") == "task 1\n"
    assert "no process of rank 0 has a log; those of 2, 3 have" in logs(
        [2, 3], "--rank", "0", code=2
    )
