"""Deleting what is not needed, by records and files that our own publishing functions write."""

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redco_flow.cli.main import run_command
from redco_flow.errors import ArtifactError, DamagedRecord, UsageError
from redco_flow.launch import work_lock
from redco_flow.records import digest_file
from redco_flow.tracking.aliases import AliasName
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.deletions import find_run_deletion, new_deletion, refuse_deleted
from redco_flow.tracking.garbage_collection import SECONDS_IN_USE, Selection, delete, survey
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.promotion import PromotionRequest, PromotionRule, promote
from redco_flow.tracking.results import (
    StageResult,
    claim_result,
    fingerprint,
    hold_result,
    publish_result,
)
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.schedules import Firing, FiringState, Schedule, ScheduleDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, SweepPoint
from redco_flow.tracking.workspace import Workspace

NUM_ORDERS = int(os.environ.get("REDCO_FLOW_TEST_ORDERS", "10"))
EVERYTHING = Selection(keep_last=0, unreferenced=True)
UNREFERENCED = Selection(unreferenced=True)


def run_pipeline(workspace, name="demo", data=0, rate=0, *, stops=False, **record):
    """Do what launcher and workers do: state, reuse, work directory, artifacts, result."""
    run = RunDirectory.create(
        workspace, name, argv=["x", "run", f"{name}.yaml", "--run-id", "r1", "--if-new"], **record
    )
    run.resolved_path.write_text("{}")
    stages: dict = {}

    def write(state):
        run.write_state({"state": state, "stages": stages, "ended_at": utc_now()})

    dataset = _bring(workspace, run, stages, write, "data", "dataset", {"data": data}, {})
    inputs = {"dataset": [dataset]}
    _bring(
        workspace, run, stages, write, "train", "checkpoint", {"rate": rate}, inputs, stops=stops
    )
    write("cancelled" if stops else "completed")
    return run


def _bring(workspace, run, stages, write, stage, kind, config, inputs, *, stops=False):
    ingredients = {"kind": stage, "settings": config, "inputs": inputs}
    digest = fingerprint(ingredients)
    stages[stage] = {"state": "running", "fingerprint": digest}
    write("running")
    result = claim_result(workspace, digest)
    if result is None or stops:
        work = workspace.work_directory(digest)
        holder = {"run": run.id, "stage": stage, "attempt": 1, "pid": 0, "host": "", "since": ""}
        lock = work_lock.acquire(work / "lock", holder, lambda _: None)
        try:
            weights = work / "weights"
            if not weights.exists():
                weights.write_text(f"{kind} of {config} {inputs}")
            if stops:
                return ""
            result = _publish(workspace, run, stage, kind, ingredients, digest, weights)
        finally:
            lock.release()
    stages[stage] |= {"state": "completed", "artifacts": result.outputs}
    return result.outputs[kind]


def _publish(workspace, run, stage, kind, ingredients, digest, weights):
    def publish():
        made_by = {"run": run.id, "stage": stage, "fingerprint": digest}
        digests = {"weights": digest_file(weights)}
        store = ArtifactStore(workspace)
        return {kind: store.publish(kind, weights, digests=digests, produced_by=made_by).id}

    given = {"ingredients": ingredients, "outputs": publish(), "inputs_verified": True}
    about = {"pipeline": run.id.rpartition("-")[0], "stage": stage, "kind": stage, "run": run.id}
    result = publish_result(workspace, StageResult(fingerprint=digest, **about, **given))
    if hold_result(workspace, digest) is None:
        publish()
    return result


def checkpoint_of(workspace, run):
    return run.read_state()["stages"]["train"]["artifacts"]["checkpoint"]


def point_alias(workspace, run, alias="production"):
    checkpoint = ArtifactStore(workspace).get(checkpoint_of(workspace, run))
    promote(workspace, PromotionRequest(checkpoint, AliasName("demo", alias), PromotionRule()))


def collect(workspace, selection, later=0.0):
    return delete(workspace, selection, new_deletion("gc"), now=lambda: time.time() + later)


