import json
import os
import signal
import stat
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from redco_flow.errors import ArtifactError, UsageError
from redco_flow.records import digest_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.file_digests import digest_files
from redco_flow.tracking.locks import exclusive


@pytest.fixture
def store(workspace) -> ArtifactStore:
    return ArtifactStore(workspace)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    source = tmp_path / "checkpoint"
    (source / "state" / "d").mkdir(parents=True)
    (source / "state" / "d" / "0").write_bytes(b"weights")
    (source / "commit.json").write_text("{}")
    return source


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def test_an_artifact_is_named_by_the_digest_of_its_kind_and_files(store, checkpoint):
    artifact = store.publish("checkpoint", checkpoint)

    expected = [
        {"path": "commit.json", "bytes": 2, "blake3": _digest(b"{}")},
        {"path": "state/d/0", "bytes": 7, "blake3": _digest(b"weights")},
    ]
    assert artifact.manifest["files"] == expected
    assert artifact.id == digest_json({"kind": "checkpoint", "files": expected})
    assert artifact.directory.name == artifact.id[:16]
    assert artifact.directory.parent.name == "checkpoint"
    assert (artifact.path / "state" / "d" / "0").read_bytes() == b"weights"
    assert json.loads((artifact.directory / "manifest.json").read_text()) == artifact.manifest
    assert artifact.num_bytes == 9


def test_one_file_is_an_artifact_too(store, tmp_path):
    (tmp_path / "predictions.jsonl").write_text("{}\n")

    artifact = store.publish("predictions", tmp_path / "predictions.jsonl")

    assert (artifact.path / "predictions.jsonl").read_text() == "{}\n"


def test_the_same_files_of_another_kind_are_another_artifact(store, checkpoint):
    assert store.publish("a", checkpoint).id != store.publish("b", checkpoint).id


def test_what_is_said_about_it_is_kept_and_is_no_part_of_its_id(store, checkpoint, tmp_path):
    (tmp_path / "same").mkdir()
    artifact = store.publish(
        "checkpoint",
        checkpoint,
        metadata={"step": 7},
        parents={"dataset": "d" * 64},
        produced_by={"stage": "train", "run": "demo-abcdef"},
    )

    assert artifact.metadata == {"step": 7}
    assert artifact.parents == {"dataset": "d" * 64}
    assert artifact.produced_by["stage"] == "train"
    assert store.publish("checkpoint", checkpoint, metadata={"step": 8}).id == artifact.id


def test_publishing_twice_registers_once(store, checkpoint):
    """Fault 4: the publisher was killed after it published and before it wrote its result."""
    first = store.publish("checkpoint", checkpoint, metadata={"step": 7})

    second = store.publish("checkpoint", checkpoint, metadata={"step": 7})

    assert second == first
    assert store.list() == [first]
    assert sorted(os.listdir(first.directory.parent)) == [first.id[:16]]


def test_several_processes_that_publish_the_same_content_register_it_once(
    store, workspace, checkpoint, start_python
):
    """Fault 4: the next attempt registers the artifact, exactly once."""
    script = """
        import sys
        from pathlib import Path
        from redco_flow.tracking.artifacts import ArtifactStore
        from redco_flow.tracking.workspace import Workspace
        print("ready", flush=True)
        sys.stdin.readline()
        store = ArtifactStore(Workspace(Path(sys.argv[1])))
        for _ in range(10):
            print(store.publish("checkpoint", Path(sys.argv[2])).id)
    """
    processes = [start_python(script, workspace.root, checkpoint) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"

    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=400) for process in processes]

    (only,) = store.list()
    assert [output.split() for output, _ in outputs] == [[only.id] * 10] * 3, outputs
    assert os.listdir(only.directory.parent) == [only.id[:16]]


def test_a_published_artifacts_files_are_read_only(store, checkpoint):
    artifact = store.publish("checkpoint", checkpoint)

    for path in artifact.directory.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o444, path


def test_a_file_that_may_still_be_written_is_copied(store, tmp_path):
    source = tmp_path / "predictions.jsonl"
    source.write_text("first\n")
    artifact = store.publish("predictions", source)

    source.write_text("other\n")

    assert (artifact.path / source.name).read_text() == "first\n"
    assert store.verify(artifact.id) == []


