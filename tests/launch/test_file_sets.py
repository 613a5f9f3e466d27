"""Files that move between two workspaces: whole or not at all, and each byte once."""

import pytest

from redco_flow.engine.checkpoint.directory import CheckpointDirectory
from redco_flow.errors import ArtifactError, UsageError
from redco_flow.launch.hosts.file_sets import (
    FileSet,
    HashedFile,
    checkpoint_sets,
    forget_steps,
    put_in_place,
    wanted,
)
from redco_flow.records import digest_file, write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace


@pytest.fixture
def here(tmp_path):
    return Workspace.open(tmp_path / "here")


@pytest.fixture
def there(tmp_path):
    return Workspace.open(tmp_path / "there")


@pytest.fixture
def arrivals(tmp_path):
    return tmp_path / "arrivals"


@pytest.fixture
def artifact(here, tmp_path):
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "a.txt").write_text("first")
    (source / "below" / "b.txt").write_text("second")
    (source / "empty").touch()
    return ArtifactStore(here).publish("dataset", source, metadata={"rows": 2})


def carry(one, here, arrivals):
    """Copy a set's files as a transfer would."""
    for entry in one.files:
        content = (one.folder(here) / entry.path).read_bytes()
        (arrivals / entry.blake3).write_bytes(content)


def test_an_artifact_arrives_under_its_own_id_with_what_is_said_about_it(
    here, there, arrivals, artifact
):
    one = FileSet.from_json(FileSet.of_artifact(artifact.manifest).to_json())
    assert set(wanted(there, arrivals, [one]).values()) == {0}
    carry(one, here, arrivals)

    put_in_place(there, arrivals, [one])

    store = ArtifactStore(there)
    assert store.verify(artifact.id) == []
    assert store.get(artifact.id).metadata == {"rows": 2}
    assert list(arrivals.iterdir()) == []
    assert wanted(there, arrivals, [one]) == {}


@pytest.mark.parametrize("kind", ["artifact", "data"])
def test_a_copy_that_is_damaged_here_comes_anew(here, there, arrivals, artifact, kind):
    """Fault 41 on a host."""
    one = FileSet.of_artifact(artifact.manifest)
    if kind == "data":
        one = FileSet("data", "folder", one.files)
    wanted(there, arrivals, [one])
    carry(FileSet.of_artifact(artifact.manifest), here, arrivals)
    put_in_place(there, arrivals, [one])
    copy = one.folder(there) / "a.txt"
    copy.chmod(0o644)
    copy.write_text("other")

    assert set(wanted(there, arrivals, [one])) == one.digests
    carry(FileSet.of_artifact(artifact.manifest), here, arrivals)
    put_in_place(there, arrivals, [one])

    assert copy.read_text() == "first"
    assert wanted(there, arrivals, [one]) == {}


def test_an_artifact_with_an_identity_is_here_with_other_files_too(here, there, arrivals, artifact):
    """Equal content has one id, whichever machine's files it is kept in."""
    identity = {"params/w": "1" * 64}
    mine = ArtifactStore(here).publish("checkpoint", artifact.path, identity=identity)
    one = FileSet.from_json(FileSet.of_artifact(mine.manifest).to_json())
    wanted(there, arrivals, [one])
    carry(one, here, arrivals)

    put_in_place(there, arrivals, [one])

    assert ArtifactStore(there).verify(mine.id) == []
    other_files = ArtifactStore(here).publish("dataset", artifact.path / "below").path
    elsewhere = ArtifactStore(Workspace.open(here.root.parent / "elsewhere"))
    theirs = elsewhere.publish("checkpoint", other_files, identity=identity)
    assert theirs.manifest["files"] != mine.manifest["files"]
    assert wanted(there, arrivals, [FileSet.of_artifact(theirs.manifest)]) == {}


def test_a_manifest_that_is_not_what_was_published_is_refused(here, there, arrivals, artifact):
    """Fault 41: an identity's id says nothing of the files' names."""
    mine = ArtifactStore(here).publish("checkpoint", artifact.path, identity={"w": "1" * 64})
    one = FileSet.of_artifact(mine.manifest)
    wanted(there, arrivals, [one])
    carry(one, here, arrivals)
    one.record["files"] = [entry | {"path": f"{entry['path']}x"} for entry in one.record["files"]]

    with pytest.raises(ArtifactError, match=f"the manifest of checkpoint {mine.id} is not what"):
        put_in_place(there, arrivals, [one])

    assert ArtifactStore(there).find(mine.id) is None


