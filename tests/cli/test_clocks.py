"""Processes whose clocks are an hour off, ahead and behind: what orders runs and who holds one."""

import json
import os
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from redco_flow.tracking.journal import read_journal
from tests.cli.conftest import KINDS, wait_for

pytestmark = pytest.mark.slow


# libfaketime 0.9.10 refuses every sleep to a point in monotonic time, which is how Python sleeps.
SLEEP = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """Return the environment in which a process's time of day, and only that, is off by so much."""
    program = shutil.which("faketime")
    found = sorted(Path("/usr").glob("lib*/**/faketime/libfaketime.so.1")) if program else []
    if not found:
        pytest.skip("not here: faketime; install faketime (apt)")
    folder = tmp_path_factory.mktemp("sleep")
    (folder / "sitecustomize.py").write_text(SLEEP)

    def clock(offset):
        return {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME": offset,
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "PYTHONPATH": os.pathsep.join([str(KINDS), str(folder)]),
        }

    return clock


def test_runs_are_ordered_by_number_though_the_later_one_is_dated_two_hours_earlier(
    command, clock, prefect_server
):
    """Fault 35: records are ordered by sequence number; a lease lasts as long as its holder."""
    ahead = command.json("run", "sums.yaml", environment=clock("+1h"))
    behind = command.json("run", "sums.yaml", "learning_rate=3.0", environment=clock("-1h"))

    listed = command.json("ls")

    assert [run["run"] for run in listed] == [behind["run"], ahead["run"]]
    assert command.json("status", "@last")["run"] == behind["run"]
    dates = [read(command, one["run"], "run.json")["created_at"] for one in (ahead, behind)]
    assert dates[1] < dates[0]
    assert behind["stages"]["numbers"]["reused"]
    assert behind["metrics"]["total"] == 18.0


def test_a_run_whose_next_launcher_lives_two_hours_earlier_is_taken_up_where_it_was(
    command, clock, prefect_server
):
    """Fault 35: the lease stands while its holder lives and not longer, whatever it is dated."""
    gate = command.folder / "gate"
    run = command(
        *("run", "sums.yaml", f"total.gate={gate}", "--detach"), environment=clock("+1h")
    ).strip()
    folder = command.folder / "redco-workspace/runs" / run
    job = wait_for(lambda: record_of(folder / "stages/total/attempts/1/job.json"))

    refused = command("resume", run, environment=clock("-1h"), code=2)
    launcher = record_of(folder / "lease.json")["pid"]
    os.kill(launcher, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{launcher}").exists())
    gate.touch()
    resumed = command.json("resume", run, environment=clock("-1h"))

    assert f"process {launcher} on" in refused
    assert resumed["state"] == "completed"
    assert record_of(folder / "stages/total/attempts/1/job.json") == job
    assert [path.name for path in (folder / "stages/total/attempts").iterdir()] == ["1"]
    events = list(read_journal(folder / "journal.jsonl"))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert any(after["time"] < before["time"] for before, after in pairwise(events))
    assert events[-1]["event"] == "run_ended"


def read(command, run, name):
    return record_of(command.folder / "redco-workspace/runs" / run / name)


def record_of(path):
    """A record, or None while there is none."""
    return json.loads(path.read_text()) if path.exists() else None
