"""A node's own disk: copies of inputs, made once, checked, and removed by the last process."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from redco_flow.launch.call import JobStaging
from redco_flow.launch.node_disk import NoNodeDisk
from redco_flow.runtime.context import InputArtifact, InputDamaged, StageContext
from redco_flow.runtime.staging import staged
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

INPUTS = JobStaging("$NODE_DISK/me", inputs=True, checkpoints=False)
HOLD = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from test_staging import INPUTS, context_of, staged
with staged(context_of(Path(sys.argv[2])), INPUTS):
    print("held", flush=True)
    sys.stdin.read()
"""


def context_of(folder):
    """A stage with one input, the same one at each call."""
    source = folder / "rows"
    (source / "train").mkdir(parents=True, exist_ok=True)
    (source / "train" / "part.txt").write_text("one\ntwo\n")
    (source / "empty.txt").touch()
    made = ArtifactStore(Workspace(folder / "workspace")).publish("dataset", source)
    return StageContext(
        run="tiny-abcd",
        stage="train",
        fingerprint="f" * 64,
        inputs={"dataset": (InputArtifact(made.id, made.kind, made.path, made.manifest),)},
        work_dir=folder,
        attempt_dir=AttemptDirectory(folder),
    )


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The directory of the node; the profile names it by a variable of the job."""
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    directory = tmp_path / "disk" / "me"
    directory.mkdir(parents=True)
    return directory


def test_a_stage_reads_copies_that_its_processes_share_and_the_last_one_removes(
    tmp_path, disk, capsys
):
    first, second = context_of(tmp_path), context_of(tmp_path)
    original = first.input("dataset").path

    with staged(first, INPUTS):
        copy = first.input("dataset").path / "train" / "part.txt"
        with staged(second, INPUTS):
            assert second.input("dataset").path / "train" / "part.txt" == copy
            assert second.input("dataset").id == first.input("dataset").id
        found = copy.read_text(), (copy.parent.parent / "empty.txt").read_text()

    assert found == ("one\ntwo\n", "")
    assert copy.is_relative_to(disk)
    assert list(disk.iterdir()) == []
    assert first.input("dataset").path == original
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"redco-flow: copied dataset {first.input('dataset').id[:12]} to {disk}")
    assert ": 8 bytes in " in line


def test_a_copy_outlives_a_killed_process_only_until_another_stage_needs_the_disk(tmp_path, disk):
    command = [sys.executable, "-c", HOLD, Path(__file__).parent, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        (copy,) = disk.iterdir()
        with staged(context_of(tmp_path), replace(INPUTS, inputs=False)):
            assert list(disk.iterdir()) == [copy]  # in use
        process.send_signal(signal.SIGKILL)
    assert list(disk.iterdir()) == [copy]

    with staged(context_of(tmp_path), replace(INPUTS, inputs=False)):
        left = list(disk.iterdir())

    assert left == []


def test_checkpoints_get_a_directory_of_their_own_that_ends_with_the_stage(tmp_path, disk):
    context = context_of(tmp_path)

    with staged(context, JobStaging(str(disk), inputs=False, checkpoints=True)):
        room = context.node_directory
        (room / "12").mkdir()

    assert room.is_relative_to(disk)
    assert context.node_directory is None
    assert list(disk.iterdir()) == []


def test_a_link_in_the_place_of_a_copy_is_neither_followed_nor_emptied(tmp_path, disk, capsys):
    context = context_of(tmp_path)
    with staged(context, INPUTS):
        (copy,) = disk.iterdir()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "files").mkdir(parents=True)
    copy.symlink_to(elsewhere)

    with staged(context, INPUTS):
        assert not context.input("dataset").path.is_relative_to(disk)

    assert (elsewhere / "files").is_dir()
    assert f"{copy}: Not a directory: the stage uses the workspace" in capsys.readouterr().err


def change_manifest(context, **changes):
    made = context.input("dataset")
    files = [{**entry, **changes} for entry in made.manifest["files"]]
    context.inputs = {"dataset": (replace(made, manifest={**made.manifest, "files": files}),)}
    return made.path


def test_an_input_for_which_the_disk_has_no_room_is_read_from_the_workspace(tmp_path, disk, capsys):
    first, second = context_of(tmp_path), context_of(tmp_path)
    original = change_manifest(first, bytes=1 << 60)
    change_manifest(second, bytes=1 << 60)

    with staged(first, INPUTS), staged(second, INPUTS):
        assert first.input("dataset").path == second.input("dataset").path == original
        (path,) = disk.iterdir()
        assert [one.name for one in path.iterdir()] == ["record.json"]  # read by the second one

    assert list(disk.iterdir()) == []
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert all("bytes do not fit there: the stage uses the workspace" in one for one in warnings)


def test_a_copy_of_other_bytes_than_were_published_is_not_used(tmp_path, disk):
    context = context_of(tmp_path)
    change_manifest(context, blake3="0" * 64)

    with pytest.raises(InputDamaged, match="when it was published"), staged(context, INPUTS):
        pass

    assert list(disk.iterdir()) == []


def test_a_copy_that_a_stage_changes_is_found_and_later_stages_use_the_workspace(
    tmp_path, disk, capsys
):
    first, second = context_of(tmp_path), context_of(tmp_path)
    original = first.input("dataset").path

    with staged(first, INPUTS):
        copy = first.input("dataset").path / "train" / "part.txt"
        first.check_inputs()
        modes = [path.stat().st_mode & 0o222 for path in (copy, copy.parent, copy.parent.parent)]
        copy.parent.chmod(0o755)
        copy.unlink()
        copy.write_text("two\none\n")
        with pytest.raises(InputDamaged, match=r"the copy of dataset .*: train/part\.txt"):
            first.check_inputs()
        with staged(second, INPUTS):
            assert second.input("dataset").path == original

    first.check_inputs()
    assert modes == [0, 0, 0]
    assert "train/part.txt changed after they were copied" in capsys.readouterr().err


def test_a_directory_whose_record_a_cleaner_removes_holds_no_stage_up(tmp_path, disk, capsys):
    first, second = context_of(tmp_path), context_of(tmp_path)

    with staged(first, INPUTS):
        (path,) = disk.iterdir()
        (path / "record.json").unlink()
        with staged(second, INPUTS):
            assert not second.input("dataset").path.is_relative_to(disk)
        path.rename(tmp_path / "gone")
        with staged(second, INPUTS):
            assert second.input("dataset").path.is_relative_to(disk)

    assert list(disk.iterdir()) == []
    assert "removed while another process uses it" in capsys.readouterr().err


def test_an_input_that_cannot_be_read_is_no_fault_of_the_disk(tmp_path, disk):
    context = context_of(tmp_path)
    source = context.input("dataset").path / "train" / "part.txt"
    source.unlink()

    with pytest.raises(FileNotFoundError) as told, staged(context, INPUTS):
        pass

    assert told.value.filename == str(source)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("/lscratch/$SLURM_JOB_ID", r"\$SLURM_JOB_ID is not set on "),
        ("$NODE_DISK/other", r"is \$NODE_DISK/other, and there is no directory /.*/disk/other on"),
        ("$PART/me", "there is no directory disk/me"),
    ],
)
def test_a_node_without_the_directory_is_refused(tmp_path, disk, monkeypatch, named, message):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PART", "disk")
    monkeypatch.chdir(tmp_path)

    with (
        pytest.raises(NoNodeDisk, match=message),
        staged(context_of(tmp_path), replace(INPUTS, directory=named)),
    ):
        pass