def test_what_has_arrived_in_part_goes_on_where_it_broke(there, arrivals, artifact):
    one = FileSet.of_artifact(artifact.manifest)
    first = next(entry for entry in one.files if entry.path == "a.txt")
    arrivals.mkdir()
    (arrivals / first.blake3).write_bytes(b"fir")

    assert wanted(there, arrivals, [one])[first.blake3] == 3


def test_a_file_that_arrived_damaged_is_refused_and_comes_anew(here, there, arrivals, artifact):
    one = FileSet.of_artifact(artifact.manifest)
    wanted(there, arrivals, [one])
    carry(one, here, arrivals)
    first = next(entry for entry in one.files if entry.path == "a.txt")
    (arrivals / first.blake3).write_bytes(b"wrong")

    with pytest.raises(ArtifactError, match=r"a\.txt .* arrived damaged"):
        put_in_place(there, arrivals, [one])

    assert ArtifactStore(there).find(artifact.id) is None
    assert wanted(there, arrivals, [one])[first.blake3] == 0


@pytest.mark.parametrize("path", ["../../x", "/etc/x", "a/../../x"])
def test_a_path_that_leaves_its_set_is_refused(path):
    """Fault 29: the path is refused."""
    one = FileSet("data", "d", [HashedFile(path, 1, "0" * 64)])

    with pytest.raises(ArtifactError, match="must stay inside"):
        FileSet.from_json(one.to_json())


@pytest.mark.parametrize("name", ["..", "a/b", "/etc"])
def test_a_name_that_is_no_folders_is_refused(name):
    with pytest.raises(UsageError, match="is not a name"):
        FileSet.from_json(FileSet("checkpoint", name, []).to_json())


def test_a_digest_that_is_none_is_refused():
    one = FileSet("data", "d", [HashedFile("a", 1, "../../x")])

    with pytest.raises(ArtifactError, match="is no BLAKE3"):
        FileSet.from_json(one.to_json())


def commit(workspace, step):
    """A checkpoint of three files, one of which is the same in all."""
    folder = workspace.work / "w" / "checkpoints" / str(step)
    (folder / "training").mkdir(parents=True)
    (folder / "array").write_text(f"step {step}")
    (folder / "metadata").write_text("float32")
    (folder / "training" / "moments").write_text(f"moments {step}")
    files = [
        {"path": name, "bytes": path.stat().st_size, "blake3": digest_file(path)}
        for name in ("array", "metadata", "training/moments")
        for path in [folder / name]
    ]
    write_json(folder / "commit.json", {"step": step, "files": files})


def test_checkpoints_arrive_with_their_commits_and_deleted_ones_are_forgotten(
    here, there, arrivals
):
    for step in (4, 8, 12):
        commit(here, step)
    CheckpointDirectory(here.work / "w" / "checkpoints").drop_state(8)
    sets = list(checkpoint_sets(here, "w", here.committed_steps("w")))
    wanted(there, arrivals, sets)
    for one in sets:
        carry(one, here, arrivals)

    put_in_place(there, arrivals, sets)
    assert there.committed_steps("w") == [4, 8, 12]
    forget_steps(there, "w", [8, 12])

    assert there.committed_steps("w") == [8, 12]
    folder = there.work / "w" / "checkpoints"
    assert (folder / "12" / "array").read_text() == "step 12"
    assert (folder / "12" / "metadata").read_text() == "float32"
    assert (folder / "12" / "training" / "moments").read_text() == "moments 12"
    copies = CheckpointDirectory(folder)
    assert [copies.has_state(step) for step in (8, 12)] == [False, True]
    assert not (folder / "8" / "training").exists()
    assert all(one.is_here(there) for one in checkpoint_sets(there, "w", [8, 12]))
    assert list(arrivals.iterdir()) == []
    assert not (folder / "4").exists()
