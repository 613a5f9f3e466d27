import os
import shutil
import stat
import subprocess

import pytest

from redco_flow.errors import UsageError, WorkspaceError
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace, check_name


def test_opening_makes_the_folders_and_keeps_them_out_of_git(tmp_path):
    workspace = Workspace.open(tmp_path / "deep" / "workspace")

    folders = (workspace.artifacts, workspace.results, workspace.work, workspace.cache)
    assert all(folder.is_dir() for folder in (*folders, workspace.runs))
    assert (workspace.root / ".gitignore").read_text() == "*\n"
    assert Workspace.open(workspace.root) == workspace


def test_opening_leaves_no_trial_file(tmp_path):
    workspace = Workspace.open(tmp_path)

    names = {path.name for path in workspace.root.rglob("*") if path.is_file()}
    assert names == {".gitignore", ".locks.json"}


def test_a_workspace_below_a_file_is_refused_with_its_path(tmp_path):
    """Fault 21: the run is refused before anything is submitted."""
    (tmp_path / "file").write_text("")

    with pytest.raises(WorkspaceError) as refusal:
        Workspace.open(tmp_path / "file" / "workspace")

    assert str(tmp_path / "file") in str(refusal.value)
    assert "profile.workspace=" in str(refusal.value)


def test_a_workspace_in_a_file_system_that_takes_no_files_is_refused():
    """Fault 21: where even root cannot write."""
    with pytest.raises(WorkspaceError, match=r"/proc/nowhere"):
        Workspace.open("/proc/nowhere")


def test_a_workspace_that_became_read_only_is_refused(tmp_path):
    """Fault 21: the run is refused before anything is submitted."""
    if os.geteuid() == 0:
        pytest.skip("root writes in read-only directories; the read-only mount is tested instead")
    workspace = Workspace.open(tmp_path / "workspace")
    workspace.results.chmod(stat.S_IRUSR | stat.S_IXUSR)

    with pytest.raises(WorkspaceError, match="results"):
        Workspace.open(workspace.root)


def test_a_workspace_on_a_read_only_mount_is_refused(start_python, tmp_path):
    """Fault 21: the run is refused before anything is submitted."""
    Workspace.open(tmp_path)
    remount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", remount, str(tmp_path))
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"]).returncode:
        pytest.skip("no mount namespaces here: nothing can be mounted read-only")

    script = "import sys; from redco_flow.tracking.workspace import *; Workspace.open(sys.argv[1])"
    process = start_python(script, tmp_path, prefix=prefix)

    _, errors = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "Read-only file system" in errors
    assert f"workspace {tmp_path} cannot be written" in errors


def test_sequence_numbers_grow_over_processes(workspace, start_python):
    script = """
        import sys
        from pathlib import Path
        from redco_flow.tracking.workspace import Workspace
        workspace = Workspace(Path(sys.argv[1]))
        print(*[workspace.next_sequence() for _ in range(50)])
    """
    processes = [start_python(script, workspace.root) for _ in range(2)]

    outputs = [process.communicate(timeout=400)[0] for process in processes]

    numbers = [[int(word) for word in output.split()] for output in outputs]
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 101))
    assert all(each == sorted(each) for each in numbers)


def test_a_deleted_counter_continues_after_what_stands_in_the_records(workspace):
    runs = [RunDirectory.create(workspace, "demo") for _ in range(3)]
    (workspace.root / "sequence").unlink()

    assert workspace.next_sequence() == runs[-1].sequence + 1


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "../x", "a b", "a\n", "-x", "é", "x" * 65])
def test_what_could_leave_its_directory_is_no_name(text):
    with pytest.raises(UsageError, match="not a name"):
        check_name(text, "stage name")
