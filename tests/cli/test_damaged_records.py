"""Every record of a workspace, damaged in every way: who reads it, and who stands beside it."""

import itertools
import json
import shutil

import pytest
from orchestrate_runs import InProcess, Runs

from redco_flow.cli.main import run_command
from redco_flow.report.page import read_page, render_page
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, SweepPoint
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import PIPELINE

pytestmark = pytest.mark.slow

# Of a run: what all else hangs on by itself, for it hides the rest; the others together.
OF_THE_RUN = [
    ["run.json"],
    ["state.json"],
    [
        "plan.json",
        "origins.json",
        "launch.json",
        "lease.json",
        "journal.jsonl",
        "stages/total/shared.json",
        *(
            f"stages/total/attempts/1/{name}"
            for name in (
                "call.json",
                "job.json",
                "exit.json",
                "result.json",
                "error.json",
                "progress.json",
                "metrics.jsonl",
            )
        ),
    ],
]
PUBLISHED = [["result"], ["manifest"], ["latest pointer", "digest cache", "sequence"]]
# A torn last line, a journal to which nothing was written, a measurement of nothing, a pipeline
# without settings.
SOUND = {
    "cut": {"journal.jsonl", "metrics.jsonl"},
    "emptied": {"journal.jsonl", "metrics.jsonl"},
    "empty object": {"origins.json", "metrics.jsonl"},
    "wrong type": {"metrics.jsonl"},
}


def wrong_type(text):
    """The record's fields, each of another type; of lines, the last line's."""
    head, _, last = text.rstrip("\n").rpartition("\n") if text.startswith('{"') else ("", "", text)
    try:
        record = json.loads(last)
    except ValueError:
        return "[[]]"
    swapped = {key: [5] if not isinstance(value, list) else 5 for key, value in record.items()}
    return (f"{head}\n" if head else "") + json.dumps(swapped) + "\n"


