"""The code that is shipped: what is in it, and that a changed byte is noticed on the other side."""

import io
import json
import subprocess
import sys

import pytest

from redco_flow.launch.hosts.code_snapshot import bootstrap_program, take_snapshot
from redco_flow.launch.hosts.ssh import FROM_STDIN, program_line


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's repository on the search path."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text("ANSWER = 42\n")
    (folder / "ignored.py").write_text("")
    (folder / ".gitignore").write_text("ignored.py\n")
    (folder / "rows.txt").write_text("tracked")
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "-C", folder, "add", "rows.txt", ".gitignore"], check=True)
    (folder / "large.bin").write_bytes(b"x" * (2 << 20))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def bootstrap(*arguments, archive=b""):
    done = subprocess.run(
        [sys.executable, "-I", *FROM_STDIN],
        input=program_line(bootstrap_program(), *map(str, arguments)) + archive,
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)


def archived(snapshot):
    file = io.BytesIO()
    snapshot.write(file)
    return file.getvalue()


@pytest.fixture
def unpacked(project, tmp_path):
    """A snapshot, and the directory of a host that got it."""
    snapshot, directory = take_snapshot(), tmp_path / "host"
    assert not bootstrap("check", directory, snapshot.digest)["has_code"]
    for _ in range(2):  # of two launchers at once, the second finds the first one's
        done = bootstrap("unpack", directory, snapshot.digest, archive=archived(snapshot))
        assert done == {"changed": []}
    return snapshot, directory


def test_tracked_files_and_new_python_files_are_taken_and_no_data(project):
    names = {name.partition("/")[2] for name in take_snapshot().files}

    assert {"mine.py", "rows.txt", "redco_flow/worker.py"} <= names
    assert not {"ignored.py", "large.bin"} & names


def test_a_folder_that_its_repository_ignores_is_taken_by_its_python_files(project, monkeypatch):
    made = project / "made"
    made.mkdir()
    (made / "generated.py").write_text("")
    (project / ".gitignore").write_text("made/\n")
    monkeypatch.syspath_prepend(str(made))

    assert "generated.py" in {name.partition("/")[2] for name in take_snapshot().files}


def test_equal_code_has_an_equal_digest_and_other_code_another(project):
    before = take_snapshot().digest
    assert take_snapshot().digest == before

    (project / "mine.py").write_text("ANSWER = 43\n")

    assert take_snapshot().digest != before


def test_shipped_code_is_imported_from_where_it_was_unpacked(unpacked):
    snapshot, directory = unpacked
    folder = bootstrap("check", directory, snapshot.digest)["code"]
    program = "import mine, redco_flow; print(mine.ANSWER, mine.__file__, redco_flow.__file__)"

    said = subprocess.check_output(
        [sys.executable, "-P", "-c", program],
        env=snapshot.variables(str(folder)),
        text=True,
    )

    answer, *places = said.split()
    assert answer == "42"
    assert all(place.startswith(str(directory)) for place in places)


def test_a_changed_a_missing_and_a_replaced_file_are_each_noticed(unpacked):
    """Fault 34: the job is refused before anything runs."""
    snapshot, directory = unpacked
    folder = directory / "code" / snapshot.digest
    (mine,) = folder.glob("*/mine.py")

    mine.write_text("ANSWER = 0\n")
    assert bootstrap("check", directory, snapshot.digest)["changed"] == [
        f"{mine.parent.name}/mine.py"
    ]
    mine.unlink()
    assert bootstrap("check", directory, snapshot.digest)["changed"] == [
        f"{mine.parent.name}/mine.py"
    ]
    (folder / "manifest.json").write_text("{}")
    assert bootstrap("check", directory, snapshot.digest)["changed"] == ["manifest.json"]


def test_an_archive_that_is_cut_off_is_refused_and_leaves_no_code(project, tmp_path):
    snapshot, directory = take_snapshot(), tmp_path / "host"
    bootstrap("check", directory, snapshot.digest)
    archive = archived(snapshot)[:5000]

    assert "problem" in bootstrap("unpack", directory, snapshot.digest, archive=archive)
    assert list((directory / "code").iterdir()) == []


def test_a_directory_that_cannot_be_written_is_told():
    assert "/proc/here" in bootstrap("check", "/proc/here", "0" * 64)["problem"]
