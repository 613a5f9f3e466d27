"""The page of all runs that `redco-flow ui` serves: who is let in, what it lists, live curves."""

import contextlib
import json
import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe

from redco_flow.records import read_json
from redco_flow.tracking.notes import read_notes, write_notes
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.schedules import Firing, Schedule, ScheduleDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, SweepPoint
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Served, wait_for

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=\"document.title='taken'\">"
STARTED = "2026-01-31T12:00:00.000+00:00"
ENDED = "2026-01-31T12:04:10.000+00:00"
# Longer than a test, which cancels it, and no more than some steps a second.
TRAINING = """\
name: line
recipe: python:line
data: {train: line.jsonl, validation_fraction: 0.0, columns: {x: x, y: y}}
stages:
  preprocess: {}
  train: {num_epochs: 100000, global_batch_size: 2, learning_rate: 1e-3, log_every_steps: 1}
"""
RECIPE = """\
import time
import numpy as np

COLUMNS = ("x", "y")

def init_params(key):
    return {"w": np.float32(0.0), "b": np.float32(0.0)}

def collate_fn(examples):
    time.sleep(0.2)
    return {name: np.array([one[name] for one in examples], np.float32) for name in COLUMNS}

def loss_fn(params, batch, rngs, is_training):
    return ((params["w"] * batch["x"] + params["b"] - batch["y"]) ** 2).mean()

def pred_fn(params, batch, rngs):
    return params["w"] * batch["x"] + params["b"]
"""


def make_run(workspace, name="sums", *, state="completed", accuracy=None, message="", **given):
    run = RunDirectory.create(workspace, name, argv=["redco-flow", "run", f"{name}.yaml"], **given)
    made = {"state": "completed", "artifacts": {"metrics": "0" * 64}, "kind": "evaluate"}
    stages = {"evaluate": {**made, "metrics": {"accuracy": accuracy}}} if accuracy else {}
    times = {"started_at": STARTED, "ended_at": ENDED}
    run.write_state({"state": state, "exit_code": 0, "message": message, "stages": stages, **times})
    return run


@pytest.fixture
def workspace(command):
    return Workspace.open(command.folder / "redco-workspace")


@pytest.fixture
def serve(command, workspace):
    with contextlib.ExitStack() as stack:

        def start(*words):
            served = Served(command, *words)
            stack.callback(served.process.kill)
            return served

        yield start


@pytest.fixture
def open_page(chromium):
    """Open an address in a browser that was never there; it must complain of nothing."""
    with contextlib.ExitStack() as stack:

        def open_(address, *, width=1300, scheme="light"):
            view = {"width": width, "height": 800}
            context = chromium.new_context(viewport=view, color_scheme=scheme)
            stack.callback(context.close)
            context.set_default_timeout(300_000)
            page = context.new_page()
            page.asked, page.complaints = [], []
            page.on("request", lambda one: page.asked.append(one.url))
            page.on("console", lambda one: page.complaints.append(one.text))
            page.on("pageerror", lambda one: page.complaints.append(str(one)))
            page.goto(address)
            return page

        yield open_


def violations(page):
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


def listed(page):
    page.wait_for_selector("html.has-rows", state="attached")
    return page.locator("#table tbody a.id").all_inner_texts()


