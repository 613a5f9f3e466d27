"""What each firing of a schedule comes to, with real runs; when it was due is the test's to say."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from redco_flow.orchestrate.prefect.server import prefect_directory
from redco_flow.orchestrate.recurring.firing import Firer, Terms, new_firing
from redco_flow.records import write_json
from redco_flow.tracking.process_identity import ProcessIdentity
from redco_flow.tracking.schedules import FiringState, Schedule, ScheduleDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command, wait_for

pytestmark = pytest.mark.slow

FITTING = """\
name: weekly
notify: {webhook_env: WEEKLY_HOOK}
stages:
  gather: {kind: weekly_kinds.gather, file: week.json}
  fit: {kind: weekly_kinds.fit, gate: gate}
"""
PIPELINE = (
    FITTING
    + """\
  answer: {kind: weekly_kinds.answer, checkpoint: fit}
  evaluate: {metrics: [exact_match], predictions: answer}
"""
)
PROMOTING = (
    PIPELINE
    + """\
  answer_production: {kind: weekly_kinds.answer, checkpoint: "@production"}
  evaluate_production: {kind: evaluate, metrics: [exact_match], predictions: answer_production}
  promote: {checkpoint: fit, conditions: ["exact_match > production"]}
"""
)


class Weeks:
    """A schedule whose firings the test makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = Command(folder)
        self.workspace = Workspace(folder / "redco-workspace")
        self.directory = ScheduleDirectory.of(self.workspace, "weekly")
        self.directory.write(Schedule("weekly", str(folder / "weekly.yaml"), str(folder)))

    def bring(self, skill: int | None, **more: object) -> None:
        """Put a new week's file there."""
        (self.folder / "week.json").write_text(json.dumps({"skill": skill, **more}))

    def fire(self, due=None, *, later_is_due=False, stop=None, **terms):
        """Fire once; return the firing."""
        given = {"overlap": "skip", "missed": "latest", "retries": 0} | terms
        path = str(self.folder / "weekly.yaml")
        terms = Terms("weekly", self.workspace.root, path, "local", (), **given)
        stop = stop or threading.Event()
        firer = Firer(terms, lambda: later_is_due, self.said.append, stop)
        return firer.fire(str(uuid4()), due or datetime.now(UTC))

    def wait_until_fitting(self) -> None:
        """Wait until a slow week's run has read its data and waits at the gate."""
        fits = self.workspace.runs.glob
        wait_for(lambda: list(fits("*/stages/fit/attempts/1/progress.json")))

    @property
    def said(self) -> list[str]:
        """What firings told."""
        return self.__dict__.setdefault("_said", [])


@pytest.fixture
def weeks(tmp_path, monkeypatch):
    """A schedule, in the directory where its firings run; no Prefect server is needed."""
    from tests.cli.conftest import KINDS

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(KINDS), str(Path.cwd().parent)]))
    (tmp_path / "weekly.yaml").write_text(FITTING)
    return Weeks(tmp_path)


def test_a_week_in_a_minute(weeks, receiver, monkeypatch):
    """Fault 51: two better, a late one worse, one fails, one without new data, one too many."""
    monkeypatch.setenv("WEEKLY_HOOK", receiver.url("hook"))
    (weeks.folder / "weekly.yaml").write_text(PIPELINE)
    weeks.bring(100)
    first = weeks.fire()
    weeks.command("promote", f"{first.run}/fit", "--as", "production")
    (weeks.folder / "weekly.yaml").write_text(PROMOTING)

    weeks.bring(130)
    better = weeks.fire()
    again = weeks.fire()
    weeks.bring(90)
    long_ago = datetime.now(UTC) - timedelta(days=1)
    missed = weeks.fire(long_ago, later_is_due=True)
    worse = weeks.fire(long_ago + timedelta(hours=1))
    weeks.bring(None)
    failed = weeks.fire(retries=1)
    weeks.bring(160, is_slow=True)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(weeks.fire)
        wait_for(lambda: any(one.run and not one.has_ended for one in weeks.directory.firings()))
        meanwhile = weeks.fire()
        (weeks.folder / "gate").touch()
        slow = slow.result(timeout=400)

    states = [one.state for one in (first, better, again, worse, failed, slow, meanwhile)]
    assert states == ["completed"] * 2 + ["skipped", "completed", "failed", "completed", "skipped"]
    assert again.reason == f"data unchanged since {better.run}"
    assert failed.num_retries == 1
    assert meanwhile.reason == f"{slow.run} runs"
    assert missed.state == "skipped"
    assert "when nothing served; a later one is made up for" in missed.reason
    [alias] = weeks.command.json("aliases")
    by_run = {one["reason"].rpartition(" ")[2]: one["checkpoint"] for one in alias["history"][1:]}
    assert list(by_run) == [better.run, slow.run]
    assert slow.run in weeks.command("why", "@production")
    history = weeks.command("schedule", "history", "weekly", "-w", str(weeks.workspace.root))
    assert history.count("skipped") == 3
    # A failure is told at each of its ends: before it was given new attempts, and after.
    told = [(body["event"], body["run"]) for _, body in receiver.bodies]
    failures = [("failure", failed.run)] * 2
    assert told == [("promotion", better.run), *failures, ("promotion", slow.run)]


