"""When a host may take a lost attempt's directory for a copy: once all of it stands at home."""

import json

import pytest
from tiny_stages.calls import make_call

from redco_flow.launch.call import write_call
from redco_flow.launch.hosts import left_behind
from redco_flow.launch.hosts.copies import Copies
from redco_flow.records import digest_file, write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.workspace import Workspace

LOG = "logs/rank0.log"
FINGERPRINT = "f" * 64
ENDING = {"cause": "failed", "message": "boom"}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "workspace" / "runs").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def attempt(directory):
    """An attempt as its rank left it when the host lost its link."""
    attempt = AttemptDirectory(directory / "workspace/runs/tiny-job/stages/act/attempts/1")
    attempt.logs.mkdir(parents=True)
    write_call(attempt, make_call(directory / "workspace", "write", fingerprint=FINGERPRINT))
    attempt.log_path().write_text("step 1\nstep 2\n")
    attempt.metrics_path.write_text('{"step": 1}\n')
    folder = attempt.rank_directory(0)
    folder.mkdir(parents=True)
    write_json(folder / "exit.json", ENDING)
    (folder / "lock").touch()
    return attempt


@pytest.fixture
def home(attempt):
    """What a launcher that has fetched all of it says."""
    names = (LOG, "metrics.jsonl")
    digests = {name: digest_file(attempt.path / name) for name in names}
    records = {"ranks/0/exit.json": ENDING}
    return {"digests": digests, "records": records, "has_result": False}


def is_copy(directory, attempt):
    return Copies(directory).is_copy(attempt.path.parents[3])


def test_all_that_a_launcher_takes_from_a_host_is_described(directory, attempt):
    found = left_behind.describe(directory, attempt)

    assert found["sizes"] == {LOG: 14, "metrics.jsonl": 12}
    assert found["records"] == {"ranks/0/exit.json": ENDING}


def test_what_stands_at_home_whole_is_a_copy_and_is_not_described_again(directory, attempt, home):
    assert left_behind.settle(directory, attempt, home)

    assert is_copy(directory, attempt)
    assert left_behind.describe(directory, attempt) is None


def test_a_log_of_which_a_byte_is_missing_or_other_at_home_is_no_copy(directory, attempt, home):
    with attempt.log_path().open("a") as log:
        log.write(".")

    assert not left_behind.settle(directory, attempt, home)
    assert not is_copy(directory, attempt)


@pytest.mark.parametrize("has_result", [False, True])
def test_what_it_made_is_a_copy_only_once_the_stage_has_its_result(
    directory, attempt, home, has_result
):
    work = Workspace(directory / "workspace").work_directory(FINGERPRINT)
    work.mkdir(parents=True)

    assert left_behind.settle(directory, attempt, home | {"has_result": has_result})

    assert Copies(directory).is_copy(work) == has_result


def test_what_another_job_goes_on_with_is_no_copy(directory, attempt, home):
    other = AttemptDirectory(directory / "workspace/runs/tiny-other/stages/act/attempts/2")
    other.path.mkdir(parents=True)
    write_call(other, make_call(directory / "workspace", "write", fingerprint=FINGERPRINT))
    work = Workspace(directory / "workspace").work_directory(FINGERPRINT)
    work.mkdir(parents=True)

    assert left_behind.settle(directory, attempt, home | {"has_result": True})

    assert is_copy(directory, attempt)
    assert not Copies(directory).is_copy(work)


@pytest.mark.parametrize("part", ["digests", "records"])
def test_what_never_came_home_is_no_copy(directory, attempt, home, part):
    home[part].popitem()

    assert not left_behind.settle(directory, attempt, home)


def test_a_record_that_has_changed_since_is_no_copy(directory, attempt, home):
    write_json(attempt.rank_exit_path(0), ENDING | {"message": "bang"})

    assert not left_behind.settle(directory, attempt, home)


def test_a_file_that_no_launcher_takes_keeps_the_directory(directory, attempt, home):
    (attempt.path / "core").write_bytes(b"dump")

    assert not left_behind.settle(directory, attempt, home)


def test_a_rank_that_still_runs_keeps_the_directory(directory, attempt, home):
    runner = attempt.rank_directory(0) / "runner.json"
    write_json(runner, ProcessIdentity.current().to_json())
    assert not left_behind.settle(directory, attempt, home)
    ended = ProcessIdentity.current().to_json() | {"start_time": 1}

    write_json(runner, ended)

    assert left_behind.settle(directory, attempt, home)


def test_a_write_that_was_cut_short_is_missed_by_nobody(directory, attempt, home):
    (attempt.path / ".progress.json.x1y2.tmp").write_text(json.dumps({})[:1])

    assert left_behind.settle(directory, attempt, home)