def test_a_file_whose_digest_its_producer_gives_is_linked_not_copied(store, checkpoint):
    digests = {"state/d/0": _digest(b"weights")}

    artifact = store.publish("checkpoint", checkpoint, digests=digests)

    assert (artifact.path / "state/d/0").samefile(checkpoint / "state/d/0")
    assert not (artifact.path / "commit.json").samefile(checkpoint / "commit.json")
    assert store.publish("checkpoint", checkpoint).id == artifact.id


def test_a_digest_for_a_file_that_is_not_there_is_refused(store, checkpoint):
    with pytest.raises(ArtifactError, match="state/d/1"):
        store.publish("checkpoint", checkpoint, digests={"state/d/1": "0" * 64})


@pytest.mark.parametrize("kind", ["", "../x", "a/b", ".hidden"])
def test_a_kind_that_leaves_its_directory_is_refused(store, checkpoint, kind):
    """Fault 29: the path is refused."""
    with pytest.raises(UsageError, match="not a name"):
        store.publish(kind, checkpoint)


def test_links_and_special_files_are_not_published(store, checkpoint):
    """Fault 29: the path is refused."""
    (checkpoint / "link").symlink_to("/etc/passwd")
    with pytest.raises(ArtifactError, match="link: a link or a special file"):
        store.publish("checkpoint", checkpoint)

    (checkpoint / "link").unlink()
    os.mkfifo(checkpoint / "pipe")
    with pytest.raises(ArtifactError, match="pipe: a link or a special file"):
        store.publish("checkpoint", checkpoint)

    assert store.list() == []


def test_nothing_is_not_published(store, tmp_path):
    (tmp_path / "empty" / "folder").mkdir(parents=True)

    with pytest.raises(ArtifactError, match="no files"):
        store.publish("checkpoint", tmp_path / "empty")
    with pytest.raises(ArtifactError, match="neither a file nor a directory"):
        store.publish("checkpoint", tmp_path / "missing")


def test_an_artifact_is_found_by_its_ids_beginning(store, checkpoint):
    artifact = store.publish("checkpoint", checkpoint)

    for length in (1, 8, 16, 20, 64):
        assert store.get(artifact.id[:length]) == artifact
    with pytest.raises(UsageError, match="no artifact"):
        store.get(artifact.id[:20] + "g")
    with pytest.raises(ArtifactError, match="no artifact"):
        store.get("0" * 64)


def test_an_ambiguous_beginning_lists_the_candidates(store, tmp_path):
    by_digit: dict[str, list[str]] = {}
    for number in range(17):  # 17 ids begin with one of 16 digits
        (tmp_path / "file").write_text(str(number))
        one = store.publish("metrics", tmp_path / "file")
        by_digit.setdefault(one.id[0], []).append(one.id)
    digit, ids = next((digit, ids) for digit, ids in by_digit.items() if len(ids) > 1)

    with pytest.raises(UsageError) as refusal:
        store.get(digit)

    assert all(one[:16] in str(refusal.value) for one in ids)


@pytest.mark.parametrize("damage", ["delete", "truncate", "delete the manifest", "delete all"])
def test_a_damaged_artifact_is_not_intact_and_is_replaced_when_published_again(
    store, checkpoint, damage
):
    """Fault 40, and 23 for a published checkpoint."""
    artifact = store.publish("checkpoint", checkpoint)
    assert store.is_intact(artifact.id)
    weights = artifact.path / "state/d/0"
    if damage == "delete":
        weights.unlink()
    elif damage == "truncate":
        os.truncate(weights, 3)
    elif damage == "delete the manifest":
        (artifact.directory / "manifest.json").unlink()
    else:
        artifact.directory.rename(artifact.directory.with_name("moved away"))
    assert not store.is_intact(artifact.id)

    again = store.publish("checkpoint", checkpoint)

    assert again.id == artifact.id
    assert store.is_intact(artifact.id)
    assert store.verify(artifact.id) == []


def _flip(path, place):
    """Flip one bit in place; a published file may only be read."""
    mode = path.stat().st_mode
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << (place % 8)
    path.write_bytes(content)
    path.chmod(mode)