@pytest.fixture
def served_for_an_hour(weeks):
    """What is on record where this process has served for an hour."""
    since = datetime.now(UTC) - timedelta(hours=1)
    path = prefect_directory().with_name("serve.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    process = ProcessIdentity.current().to_json()
    write_json(path, {"process": process, "since": since.isoformat()})
    yield since
    path.unlink()


def test_a_firing_is_missed_only_where_nothing_served_when_it_was_due(weeks, served_for_an_hour):
    weeks.bring(100)
    before = weeks.fire(served_for_an_hour - timedelta(minutes=1), missed="skip")
    late = weeks.fire(served_for_an_hour + timedelta(minutes=1), missed="skip")

    assert (before.state, late.state) == ("skipped", "completed")


def test_the_latest_missed_firing_waits_until_those_before_are_skipped(weeks):
    weeks.bring(100)
    long_ago = datetime.now(UTC) - timedelta(days=1)
    dates = [long_ago + timedelta(hours=hours) for hours in range(3)]
    before = [weeks.directory.claim(new_firing(str(uuid4()), due))[0] for due in dates[:2]]
    with ThreadPoolExecutor(1) as pool:
        latest = pool.submit(weeks.fire, dates[2])
        wait_for(lambda: weeks.said, seconds=300)
        for one in before:
            weeks.directory.end_firing(one, FiringState.SKIPPED, "")
        latest = latest.result(timeout=400)

    assert latest.state == "completed"


def test_a_firing_cancels_the_run_before_where_that_is_asked_for(weeks):
    weeks.bring(100, is_slow=True)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(weeks.fire)
        weeks.wait_until_fitting()
        weeks.bring(101)
        second = weeks.fire(overlap="cancel_running")
        first = first.result(timeout=400)

    assert (first.state, second.state) == ("cancelled", "completed")


def test_a_cancelled_firing_cancels_its_run_and_is_tried_again_when_asked(weeks):
    weeks.bring(100, is_slow=True)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        firing = pool.submit(weeks.fire, stop=stop)
        weeks.wait_until_fitting()
        stop.set()
        firing = firing.result(timeout=400)
    assert firing.state == "cancelled"
    assert weeks.command.json("status", firing.run)["state"] == "cancelled"

    (weeks.folder / "gate").touch()
    terms = Terms(
        "weekly", weeks.workspace.root, "weekly.yaml", "local", (), "skip", "latest", retries=0
    )
    firer = Firer(terms, lambda: False, weeks.said.append, threading.Event())
    again = firer.fire(firing.id, datetime.now(UTC))

    assert (again.state, again.run) == ("completed", firing.run)


def test_a_firing_whose_process_was_killed_goes_on_with_the_run_that_it_began(weeks):
    """Fault 50: by whatever process is given the firing again."""
    weeks.bring(100, is_slow=True)
    program = (
        "import sys, threading\n"
        "from datetime import UTC, datetime\n"
        "from pathlib import Path\n"
        "from redco_flow.orchestrate.recurring.firing import Firer, Terms\n"
        "terms = Terms('weekly', Path(sys.argv[1]), 'weekly.yaml', 'local', (), 'skip', 'all', 0)\n"
        "firer = Firer(terms, lambda: False, print, threading.Event())\n"
        "firer.fire('only-one', datetime.now(UTC))\n"
    )
    root = str(weeks.workspace.root)
    process = subprocess.Popen([sys.executable, "-c", program, root], cwd=weeks.folder)
    firing = wait_for(lambda: next((f for f in weeks.directory.firings() if f.run), None))
    process.kill()
    process.wait()
    (weeks.folder / "gate").touch()

    subprocess.run([sys.executable, "-c", program, root], cwd=weeks.folder, check=True)

    [found] = weeks.directory.firings()
    assert (found.state, found.run) == ("completed", firing.run)
    assert len(list(weeks.workspace.runs.iterdir())) == 1


def test_a_firing_that_cannot_begin_fails_and_says_why(weeks):
    weeks.bring(100)

    nowhere = weeks.fire(folder=weeks.folder / "gone")

    assert nowhere.state == "failed"
    assert str(weeks.folder / "gone") in nowhere.reason
    (weeks.folder / "weekly.yaml").write_text(PIPELINE.replace("evaluate", "evalaute"))

    firing = weeks.fire()

    assert firing.state == "failed"
    assert "weekly.yaml:7" in firing.reason