def remove(workspace, *runs):
    return collect(workspace, Selection(frozenset(run.id for run in runs)))


def is_whole(workspace, artifact_id):
    return ArtifactStore(workspace).is_whole(artifact_id)


def test_what_another_run_uses_stays_and_the_rest_of_a_deleted_run_goes(workspace):
    first, second = run_pipeline(workspace, rate=1), run_pipeline(workspace, rate=2)
    dataset = first.read_state()["stages"]["data"]["artifacts"]["dataset"]
    of_first = checkpoint_of(workspace, first)

    deleted = remove(workspace, first)

    assert dict(deleted.survey.kept) == {dataset: f"run {second.id}"}
    assert is_whole(workspace, dataset)
    assert is_whole(workspace, checkpoint_of(workspace, second))
    artifact = ArtifactStore(workspace).get(of_first)  # its manifest stays
    with pytest.raises(ArtifactError, match=r"deleted .* UTC by .* \(`gc`\).*run demo.yaml`"):
        refuse_deleted(workspace, artifact)
    assert checkpoint_of(workspace, run_pipeline(workspace, rate=1)) == of_first
    refuse_deleted(workspace, ArtifactStore(workspace).get(of_first))


def test_the_size_of_a_deletion_is_what_the_disk_gets_back(workspace):
    run = run_pipeline(workspace)
    (workspace.work / "0123456789abcdef").mkdir()
    (workspace.work / "0123456789abcdef" / "big").write_bytes(b"x" * 5000)
    found = survey(workspace, Selection(frozenset({run.id})))
    linked = sum(one.path.is_dir() and one.what == "work directory" for one in found.garbage)
    before = sum(p.stat().st_size for p in _files(workspace))

    deleted = collect(workspace, EVERYTHING)

    records = sum(p.stat().st_size for p in _files(workspace) if p.name == "deleted.json")
    after = sum(p.stat().st_size for p in _files(workspace))
    assert linked == 2
    assert before - (after - records) == deleted.size.num_bytes > 5000


def _files(workspace):
    return {p.lstat().st_ino: p for p in workspace.root.rglob("*") if p.is_file()}.values()


def _named_by_schedule(workspace, run):
    schedule = ScheduleDirectory.of(workspace, "nightly")
    pipeline = workspace.root / "demo.yaml"
    pipeline.write_text("name: demo")
    schedule.write(Schedule("nightly", str(pipeline), str(workspace.root)))
    schedule.write_firing(Firing("1", utc_now(), FiringState.COMPLETED, run=run.id))


def _named_as_run_by_schedule(workspace, run):
    schedule = ScheduleDirectory.of(workspace, "weekly")
    pipeline = workspace.root / "weekly.yaml"
    pipeline.write_text(f"name: weekly\nstages: {{train: {{start_from: {run.id}/train}}}}")
    schedule.write(Schedule("weekly", str(pipeline), str(workspace.root)))


def _pinned_by_run(workspace, run):
    other = run_pipeline(workspace, "other", data=9)
    other.resolved_path.write_text(f"checkpoint: {checkpoint_of(workspace, run)}")


def _of_open_sweep(workspace, run):
    sweep = SweepDirectory.create(workspace, "demo")
    points = [SweepPoint(one.id, []) for one in (run, run_pipeline(workspace, stops=True))]
    sweep.write(points, max_parallel=1, argv=[])


@pytest.mark.parametrize(
    ("use", "selection"),
    [
        (point_alias, EVERYTHING),
        (_named_by_schedule, EVERYTHING),
        (_of_open_sweep, EVERYTHING),
        (_named_as_run_by_schedule, EVERYTHING),
        (_pinned_by_run, Selection(keep_last=1, unreferenced=True)),
    ],
)
def test_what_an_alias_a_schedule_a_sweep_or_a_pin_needs_is_not_deleted(workspace, use, selection):
    run = run_pipeline(workspace, rate=1)
    use(workspace, run)
    run_pipeline(workspace, rate=2)

    if use not in (_pinned_by_run, _named_as_run_by_schedule):
        with pytest.raises(
            UsageError, match=rf"run {run.id} is not deleted: .*Nothing was changed"
        ):
            remove(workspace, run)
    collect(workspace, selection, later=2 * SECONDS_IN_USE)

    assert is_whole(workspace, checkpoint_of(workspace, run))