def test_only_the_printed_link_lets_a_browser_in_and_only_under_this_machines_name(
    serve, workspace, command
):
    run = make_run(workspace)
    log = run.new_attempt("evaluate").log_path()
    log.write_text("worker says hello\n")
    (command.folder / "private.log").write_text("private")
    (log.parent / "link.log").symlink_to(command.folder / "private.log")
    served = serve()
    name = served.cookie.partition("=")[0]
    edit = {"run": run.id, "note": "seen", "labels": "", "edited_at": ""}
    logs = f"/run/{run.id}/{log.parent.relative_to(run.path)}"

    answers = {
        "no cookie": served.ask("/", cookie=""),
        "another cookie": served.ask("/", cookie=f"{name}=guess"),
        "another token": served.ask("/?token=guess", cookie=""),
        "an old token": served.ask("/?token=old"),
        # As another program of this host may set one.
        "unusual cookie": served.ask("/", cookie=f'a[b]={{"c": 1}}; {served.cookie}'),
        "another host": served.ask("/api/runs", host="attacker.example"),
        "another site": served.ask("/api/notes", edit, origin="http://attacker.example"),
        "no cookie, changes": served.ask("/api/notes", edit, cookie=""),
        "localhost": served.ask("/", host=f"localhost:{served.address.port}"),
        "log": served.ask(f"{logs}/rank0.log"),
        "link": served.ask(f"{logs}/link.log"),
        "outside": served.ask(f"/run/{run.id}/../../../private.log"),
        "elsewhere": served.ask(f"//attacker.example/?{served.address.query}", cookie=""),
    }

    expected = [401, 401, 401, 200, 200, 403, 403, 401, 200, 200, 404, 404, 303]
    assert {name: one.status for name, one in answers.items()} == dict(
        zip(answers, expected, strict=True)
    )
    assert answers["elsewhere"].getheader("Location") == "/attacker.example/"
    assert answers["log"].content == b"worker says hello\n"
    assert read_notes(run).note == ""
    policy = answers["localhost"].getheader("Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    secret = served.link.partition("token=")[2].encode()
    assert not any(secret in one.content for one in answers.values())
    assert served.end() == (0, f"the runs of {workspace.root}; Ctrl-C ends the page\nended\n")


def test_a_page_that_cannot_be_served_is_refused_in_one_line(serve, command, tmp_path):
    served = serve()
    port = str(served.address.port)
    (tmp_path / "foreign").mkdir()

    taken = command("ui", "--port", port, code=2)
    both = command("ui", "--prefect", "--port", port, code=2)
    missing = command("ui", "-w", str(tmp_path / "foreign"), code=2)
    unknown = command("ui", "nothing-here", code=2)

    assert [one.count("\n") for one in (taken, both, missing, unknown)] == [1, 1, 1, 1]
    assert f"cannot listen at 127.0.0.1, port {port} (Address already in use)" in taken
    assert "--port is of the page of all runs" in both
    assert f"{tmp_path / 'foreign'} is no workspace: it has no directory `runs`." in missing
    assert "no runs in" in unknown


def test_rows_follow_the_files_and_a_damaged_or_deleted_run_hides_no_other(
    serve, workspace, command
):
    good, torn, gone = (make_run(workspace, accuracy=0.5) for _ in range(3))
    served = serve()
    before = served.rows()
    etag = served.ask("/api/runs").getheader("ETag")
    unchanged = served.ask("/api/runs", **{"If-None-Match": etag})
    live = served.ask(f"/run/{gone.id}/live")

    torn.state_path.write_text("{")
    shutil.rmtree(gone.path)
    (good.path / "state.json").write_text(
        json.dumps({**good.read_state(), "state": "failed", "message": "out of memory"})
    )
    after = served.rows()

    assert before[good.id]["metrics"] == {"accuracy": 0.5}
    assert before[good.id]["seconds"] == 250.0
    assert (unchanged.status, unchanged.content, live.status) == (304, b"", 200)
    assert set(after) == {good.id, torn.id}
    assert (after[good.id]["state"], after[good.id]["message"]) == ("failed", "out of memory")
    assert after[torn.id]["state"] == "damaged"
    assert str(torn.state_path) in after[torn.id]["damage"]
    shutil.copy(good.state_path, torn.state_path)
    assert served.rows()[torn.id]["damage"] == ""
    refused = served.ask(f"/run/{gone.id}/live", **{"Sec-Fetch-Dest": "empty"})
    assert refused.status == 404
    assert f"There is no run {gone.id}" in json.loads(refused.content)["error"]
    assert served.ask(f"/run/{torn.id}/").status == 200


def test_notes_are_a_file_beside_the_run_and_no_edit_is_lost(serve, workspace, command):
    run = make_run(workspace)
    served = serve()
    edit = {"run": run.id, "note": "keep it\n", "labels": "paper, , paper,best", "edited_at": ""}

    saved = served.ask("/api/notes", edit)
    stale = served.ask("/api/notes", {**edit, "note": "mine"})
    long = {**edit, "edited_at": json.loads(saved.content)["edited_at"], "labels": "x" * 41}
    wrong = served.ask("/api/notes", long)
    incomplete = served.ask("/api/notes", {"run": run.id})

    half = served.ask("/api/notes", {**long, "labels": "", "note": "\ud800"})

    answers = (saved, stale, wrong, incomplete, half)
    assert [one.status for one in answers] == [200, 409, 400, 400, 400]
    assert json.loads(stale.content)["present"]["note"] == "keep it"
    assert read_json(run.path / "notes.json")["note"] == "keep it"
    assert read_notes(run).labels == ["paper", "best"]
    assert "at most 40 printable characters" in json.loads(wrong.content)["error"]
    assert command.json("ls")[0]["labels"] == ["paper", "best"]
    assert "labels: paper, best\nnote: keep it\n" in command("status", run.id)


def test_runs_are_filtered_sorted_compared_and_annotated_in_the_browser(
    serve, workspace, open_page
):
    sweep = SweepDirectory.create(workspace, "sums")
    for index in range(6):
        given = {"overrides": [f"rate={index}"], "tags": ["fast"] if index % 2 else []}
        run = make_run(workspace, accuracy=0.5 + index / 10, sweep=sweep.id, **given)
    sweep.write([SweepPoint(run.id, ["rate=5"])], max_parallel=1, argv=[])
    hostile = make_run(workspace, "texts", tags=[HOSTILE], overrides=[HOSTILE], message=HOSTILE)
    write_notes(hostile, HOSTILE, [HOSTILE[:40]])
    schedule = ScheduleDirectory.of(workspace, "weekly")
    schedule.write(Schedule("weekly", "/sums.yaml", "/", cron="0 3 * * 1"))
    schedule.write_firing(Firing("1", STARTED, "failed", reason=HOSTILE))
    served = serve()
    page = open_page(served.link)
    assert listed(page)[0] == hostile.id
    assert len(listed(page)) == 7

    page.select_option("[name=tag]", "fast")
    page.select_option("[name=metric]", "accuracy")
    page.fill("[name=value]", "0.65")
    page.locator("thead button", has_text="accuracy").click()
    fast = listed(page)
    scores = page.locator("#table tbody td.num:nth-child(4)").all_inner_texts()
    page.reload()  # the filters are in the address
    assert listed(page) == fast

    assert scores == ["1.00", "0.8000"]
    page.locator("tbody input[type=checkbox]").first.check()
    page.locator("tbody input[type=checkbox]").last.check()
    page.locator("tbody button.edit").first.click()
    page.fill("dialog [name=labels]", "winner")
    page.fill("dialog [name=note]", HOSTILE)
    page.locator("dialog button.main").click()
    page.locator("#table .chip.label", has_text="winner").wait_for()
    assert read_notes(RunDirectory(workspace.runs / fast[0])).note == HOSTILE
    page.fill("[name=q]", fast[0])
    assert page.inner_text("#compare") == "Compare 2 (1 not listed)"
    page.locator("thead button", has_text="state").press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "state"
    page.locator("#compare").click()
    page.get_by_role("heading", name="2 runs").wait_for()
    assert all(page.get_by_role("link", name=run).is_visible() for run in fast)
    page.get_by_role("link", name="All runs").click()
    listed(page)
    page.locator("button[data-view=sweeps]").click()
    page.get_by_role("link", name=sweep.id, exact=True).click()
    page.get_by_role("heading", name=sweep.id).wait_for()
    page.goto(f"{served.base}/run/{hostile.id}/")
    page.locator(".notes .text").wait_for()
    assert page.title() == f"{hostile.id}: completed"
    assert HOSTILE in page.inner_text(".notes .text")

    assert page.complaints == []
    assert {url for url in page.asked if not url.startswith((served.base, "data:"))} == set()


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark")])
def test_the_pages_fit_and_are_accessible(serve, workspace, open_page, width, scheme):
    make_run(workspace, accuracy=0.5, overrides=["a=1"], tags=["fast"])
    write_notes(make_run(workspace, state="failed", message="boom"), "again", ["keep"])
    served = serve()
    page = open_page(served.link, width=width, scheme=scheme)
    run = listed(page)[0]

    for view in ("runs", "sweeps", "schedules"):
        page.locator(f"button[data-view={view}]").click()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.goto(f"{served.base}/run/{run}/")
    page.locator("button.edit").click()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert served.process.poll() is None


def test_curves_move_while_a_real_training_runs_and_its_end_is_shown(
    serve, workspace, command, open_page
):
    rows = (json.dumps({"x": x / 20, "y": 3 * x / 20 + 1}) + "\n" for x in range(20))
    (command.folder / "line.jsonl").write_text("".join(rows))
    (command.folder / "line.py").write_text(RECIPE)
    (command.folder / "line.yaml").write_text(TRAINING)
    id_ = command("run", "line.yaml", "--detach").strip()
    page = open_page(serve(id_).link)
    steps = "() => document.querySelector('#training .plot')?.data?.[0].x.length || 0"

    wait_for(lambda: page.evaluate(steps) > 1)
    page.locator("input.log").first.check()
    # As when a first evaluation adds a table: all around the charts is made new.
    page.evaluate("document.querySelector('#training').append(document.createElement('hr'))")
    write_notes(RunDirectory(workspace.runs / id_), "seen", [])
    page.locator("#training > hr").wait_for(state="detached")
    seen = page.evaluate(steps)
    page.wait_for_function(f"seen => ({steps})() > seen", arg=seen)
    shown = page.inner_text(".title .state"), page.inner_text("#live")
    is_log = page.locator("input.log").first.is_checked()
    facts = page.inner_text("#training .numbers")
    command("cancel", id_)
    page.locator(".title .state.cancelled").wait_for()
    page.wait_for_function("document.querySelector('#live').textContent === ''")

    assert shown[0] == "▶ running"
    assert "step" in shown[1]
    assert is_log
    assert "parameters" in facts
    assert page.complaints == []
