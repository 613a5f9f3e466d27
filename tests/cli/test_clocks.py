"""Processes whose clocks are an hour off, ahead and behind: what orders runs and who holds one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from redco_flow.tracking.journal import read_journal
from redco_flow.tracking.schedules import Schedule, ScheduleDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import KINDS, Command, wait_for
from tests.cli.promoting import Shop

# Whole runs, and a preloaded library that makes each of their processes slower.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


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


def test_a_next_launcher_and_a_next_run_two_hours_earlier_go_on_where_the_run_was(command, clock):
    """Fault 35: records are ordered by sequence number; a lease lasts as long as its holder."""
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
    behind = command.json("run", "sums.yaml", "learning_rate=3.0", environment=clock("-1h"))
    listed = command.json("ls")

    assert f"process {launcher} on" in refused
    assert resumed["state"] == "completed"
    assert record_of(folder / "stages/total/attempts/1/job.json") == job
    assert [path.name for path in (folder / "stages/total/attempts").iterdir()] == ["1"]
    events = list(read_journal(folder / "journal.jsonl"))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert any(after["time"] < before["time"] for before, after in pairwise(events))
    assert "run_ended" in [event["event"] for event in events[-2:]]  # before a flow run, if late
    assert [one["run"] for one in listed] == [behind["run"], run]
    assert command.json("status", "@last")["run"] == behind["run"]
    dates = [read(command, one, "run.json")["created_at"] for one in (run, behind["run"])]
    assert dates[1] < dates[0]
    assert behind["stages"]["numbers"]["reused"]
    assert behind["metrics"]["total"] == 18.0


def read(command, run, name):
    return record_of(command.folder / "redco-workspace/runs" / run / name)


def record_of(path):
    """A record, or None while there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def test_an_alias_names_what_was_promoted_last_though_clocks_went_back_and_forth(clock, tmp_path):
    """Fault 51: what an alias named stands in the order of its moves, whatever their dates."""
    shop, command = Shop(tmp_path), Command(tmp_path)
    first, second = shop.checkpoint("one"), shop.checkpoint("two")
    where = ("-w", str(shop.workspace.root))

    command("promote", first.id, "--as", "production", *where, environment=clock("+1h"))
    command("promote", second.id, "--as", "production", *where, environment=clock("-1h"))
    [alias] = command.json("aliases", *where)
    command("rollback", *where, environment=clock("-2h"))
    [rolled_back] = command.json("aliases", *where)

    assert (alias["checkpoint"], alias["previous"]) == (second.id, first.id)
    assert rolled_back["checkpoint"] == first.id
    times = [event["time"] for event in rolled_back["history"]]
    assert times == sorted(times, reverse=True)


FIRE = """
import sys, threading
from datetime import datetime
from pathlib import Path
from redco_flow.orchestrate.recurring.firing import Firer, Terms

name, due, folder = sys.argv[1:]
terms = Terms(
    "weekly", Path(folder, "redco-workspace"), f"{folder}/weekly.yaml", "local", (), "queue",
    "latest", 0,
)
Firer(terms, lambda: False, print, threading.Event()).fire(name, datetime.fromisoformat(due))
"""
WEEKLY = """\
name: weekly
stages:
  gather: {kind: weekly_kinds.gather, file: week.json}
  fit: {kind: weekly_kinds.fit, gate: gate}
"""


def test_queued_firings_run_in_the_order_in_which_they_were_due_whatever_their_clocks_say(
    clock, tmp_path
):
    """Faults 51 and 61: processes two hours apart wait for one another by when they were due."""
    (tmp_path / "weekly.yaml").write_text(WEEKLY)
    (tmp_path / "week.json").write_text(json.dumps({"skill": 100, "is_slow": True}))
    folder = ScheduleDirectory.of(Workspace(tmp_path / "redco-workspace"), "weekly")
    folder.write(Schedule("weekly", str(tmp_path / "weekly.yaml"), str(tmp_path)))
    now = datetime.now(UTC).replace(microsecond=0)

    def fire(name, seconds, environment):
        words = [name, (now + timedelta(seconds=seconds)).isoformat(), str(tmp_path)]
        known = {**os.environ, "PYTHONPATH": str(KINDS), **environment}
        return subprocess.Popen([sys.executable, "-c", FIRE, *words], cwd=tmp_path, env=known)

    first = fire("first", 0, {})
    wait_for(lambda: list(folder.path.glob("../../runs/*/stages/fit/attempts/1/progress.json")))
    third = fire("third", 2, clock("-1h"))
    wait_for(lambda: len(folder.firings()) == 2)
    second = fire("second", 1, clock("+1h"))
    # Only one waits: of the two the one that was due later is skipped.
    wait_for(lambda: any(one.has_ended for one in folder.firings()))
    (tmp_path / "week.json").write_text(json.dumps({"skill": 101}))
    (tmp_path / "gate").touch()
    for process in (first, second, third):
        process.wait(400)

    firings = {one.id: one for one in folder.firings()}
    assert list(firings) == ["first", "second", "third"]
    assert firings["second"].began > firings["third"].began
    assert [firings[name].state for name in ("first", "second")] == ["completed", "completed"]
    assert firings["third"].state == "skipped"
    assert firings["third"].reason == (
        f"another firing waits already, the one that was due at {firings['second'].due}"
    )