def test_a_stopped_run_keeps_its_work_until_it_is_named(workspace):
    run = run_pipeline(workspace, stops=True)

    collect(workspace, EVERYTHING, later=2 * SECONDS_IN_USE)
    assert list(workspace.work.glob("*/weights"))

    remove(workspace, run)
    assert not list(workspace.work.glob("*/weights"))
    assert not list(workspace.artifacts.glob("*/*/files"))


def test_a_damaged_record_stops_a_deletion_before_anything_is_deleted(workspace):
    run, other = run_pipeline(workspace, rate=1), run_pipeline(workspace, rate=2)
    other.state_path.write_text("{")

    with pytest.raises(DamagedRecord, match=re.escape(str(other.state_path))):
        remove(workspace, run)

    assert is_whole(workspace, checkpoint_of(workspace, run))


@pytest.mark.parametrize("name", ["{}/lock", "{}.claim"])
def test_what_a_worker_or_a_launcher_has_locked_is_not_deleted(workspace, name):
    run = run_pipeline(workspace)
    digest = run.read_state()["stages"]["train"]["fingerprint"]
    work = workspace.work_directory(digest)

    with exclusive(workspace.work / name.format(work.name)):
        remove(workspace, run)

    assert is_whole(workspace, checkpoint_of(workspace, run))
    assert (work / "weights").exists()
    collect(workspace, UNREFERENCED)  # the run is marked: the next pass completes it
    assert not list(workspace.artifacts.glob("*/*/files"))
    assert not work.exists()


def test_a_result_is_reused_after_a_deletion_that_goes_on_or_not_at_all(workspace):
    run = run_pipeline(workspace)
    digest = run.read_state()["stages"]["train"]["fingerprint"]
    claimed = []
    thread = threading.Thread(target=lambda: claimed.append(claim_result(workspace, digest)))

    with exclusive(workspace.artifacts_lock):  # as a deletion does
        thread.start()
        time.sleep(0.2)
        assert not claimed
        files = ArtifactStore(workspace).get(checkpoint_of(workspace, run)).path
        files.rename(workspace.root / "deleted")
    thread.join()

    assert claimed == [None]


def test_a_worker_that_waits_gets_the_lock_of_the_new_work_directory(workspace):
    path = workspace.work_directory("0" * 64) / "lock"
    first = work_lock.acquire(path, {}, lambda _: None)

    def while_waiting(_):
        if path.parent.exists():
            path.parent.rename(workspace.root / "deleted")
            first.release()

    lock = work_lock.acquire(path, {"run": "x"}, while_waiting)

    assert json.loads(path.read_text()) == {"run": "x"}
    lock.release()


def test_files_of_predict_stay_as_long_as_a_run_can_be_resumed(workspace):
    digests = {"stopped": 16 * "a", "done": 16 * "b", "left": 16 * "c"}
    folders = {name: workspace.predict / digest for name, digest in digests.items()}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text("{}")
    for name in ("stopped", "done"):
        path = str(folders[name] / "pipeline.yaml")
        run_pipeline(workspace, name, stops=name == "stopped", pipeline_path=path)

    collect(workspace, UNREFERENCED)
    assert {p.name for p in workspace.predict.iterdir()} == set(digests.values())

    collect(workspace, UNREFERENCED, later=2 * SECONDS_IN_USE)
    assert [p.name for p in workspace.predict.iterdir()] == [digests["stopped"]]


