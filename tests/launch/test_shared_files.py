"""What `doctor` makes of locks between nodes and of late files."""

import pytest

from redco_flow.launch.shared_files import (
    FileWatch,
    flock_held,
    settle_locks,
    try_flock,
    write_files,
)
from redco_flow.tracking import locks
from redco_flow.tracking.lock_mechanism import FLOCK, LINKS, mechanism_of
from redco_flow.tracking.workspace import Workspace

LOCAL = "gets a flock that another node holds"


@pytest.fixture
def workspace(tmp_path):
    return Workspace.open(tmp_path)


def test_a_flock_is_refused_while_another_process_holds_it(tmp_path):
    with flock_held(tmp_path / "lock"):
        assert try_flock(tmp_path / "lock") == ""

    assert try_flock(tmp_path / "lock") == LOCAL


@pytest.mark.parametrize(("answer", "mechanism"), [("", FLOCK), (LOCAL, LINKS)])
def test_a_workspace_whose_flock_a_node_does_not_respect_uses_links(workspace, answer, mechanism):
    finding = settle_locks(workspace, {"n1": "", "n2": answer})

    assert finding.is_good
    assert answer in finding.detail
    assert mechanism_of(workspace.root / "sequence") == mechanism


def test_the_kind_of_locks_is_not_changed_while_a_run_is_in_progress(workspace):
    run = workspace.runs / "busy-aaaaaa"
    run.mkdir()
    with locks.acquire(run):
        finding = settle_locks(workspace, {"n2": LOCAL})

        assert not finding.is_good
        assert "(now: busy-aaaaaa)" in finding.remedy
        assert mechanism_of(workspace.root / "sequence") == FLOCK


def test_late_files_are_measured_from_when_their_node_reports_them(tmp_path):
    watch = FileWatch(tmp_path, ["n1", "silent"])

    watch.note_written("n1")
    for _ in range(3):
        watch.look()
    write_files(tmp_path, "n1")
    watch.wait()

    assert watch.finding().is_good
    assert watch.finding().detail.startswith("a new file after 0.")