DAMAGES = {
    "cut": lambda text: text[: len(text) // 2],
    "emptied": lambda text: "",
    "null": lambda text: "null\n",
    "list": lambda text: "[]\n",
    "empty object": lambda text: "{}\n",
    "wrong type": wrong_type,
    "binary": lambda text: "\x00\udcff\udcfe\x80" * 40 + "\n",
}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A folder with a workspace of two real runs, of which the newer one is to be damaged."""
    folder = tmp_path_factory.mktemp("two-runs")
    runs = Runs(folder)
    first, second = (_complete(runs, rate) for rate in ("2.0", "3.0"))
    (folder / "workspace").rename(folder / "redco-workspace")
    (folder / "sums.yaml").write_text(PIPELINE)
    run = RunDirectory(folder / "redco-workspace" / "runs" / second)
    # What a live or a failed run has besides.
    attempt = run.attempt("total", 1)
    lease = {"pid": 1, "start_time": 1, "boot_id": "gone", "host": "here", "acquired_at": "then"}
    (run.path / "lease.json").write_text(json.dumps(lease))
    attempt.progress_path.write_text(json.dumps(attempt.read_progress()))
    attempt.error_path.write_text('{"type": "ValueError", "message": "no", "traceback": ""}')
    attempt.metrics_path.write_text('{"step": 1, "loss": 2.0}\n')
    shared = {"attempt": str(attempt.path), "own_attempts": 0}
    (run.path / "stages/total/shared.json").write_text(json.dumps(shared))
    return folder, first, second


def _complete(runs, rate):
    """Run the pipeline to its end, without a Prefect server; return the run's id."""
    run = runs.write(PIPELINE, [f"learning_rate={rate}"])
    assert InProcess(run).end().state == "completed"
    return run.id


@pytest.fixture
def workspace(two_runs, tmp_path, monkeypatch):
    """A copy of it, in the current folder; the older run's id and the newer one's."""
    folder, first, second = two_runs
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    return Workspace(tmp_path / "copy" / "redco-workspace"), first, second


def say(capfd, *words):
    """Run a verb in this process; it ends as a verb does, whatever it finds."""
    code = run_command(words)
    out, err = capfd.readouterr()
    assert code in (0, 1, 2), f"{words}: {code}\n{err}"
    assert "Traceback" not in out + err
    return code, out, err


def path_of(workspace, run_id, what, stage="total"):
    run = RunDirectory(workspace.runs / run_id)
    fingerprint = run.read_state()["stages"][stage]["fingerprint"]
    artifact = next(iter(run.read_state()["stages"][stage]["artifacts"].items()))
    return {
        "result": workspace.results / f"{fingerprint}.json",
        "manifest": next(workspace.artifacts.glob(f"*/{artifact[1][:16]}/manifest.json")),
        "latest pointer": workspace.results / "latest" / "sums" / f"{stage}.json",
        "digest cache": workspace.cache / "digests.json",
        "sequence": workspace.root / "sequence",
    }.get(what, run.path / what)


def damage(path, how):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else '{"x": ["y"]}'
    path.unlink(missing_ok=True)
    path.write_text(DAMAGES[how](text), errors="surrogateescape")


def read_everything(capfd, workspace, damaged, healthy):
    """All reading verbs on both runs; return what `status` and `ls` say of them."""
    for verb in ("status", "logs"):
        for run in (damaged, healthy, "@last"):
            say(capfd, verb, run)
    for run in (damaged, healthy, "@last"):
        say(capfd, "why", f"{run}/total")
    for words in (("why", "total"), ("artifacts",), ("verify",), ("ls",), ("artifacts", "--json")):
        say(capfd, *words)
    for run in (damaged, healthy):
        page = render_page(read_page(RunDirectory(workspace.runs / run), workspace, utc_now()))
        assert "could not be drawn" not in page
    healthy_why, text, _ = say(capfd, "why", f"{healthy}/total/total")
    assert healthy_why == 0
    assert "total = 12" in text
    listed = {one["run"]: one for one in json.loads(say(capfd, "ls", "--json")[1])}
    assert set(listed) == {damaged, healthy}
    assert listed[healthy]["state"] == "completed"
    assert listed[healthy]["damaged"] == []
    say(capfd, "impact", listed[healthy]["stages"]["numbers"]["artifacts"]["dataset"])
    return json.loads(say(capfd, "status", damaged, "--json")[1]), listed[damaged]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_with_damaged_records_is_shown_so_and_takes_nothing_from_the_others(
    workspace, capfd, how
):
    """Fault 42: of a run and its attempts."""
    workspace, healthy, damaged = workspace
    for names in OF_THE_RUN:
        paths = [path_of(workspace, damaged, name) for name in names]
        before = {path: path.read_bytes() for path in paths}
        for path in paths:
            damage(path, how)

        status, listed = read_everything(capfd, workspace, damaged, healthy)

        told = " ".join(status["damaged"])
        sound = SOUND.get(how, set())
        assert {path.name for path in paths if str(path) not in told} == sound & {
            path.name for path in paths
        }
        is_known = len(names) > 1
        assert listed["state"] == status["state"] == ("completed" if is_known else "damaged")
        assert "damaged" in say(capfd, "ls")[1]
        last = say(capfd, "status", "--json")[1]
        assert json.loads(last)["run"] == (healthy if names == ["run.json"] else damaged)
        for path, content in before.items():
            path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_result_or_manifest_counts_as_not_there_and_is_said(workspace, capfd, how):
    """Fault 42: of what is published."""
    workspace, healthy, damaged = workspace
    for names in PUBLISHED:
        paths = [path_of(workspace, damaged, name) for name in names]
        before = {path: path.read_bytes() for path in paths if path.exists()}
        for path in paths:
            damage(path, how)

        read_everything(capfd, workspace, damaged, healthy)
        code, out, _ = say(capfd, "plan", "sums.yaml", "learning_rate=3.0", "--json")

        assert code == 0
        planned = json.loads(out)["stages"]["total"]
        assert planned["action"] == ("reuse" if len(names) > 1 else "run")
        if names == ["result"]:
            assert planned["reason"] == "its result's record is damaged"
        if names == ["manifest"]:
            code, _, told = say(capfd, "verify")
            assert code == 1
            assert str(paths[0]) in told
        for path in paths:
            path.unlink()
        for path, content in before.items():
            path.write_bytes(content)


def test_a_new_run_works_beside_a_damaged_one_and_makes_damaged_results_again(workspace, capfd):
    """Fault 42: the next run, in a workspace with one of every kind damaged."""
    workspace, first, second = workspace
    names = ["sequence", "latest pointer", "result", *OF_THE_RUN[2][:3], "state.json", "run.json"]
    paths = [path_of(workspace, first, "manifest", "numbers")]
    paths += [path_of(workspace, first, name) for name in names]
    last = RunDirectory(workspace.runs / second).sequence
    for path, how in zip(paths, itertools.cycle(DAMAGES), strict=False):
        damage(path, how)
    folder = workspace.root.parent
    workspace.root.rename(folder / "workspace")

    runs = Runs(folder)
    again = runs.write(PIPELINE, ["learning_rate=2.0"])
    outcome = InProcess(again).end()

    assert outcome.state == "completed"
    stages = again.read_state()["stages"]
    assert not stages["numbers"]["reused"]
    assert stages["total"]["metrics"]["total"] == 12.0
    assert again.sequence > last
    where = ("--workspace", str(folder / "workspace"), "--json")
    assert json.loads(say(capfd, "verify", *where)[1])["problems"] == {}
    assert json.loads(say(capfd, "status", *where)[1])["run"] == again.id


@pytest.mark.parametrize("content", [b"", b"nonsense\n", b"0000000000", b"\xff" * 99, b"[]"])
def test_a_damaged_counter_goes_on_after_what_stands(tmp_path, content):
    """Fault 42: the workspace's sequence."""
    workspace = Workspace.open(tmp_path)
    runs = [RunDirectory.create(workspace, "demo") for _ in range(3)]
    (runs[2].path / "run.json").write_text("{")
    (workspace.root / "sequence").write_bytes(content)

    found = [workspace.next_sequence() for _ in range(2)]

    assert found == [runs[1].sequence + 1, runs[1].sequence + 2]


def test_one_damaged_point_leaves_its_sweep_readable(tmp_path, capfd):
    """Fault 42: of a sweep."""
    workspace = Workspace.open(tmp_path)
    sweep = SweepDirectory.create(workspace, "sums")
    runs = [RunDirectory.create(workspace, "sums", sweep=sweep.id) for _ in range(2)]
    points = [SweepPoint(run.id, [f"seed={n}"]) for n, run in enumerate(runs)]
    sweep.write(points, max_parallel=1, argv=[])
    where = ["--workspace", str(tmp_path)]
    runs[0].state_path.write_text("[]")

    view = json.loads(say(capfd, "status", sweep.id, "--json", *where)[1])

    assert view["points"][0]["state"] == "damaged"
    assert say(capfd, "status", sweep.id, *where)[0] == 0
    for how in DAMAGES:
        damage(sweep.path / "sweep.json", how)
        code, _, told = say(capfd, "status", sweep.id, *where)
        assert code == 2
        assert f"{sweep.path / 'sweep.json'}: damaged record" in told
        assert say(capfd, "ls", *where)[0] == 0