def test_old_cache_files_and_digests_of_deleted_artifacts_go(workspace):
    run = run_pipeline(workspace)
    digests = workspace.cache / "artifacts" / f"{checkpoint_of(workspace, run)}.json"
    program = workspace.cache / "jax" / "program"
    for path in (digests, program):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")

    collect(workspace, Selection(older_than=timedelta(days=30)))
    assert (digests.exists(), program.exists()) == (True, True)
    remove(workspace, run)
    assert (digests.exists(), program.exists()) == (False, True)
    collect(workspace, Selection(older_than=timedelta(days=30)), later=31 * 86400.0)
    assert not program.exists()


FULL_DISK = f"""
import errno, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_garbage_collection import *

workspace = Workspace.open(sys.argv[1])
run = run_pipeline(workspace)
full = 0
with open(workspace.root / "filler", "wb", buffering=0) as filler:
    for size in (1 << 16, 1 << 10, 1):
        try:
            while True:
                filler.write(b"x" * size)
        except OSError as error:
            full += error.errno in (errno.ENOSPC, errno.EFBIG)
assert full == 3
remove(workspace, run)
assert not list(workspace.artifacts.glob("*/*/files"))
print(len(list(workspace.root.rglob("deleted.json"))))
"""


def test_a_full_disk_can_be_emptied(on_small_disk):
    """Each record is written when the deleted files have made room for it."""
    assert on_small_disk(FULL_DISK) == "3\n"


KILLS = st.none() | st.integers(0, 150)
RUNS = st.tuples(st.just("run"), st.sampled_from("ab"), *[st.integers(0, 1)] * 2, st.booleans())
SELECTIONS = st.builds(
    Selection,
    keep_last=st.none() | st.integers(0, 2),
    older_than=st.none() | st.just(timedelta(hours=1)),
    unreferenced=st.booleans(),
)
STEPS = st.one_of(
    RUNS,
    st.tuples(st.just("promote"), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.integers(0, 5)),
    st.tuples(st.just("collect"), SELECTIONS, st.sampled_from([0.0, 2 * SECONDS_IN_USE])),
)
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "shutil.rmtree"}


