"""The order of many records without reading all of them: the files stay the truth."""

import json
import time

import pytest

from redco_flow.records import write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory, list_damaged, list_runs
from redco_flow.tracking.sequence_index import read_sequences
from redco_flow.tracking.workspace import Workspace

NUM_RECORDS = 80  # more than are worth an index
AN_HOUR = 3600 * 10**9


class Records:
    """Numbered records in a folder of a workspace, and which of them were read."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.was_read: list[str] = []
        self.index = workspace.cache / "sequences" / "runs.json"
        for number in range(NUM_RECORDS):
            self.write(f"r{number}", number)

    def write(self, name: str, number: int) -> None:
        folder = self.workspace.runs / name
        folder.mkdir(exist_ok=True)
        write_json(folder / "record.json", {"sequence": number})

    def read(self, name: str) -> int:
        self.was_read.append(name)
        return int(json.loads((self.workspace.runs / name / "record.json").read_text())["sequence"])

    def look(self, *, later=AN_HOUR) -> dict[str, int]:
        """Read the numbers, an hour after the records were written."""
        self.was_read.clear()
        clock = lambda: time.time_ns() + later  # noqa: E731
        return read_sequences(
            self.workspace, self.workspace.runs, "record.json", self.read, now=clock
        )


@pytest.fixture
def records(workspace) -> Records:
    return Records(workspace)


EXPECTED = {f"r{number}": number for number in range(NUM_RECORDS)}


def test_a_second_look_reads_no_record(records):
    assert records.look() == EXPECTED

    assert records.look() == EXPECTED
    assert records.was_read == []


def test_a_new_a_changed_and_a_deleted_record_are_seen(records):
    records.look()
    records.write("new", 500)
    records.write("r3", 600)
    (records.workspace.runs / "r4" / "record.json").unlink()
    (records.workspace.runs / "r4").rmdir()

    found = records.look()

    assert sorted(records.was_read) == ["new", "r3"]
    assert (found["new"], found["r3"]) == (500, 600)
    assert "r4" not in found


def test_a_record_written_just_now_is_not_remembered(records):
    """Changed again within one tick of the clock it would look unchanged."""
    records.look(later=0)

    records.look(later=0)

    assert len(records.was_read) == NUM_RECORDS


@pytest.mark.parametrize("content", ["", "{", '{"r1": 3}', '{"r1": ["a", 1, 2, 3]}', "[]"])
def test_a_damaged_index_is_forgotten_and_made_anew(records, content):
    records.look()
    records.index.write_text(content)

    assert records.look() == EXPECTED
    assert len(records.was_read) == NUM_RECORDS
    records.look()
    assert records.was_read == []


def test_a_deleted_index_is_made_anew(records):
    records.look()
    records.index.unlink()

    assert records.look() == EXPECTED
    assert records.index.is_file()


_LOOK = """
import sys, time
from redco_flow.tracking.sequence_index import read_sequences
from redco_flow.tracking.workspace import Workspace
workspace = Workspace(__import__("pathlib").Path(sys.argv[1]))
index = workspace.cache / "sequences" / "runs.json"
for turn in range(20):
    if turn % 3 == 0:
        index.unlink(missing_ok=True)
    found = read_sequences(
        workspace, workspace.runs, "record.json", lambda name: int(name[1:]),
        now=lambda: time.time_ns() + 3600 * 10**9,
    )
    assert found == {f"r{number}": number for number in range(80)}, found
"""


def test_several_processes_that_delete_read_and_write_the_index_agree(records, start_python):
    processes = [start_python(_LOOK, records.workspace.root) for _ in range(3)]

    ended = [process.communicate(timeout=400) for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert records.look() == EXPECTED


def test_runs_are_listed_newest_first_and_damaged_ones_last(workspace):
    runs = [RunDirectory.create(workspace, "demo") for _ in range(3)]
    (runs[1].path / "run.json").write_text("{")

    listed = list_runs(workspace)

    assert listed == [runs[2], runs[0], runs[1]]
    assert list_damaged(listed) == [runs[1]]


def test_the_newest_artifacts_are_found_over_all_kinds(workspace, tmp_path):
    store = ArtifactStore(workspace)
    made = []
    for number in range(5):
        path = tmp_path / f"file{number}"
        path.write_text(str(number))
        made.append(store.publish("dataset" if number % 2 else "checkpoint", path))
    (made[4].directory / "manifest.json").chmod(0o644)
    (made[4].directory / "manifest.json").write_text("{")

    newest, count = store.newest(2)

    assert [one.id for one in newest] == [made[3].id, made[2].id]
    assert count == 4