@pytest.mark.parametrize("kind", ["dataset", "predictions", "metrics", "tokenizer", "checkpoint"])
def test_a_flipped_bit_in_any_file_is_noticed_and_mended_by_publishing_again(
    store, checkpoint, kind
):
    """Faults 22 and 41: the flip is detected in any file; the flip is detected before a stage reads
    the artifact; it is made again, and nothing made from it is reused.
    """
    artifact = store.publish(kind, checkpoint, metadata={"rows": 2})
    assert store.is_intact(artifact.id)

    for path in sorted(path for path in artifact.directory.rglob("*") if path.is_file()):
        for place in (0, path.stat().st_size // 2, path.stat().st_size - 2):
            _flip(path, place)
            assert not store.is_intact(artifact.id), (path, place)

            again = store.publish(kind, checkpoint, metadata={"rows": 2})

            assert again.id == artifact.id
            assert store.is_intact(artifact.id)
            assert store.verify(artifact.id) == []


def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed_or_says_nothing_else(store, checkpoint):
    """Fault 41: the flip is detected before a stage reads the artifact; it is made again, and
    nothing made from it is reused.
    """
    artifact = store.publish("dataset", checkpoint, metadata={"rows": 2}, parents={"a": "b"})
    path = artifact.directory / "manifest.json"
    written = path.read_bytes()
    said = {key: value for key, value in json.loads(written).items() if key != "digest"}

    for place in range(len(written)):
        _flip(path, place)
        if store.is_intact(artifact.id):  # the digest's own name is damaged, or only a space
            assert json.loads(path.read_bytes()).items() >= said.items()
        path.chmod(0o644)
        path.write_bytes(written)

    assert store.is_intact(artifact.id)


IDENTITY = {"recipe.json": "1" * 64, "params/w": "2" * 64}


def test_an_artifacts_id_follows_the_identity_that_its_producer_gives(store, checkpoint):
    artifact = store.publish("checkpoint", checkpoint, identity=IDENTITY)
    (checkpoint / "commit.json").write_text('{"another": "file"}')
    same = store.publish("checkpoint", checkpoint, identity=IDENTITY)
    other = store.publish("checkpoint", checkpoint, identity=IDENTITY | {"params/w": "3" * 64})

    assert artifact.id == digest_json({"kind": "checkpoint", "identity": IDENTITY})
    assert artifact.manifest["identity"] == IDENTITY
    assert same == artifact
    assert store.verify(artifact.id) == []
    assert other.id not in (artifact.id, store.publish("checkpoint", checkpoint).id)


def test_a_damaged_artifact_with_an_identity_is_replaced_by_other_files(store, checkpoint):
    """Fault 41: the second producer's files may be others, and fewer."""
    artifact = store.publish("checkpoint", checkpoint, identity=IDENTITY)
    _flip(artifact.path / "state" / "d" / "0", 0)
    (checkpoint / "state" / "d" / "0").rename(checkpoint / "weights")

    again = store.publish("checkpoint", checkpoint, identity=IDENTITY)

    assert again.id == artifact.id
    assert [entry["path"] for entry in again.manifest["files"]] == ["commit.json", "weights"]
    assert store.verify(artifact.id) == []
    assert store.is_intact(artifact.id)


def test_a_flipped_bit_anywhere_in_a_manifest_with_an_identity_is_noticed(store, checkpoint):
    """Fault 41: its files are held by the manifest's own digest alone."""
    artifact = store.publish("checkpoint", checkpoint, identity=IDENTITY)
    path = artifact.directory / "manifest.json"
    written = path.read_bytes()

    for place in range(len(written)):
        _flip(path, place)
        if store.is_intact(artifact.id):  # only a space, or how a letter is written
            assert json.loads(path.read_bytes()) == artifact.manifest
        path.chmod(0o644)
        path.write_bytes(written)

    assert store.is_intact(artifact.id)


def test_an_identity_of_nothing_is_refused(store, checkpoint):
    with pytest.raises(ArtifactError, match="its identity is empty"):
        store.publish("checkpoint", checkpoint, identity={})


@pytest.mark.parametrize("key", ["id", "kind", "files", "digest"])
def test_an_artifact_whose_manifest_is_damaged_is_mended_by_publishing_again(
    store, checkpoint, key
):
    """Fault 41: the flip is detected before a stage reads the artifact; it is made again, and
    nothing made from it is reused.
    """
    artifact = store.publish("dataset", checkpoint)
    path = artifact.directory / "manifest.json"
    _flip(path, path.read_bytes().index(f'"{key}": '.encode()) + len(key) + 5)
    assert not store.is_intact(artifact.id)

    again = store.publish("dataset", checkpoint)

    assert again.id == artifact.id
    assert store.verify(artifact.id) == []


def test_a_manifest_of_an_earlier_version_without_a_digest_is_believed(store, checkpoint):
    artifact = store.publish("dataset", checkpoint)
    path = artifact.directory / "manifest.json"
    record = json.loads(path.read_text())
    del record["digest"]
    path.chmod(0o644)
    path.write_text(json.dumps(record))

    assert store.is_intact(artifact.id)


def test_an_unchanged_artifact_is_read_once_and_a_changed_one_again(store, workspace, checkpoint):
    """Fault 41, and a plan stays fast: what is remembered is what is told."""
    artifact = store.publish("checkpoint", checkpoint)
    cache = f"artifacts/{artifact.id}.json"
    paths = [artifact.path / entry["path"] for entry in artifact.manifest["files"]]
    digest_files(workspace, paths, cache=cache, now=lambda: time.time_ns() + 3_000_000_000)
    assert store.is_intact(artifact.id)
    remembered = json.loads((workspace.cache / cache).read_text())
    for entry in remembered.values():
        entry[-1] = "another digest"
    (workspace.cache / cache).write_text(json.dumps(remembered))
    assert not store.is_intact(artifact.id)  # so no byte was read
    assert store.is_whole(artifact.id)

    for path in paths:
        os.utime(path)

    assert store.is_intact(artifact.id)


def test_verification_finds_a_flipped_bit_a_missing_a_short_and_an_added_file(store, checkpoint):
    """Faults 22 and 23 for a published checkpoint."""
    (checkpoint / "third").write_text("abc")
    artifact = store.publish("checkpoint", checkpoint)
    assert store.verify(artifact.id[:8]) == []

    weights = artifact.path / "state/d/0"
    weights.chmod(0o644)
    weights.write_bytes(b"weightt")
    (artifact.path / "commit.json").unlink()
    os.truncate(artifact.path / "third", 1)
    (artifact.path / "added").write_text("")

    problems = "\n".join(store.verify(artifact.id))
    assert f"{weights}: its bytes are not what was published" in problems
    assert f"{artifact.path / 'commit.json'}: missing" in problems
    assert f"{artifact.path / 'third'}: 1 bytes, the manifest says 3" in problems
    assert f"{artifact.path / 'added'}: not in the manifest" in problems


def test_artifacts_are_listed_and_latest_by_sequence_number(workspace, tmp_path):
    """Fault 35: the clock goes back an hour between two publications."""
    times = iter(["2026-01-01T12:00:00+00:00", "2026-01-01T11:00:00+00:00"])
    store = ArtifactStore(workspace, clock=lambda: next(times))
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")

    first = store.publish("metrics", tmp_path / "a")
    second = store.publish("metrics", tmp_path / "b")

    assert store.list() == [first, second]
    assert store.list("metrics") == [first, second]
    assert store.list("dataset") == []
    assert store.latest("metrics") == second
    assert store.latest("dataset") is None


PUBLISH = """
import sys
from contextlib import contextmanager
from pathlib import Path
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace
print("ready", flush=True)
ArtifactStore(Workspace(Path(sys.argv[1]))).publish("checkpoint", Path(sys.argv[2]))
"""


def _publishing(folder: Path) -> list[Path]:
    return list(folder.glob(".publishing~*"))


@contextmanager
def _in_the_middle(workspace, start_python, source: Path):
    """A process that publishes `source`, which waits for its sequence number meanwhile."""
    with exclusive(workspace.root / "sequence"):
        publisher = start_python(PUBLISH, workspace.root, source)
        deadline = time.monotonic() + 400
        while not _publishing(workspace.artifacts / "checkpoint"):
            assert publisher.poll() is None, publisher.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield publisher


def test_what_a_killed_publisher_left_is_invisible_and_cleaned_by_the_next(
    store, workspace, checkpoint, start_python, tmp_path
):
    """Faults 4 and 13: the next attempt registers the artifact, exactly once; the partial records
    are removed; the result is returned.
    """
    (tmp_path / "other").write_text("other")
    folder = workspace.artifacts / "checkpoint"
    with _in_the_middle(workspace, start_python, tmp_path / "other") as publisher:
        os.kill(publisher.pid, signal.SIGKILL)
        publisher.wait()
    assert len(_publishing(folder)) == 1
    assert store.list() == []

    artifact = store.publish("checkpoint", checkpoint)

    assert _publishing(folder) == []
    assert store.list() == [artifact]


def test_what_a_living_publisher_makes_is_left_alone(
    store, workspace, checkpoint, start_python, tmp_path
):
    (tmp_path / "other").write_text("other")
    folder = workspace.artifacts / "checkpoint"
    with _in_the_middle(workspace, start_python, tmp_path / "other") as publisher:
        os.kill(publisher.pid, signal.SIGSTOP)

    store.publish("checkpoint", checkpoint)
    assert len(_publishing(folder)) == 1

    os.kill(publisher.pid, signal.SIGKILL)
    publisher.wait()
    (left,) = _publishing(folder)
    *words, _, token = left.name.split("~")
    left.rename(folder / "~".join([*words, "1", token]))  # of another PID namespace: not seen here
    store.publish("checkpoint", checkpoint)
    assert len(_publishing(folder)) == 1


def test_a_full_disk_names_the_path_and_leaves_earlier_artifacts_intact(on_small_disk, tmp_path):
    """Fault 20: the error names the disk, earlier checkpoints are intact, and a background save
    fails before "done".
    """
    with (tmp_path / "large-source").open("wb") as file:
        file.truncate(2 << 20)

    output = on_small_disk("""
        import os, sys
        from pathlib import Path
        from redco_flow.errors import ArtifactError
        from redco_flow.tracking.artifacts import ArtifactStore
        from redco_flow.tracking.workspace import Workspace
        root = Path(sys.argv[1])
        workspace = Workspace.open(root / "workspace")
        store = ArtifactStore(workspace)
        small = root.parent / "small-source"
        small.write_bytes(b"x" * 1000)
        large = root.parent / "large-source"
        earlier = store.publish("checkpoint", small)
        try:
            store.publish("checkpoint", large)
        except ArtifactError as error:
            print(str(workspace.artifacts / "checkpoint") in str(error))
            print("No space left" in str(error) or "too large" in str(error))
        print(store.list() == [earlier] and store.verify(earlier.id) == [])
        print(os.listdir(earlier.directory.parent) == [earlier.id[:16]])
    """)

    assert output.split() == ["True"] * 4


def _bulk(workspace, count: int) -> None:
    """Artifacts as `publish` leaves them, written without its syncs."""
    for number in range(count):
        entries = [
            {"path": f"state/d/{part}", "bytes": 0, "blake3": _digest(f"{number}/{part}".encode())}
            for part in range(10)
        ]
        artifact_id = digest_json({"kind": "checkpoint", "files": entries})
        directory = workspace.artifacts / "checkpoint" / artifact_id[:16]
        directory.mkdir(parents=True)
        manifest = {
            "id": artifact_id,
            "kind": "checkpoint",
            "sequence": number + 1,
            "created_at": "2026-01-01T12:00:00.000+00:00",
            "files": entries,
            "metadata": {"step": number, "metrics": {"rouge2": 0.1}},
            "parents": {"dataset": "d" * 64},
            "produced_by": {"stage": "train", "run": "demo-abcdef", "fingerprint": "f" * 64},
        }
        (directory / "manifest.json").write_text(json.dumps(manifest, indent=2))


@pytest.mark.slow
def test_five_thousand_artifacts_are_listed_in_a_second(big_workspace):
    """Fault 38, thousands of checkpoints and artifacts: they are listed within a second; retention
    keeps exactly what it should.
    """
    _bulk(big_workspace, 5000)
    store = ArtifactStore(big_workspace)

    listing, latest = [], []
    for _ in range(3):  # of CPU time; the best of three
        start = time.thread_time()
        found = store.list()
        listing.append(time.thread_time() - start)
        start = time.thread_time()
        last = store.latest("checkpoint")
        latest.append(time.thread_time() - start)

    assert [one.metadata["step"] for one in found] == list(range(5000))
    assert last == found[-1]
    assert min(listing) < 1.0
    assert min(latest) < 1.0