@settings(max_examples=NUM_ORDERS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(st.tuples(STEPS, KILLS), min_size=4, max_size=12))
def test_in_any_order_nothing_needed_is_lost_and_nothing_else_survives(steps):
    """Runs, promotions, deletions and kill -9 at any access to a file."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        workspace = Workspace.open(folder)
        for step, kill in steps:
            before = _whole(workspace)
            _perform(workspace, step, kill)
            lost = (before & _needed(workspace)) - _whole(workspace)
            assert not lost
            assert not _lost_work(workspace)
        collect(workspace, UNREFERENCED, later=2 * SECONDS_IN_USE)

        assert _whole(workspace) <= _needed(workspace)
        assert not _lost_work(workspace)
        names = {path.name for path in workspace.work.iterdir() if path.is_dir()}
        assert names <= _open_work(workspace)
        assert not list(workspace.root.glob("trash/*"))
        assert not list(workspace.artifacts.glob("*/.*"))
        for run in _runs(workspace):  # records stay, and every run can be repeated
            assert run.record["name"] in "ab"
        run_pipeline(workspace, "a")


def _perform(workspace, step, kill):
    def work():
        # Refused: it is needed, it was deleted, or there is no run.
        with contextlib.suppress(UsageError, ArtifactError, StopIteration):
            _step(workspace, *step)

    if kill is None:
        work()
        return
    if (pid := os.fork()) == 0:
        accesses = itertools.count()

        def on_event(event, _):
            if event in EVENTS and next(accesses) == kill:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(on_event)
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _step(workspace, what, *words):
    if what == "run":
        name, data, rate, stops = words
        run_pipeline(workspace, name, data, rate, stops=stops)
    elif what == "collect":
        collect(workspace, *words)
    else:
        runs = _runs(workspace)
        run = next(itertools.islice(runs, words[0] % len(runs), None)) if runs else next(iter(()))
        if what == "remove":
            remove(workspace, run)
        elif run.read_state()["state"] == "completed":
            point_alias(workspace, run, "production")


def _runs(workspace):
    return [RunDirectory(path) for path in sorted(workspace.runs.glob("[!.]*"))]


def _kept(workspace):
    return [run for run in _runs(workspace) if not (run.path / "deleted.json").exists()]


def _whole(workspace):
    """Ids of the artifacts whose file has the content that was published."""
    found = set()
    for path in workspace.artifacts.glob("[!.]*/[!.]*/manifest.json"):
        record = json.loads(path.read_text())
        weights = path.parent / "files" / "weights"
        if weights.exists() and digest_file(weights) == record["files"][0]["blake3"]:
            found.add(record["id"])
    return found


def _needed(workspace):
    """By the records alone: what runs have, or are about to reuse, and what the alias names."""
    found = set()
    for run in _kept(workspace):
        state = run.read_state()
        for stage in state["stages"].values():
            found |= set(stage.get("artifacts", {}).values())
            path = workspace.results / f"{stage['fingerprint']}.json"
            if state["state"] != "completed" and path.exists():
                found |= set(json.loads(path.read_text())["outputs"].values())
    for path in workspace.aliases.glob("*/[!.]*.json"):
        history = json.loads(path.read_text())["history"]
        found |= {event["checkpoint"] for event in history[-2:]}
    return found


def _open_work(workspace):
    runs = [run.read_state() for run in _kept(workspace)]
    stages = [one for run in runs if run["state"] != "completed" for one in run["stages"].values()]
    return {stage["fingerprint"][:16] for stage in stages}


def _lost_work(workspace):
    """Stopped runs whose weights are neither in the work directory nor published."""
    return [
        run.id
        for run in _kept(workspace)
        for state in [run.read_state()]
        if state["state"] == "cancelled"
        for digest in [state["stages"]["train"]["fingerprint"]]
        if not (workspace.work_directory(digest) / "weights").exists()
        and hold_result(workspace, digest) is None
    ]


def test_what_is_not_ours_stays_in_work_and_trash(workspace):
    run_pipeline(workspace)
    others = [workspace.root / name for name in ("work/thesis", "predict/model", "trash/photos")]
    for folder in others:
        folder.mkdir(parents=True)
        (folder / "mine").write_text("")
        os.utime(folder, (0, 0))

    delete(workspace, EVERYTHING, new_deletion("gc"), now=lambda: time.time() + 2 * SECONDS_IN_USE)

    assert all((folder / "mine").exists() for folder in others)


@pytest.mark.parametrize("linked", ["work", "artifacts", "trash"])
def test_nothing_is_deleted_behind_a_link(workspace, tmp_path, linked):
    run = run_pipeline(workspace)
    elsewhere, folder = tmp_path / "elsewhere", workspace.root / linked
    folder.mkdir(exist_ok=True)
    (folder / "0123456789abcdef").mkdir()
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))

    with pytest.raises((UsageError, OSError), match="link"):
        remove(workspace, run)

    assert sorted(elsewhere.rglob("*")) == before
    assert find_run_deletion(run) is None


def test_a_schedule_whose_pipeline_cannot_be_read_stops_a_deletion(workspace, tmp_path):
    run_pipeline(workspace)
    schedule = Schedule("nightly", str(tmp_path / "gone.yaml"), str(tmp_path))
    ScheduleDirectory.of(workspace, "nightly").write(schedule)

    with pytest.raises(UsageError, match="not known which artifacts it needs"):
        survey(workspace, EVERYTHING)


def test_a_folder_that_is_no_workspace_and_a_run_of_another_one_are_refused(
    workspace, tmp_path, capsys
):
    run = run_pipeline(Workspace.open(tmp_path / "other"))

    for *words, said in (
        ("gc", "--unreferenced", "-w", str(tmp_path), "is not a workspace"),
        ("rm", str(run.path), "-w", str(workspace.root), "is a run of another workspace"),
    ):
        assert run_command(words) == 2
        assert said in capsys.readouterr().err
