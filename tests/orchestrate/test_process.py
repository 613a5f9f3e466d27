"""Whole runs: a launcher process, real jobs, a real Prefect server, and what kills them."""

import getpass
import os
import signal
import time
from pathlib import Path

import pytest
from orchestrate_api import Api
from orchestrate_runs import (
    DIAMOND,
    TWO_STAGES,
    Runs,
    events,
    kill_launcher,
    until,
    wait_for_end,
    wait_for_stage,
)

from redco_flow.errors import UsageError
from redco_flow.orchestrate.prefect.server import ensure_server, server_status, stop_server
from redco_flow.orchestrate.run.cancel import cancel_run
from redco_flow.orchestrate.run.start import resume_run, retry_run
from redco_flow.tracking.locks import find_holder

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parents[2]


@pytest.fixture
def api(prefect_server):
    return Api(prefect_server)


SECRET = "hunter2-very-secret"


@pytest.fixture(scope="module")
def diamond(tmp_path_factory, prefect_server):
    """Runs, and one of them that is complete, whose launcher had a secret in its environment."""
    runs = Runs(tmp_path_factory.mktemp("diamond"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_TOKEN", SECRET)
        run, state = runs.complete(DIAMOND, ["train-small.learning_rate=3e-4"])
    yield runs, run, state
    runs.clean_up()


def test_the_page_of_a_run_tells_its_story(diamond, api):
    runs, run, state = diamond

    flow_run = api.ended_flow_run_of(run)
    tasks = api.tasks_of(flow_run, 4)
    artifact = api.artifact(flow_run, "diamond-summary")
    assert flow_run["name"] == run.id
    assert flow_run["state"]["message"] == "4 stages completed"
    origin = {f"user: {getpass.getuser()}", f"host: {os.uname().nodename}"}
    assert set(flow_run["tags"]) == {"redco-flow", "pipeline: diamond", "profile: local", *origin}
    assert flow_run["parameters"] == {
        "pipeline": str(runs.folder / "pipeline.yaml"),
        "profile": "local",
        "overrides": ["train-small.learning_rate=3e-4"],
    }
    assert set(tasks) == {"preprocess", "train-small", "train-large", "compare"}
    assert all(task["tags"] == [] for task in tasks.values())
    upstream = {one["id"] for one in tasks["compare"]["task_inputs"]["upstream"]}
    assert upstream == {tasks["train-small"]["id"], tasks["train-large"]["id"]}
    until(lambda: any("learning rate 0.0002" in line for line in api.logs_of(flow_run)))
    checkpoint = state["stages"]["train-small"]["artifacts"]["checkpoint"]
    assert "| total | 0.003 | 0.5 |" in artifact["data"]
    assert checkpoint[:12] in artifact["data"]
    assert str(run.report_path) in artifact["data"]
    assert "best 0.003" in artifact["description"]


def test_a_second_run_shows_every_stage_as_reused(diamond, api):
    runs, first, _ = diamond

    run, state = runs.complete(DIAMOND, ["train-small.learning_rate=3e-4"])

    tasks = api.tasks_of(api.ended_flow_run_of(run), 4)
    assert [stage["reused"] for stage in state["stages"].values()] == [True] * 4
    assert {task["state"]["name"] for task in tasks.values()} == {"Cached"}
    assert {name: task["state"]["message"] for name, task in tasks.items()} == {
        f"{stage}: reused from {first.id}": f"reused from {first.id}"
        for stage in ("preprocess", "train-small", "train-large", "compare")
    }


def test_a_task_says_what_its_stage_waits_for_and_from_whom_it_took_its_result(
    runs, api, held, gate
):
    first = runs.start(TWO_STAGES, held)
    wait_for_stage(first, "train")
    second = runs.start(TWO_STAGES, held)
    flow_run = until(lambda: second.read_state().get("prefect_url") and api.flow_run_of(second))

    waits = "train: waits for another run that makes the same result"
    of = {"id": {"any_": [flow_run["id"]]}}
    task = until(lambda: find_named(waits, api.ask("/task_runs/filter", flow_runs=of)))
    gate.touch()

    assert (task["state"]["type"], task["state"]["name"]) == ("PENDING", "Pending")
    tasks = api.tasks_of(api.ended_flow_run_of(second), 2)
    assert tasks[f"train: reused from {first.id}"]["state"]["name"] == "Cached"


def find_named(name, tasks):
    return next((one for one in tasks if one["name"] == name and one["state"]), None)


def test_a_failed_stage_fails_the_flow_with_its_job_and_log(runs, api, tmp_path):
    run = runs.start(TWO_STAGES, [f"train.fails_until={tmp_path / 'never'}"])

    state = wait_for_end(run)

    flow_run = api.ended_flow_run_of(run)
    message = api.tasks_of(flow_run, 2)["train"]["state"]["message"]
    train = state["stages"]["train"]
    assert (state["state"], state["exit_code"]) == ("failed", 1)
    assert flow_run["state"]["type"] == "FAILED"
    assert "StageFailed" in message
    assert train["job_id"] in message
    assert str(run.attempt("train", 1).log_path(0)) in message
    assert "the sum does not converge" in message


def test_cancelling_on_the_page_ends_the_jobs(runs, api, held):
    run = runs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")

    api.cancel(api.running_flow_run_of(run))
    state = wait_for_end(run)

    assert (state["state"], state["exit_code"]) == ("cancelled", 5)
    assert state["message"] == "cancelled on its Prefect page"
    assert run.attempt("train", 1).read_exit().cause == "cancelled"
    assert api.ended_flow_run_of(run)["state"]["type"] == "CANCELLED"


def test_cancelling_a_run_ends_its_jobs_flow_and_process_and_it_can_be_retried(
    runs, api, held, gate
):
    run = runs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")

    cancel_run(run, "not needed")

    state = run.read_state()
    assert state["state"] == "cancelled"
    assert {name: stage["state"] for name, stage in state["stages"].items()} == {
        "preprocess": "completed",
        "train": "cancelled",
    }
    assert api.ended_flow_run_of(run)["state"]["type"] == "CANCELLED"
    until(lambda: find_holder(run) is None)
    assert not run.cancel_requested()
    with pytest.raises(UsageError, match="has ended already: it is cancelled"):
        cancel_run(run)
    gate.touch()
    with pytest.raises(UsageError, match="no stage of it failed"):
        retry_run(run, only_failed=True)

    retry_run(run)

    state = wait_for_end(run)
    assert state["state"] == "completed"
    assert [stage["attempt"] for stage in state["stages"].values()] == [1, 2]


def test_the_job_of_a_launcher_that_is_terminated_or_killed_runs_on_and_resume_finds_it(
    runs, api, held, gate, executions
):
    """Fault 17: `redco-flow resume` finds the running job again; the flow run that died is marked
    as crashed.
    """
    run = runs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")
    terminated = api.running_flow_run_of(run)["id"]
    job = run.attempt("train", 1).read_job()
    os.kill(find_holder(run).holder.pid, signal.SIGTERM)
    until(lambda: find_holder(run) is None)
    assert api.ended_flow_run_of(run)["state"]["type"] == "CRASHED"
    assert run.read_state()["state"] == "running"
    assert run.attempt("train", 1).read_exit() is None

    resume_run(run)
    until(lambda: events(run).count("job_reattached") == 1)
    killed = api.running_flow_run_of(run)["id"]
    kill_launcher(run)
    resume_run(run)
    until(lambda: events(run).count("job_reattached") == 2)
    gate.touch()
    state = wait_for_end(run)

    assert state["state"] == "completed"
    assert state["stages"]["train"]["attempt"] == 1
    assert run.attempt("train", 1).read_job() == job
    assert executions.read_text().split()[::3] == ["preprocess", "train"]
    until(lambda: api.flow_run_of(run)["id"] not in (terminated, killed))
    until(lambda: api.flow_run(killed)["state"]["type"] == "CRASHED")
    assert "resume" in api.flow_run(killed)["state"]["message"]
    assert api.ended_flow_run_of(run)["state"]["type"] == "COMPLETED"


def test_a_completed_run_is_not_resumed(diamond):
    _, run, _ = diamond

    with pytest.raises(UsageError, match="is completed: there is nothing to resume"):
        resume_run(run)


def test_a_server_that_is_away_for_a_while_does_not_stop_the_run(runs, api, held, gate):
    """Fault 14: killed in mid-run, back after at least eight seconds."""
    run = runs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")
    api.running_flow_run_of(run)
    os.kill(server_status().pid, signal.SIGKILL)
    back_at = time.monotonic() + 8.0
    until(lambda: server_status().pid is None)
    gate.touch()
    assert wait_for_end(run)["state"] == "completed"
    until(lambda: time.monotonic() > back_at)
    ensure_server()

    flow_run = until(lambda: is_completed(api.flow_run_of(run)), seconds=400)
    assert flow_run["state"]["message"] == "2 stages completed"
    assert "| total | 0.0006 |" in api.artifact(flow_run, "two-stages-summary")["data"]


def is_completed(flow_run):
    return flow_run if flow_run["state"]["type"] == "COMPLETED" else None


def test_a_server_that_is_gone_for_good_costs_the_page_only(runs, held, gate, api):
    """Fault 15: the stages finish, the journal is complete, the next run tells the server."""
    run = runs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")
    flow_run_id = api.running_flow_run_of(run)["id"]
    launcher = find_holder(run).holder
    stop_server()
    gate.touch()

    state = wait_for_end(run)
    assert launcher.is_alive()  # it waits a while for the server; a reboot would end that
    os.kill(launcher.pid, signal.SIGKILL)
    ensure_server()

    assert state["state"] == "completed"
    assert events(run)[-1] == "run_ended"
    assert [name for name in events(run) if name == "stage_completed"] == ["stage_completed"] * 2
    assert api.flow_run(flow_run_id)["state"]["type"] == "RUNNING"
    runs.complete(TWO_STAGES)
    until(lambda: is_completed(api.flow_run(flow_run_id)))
    told = api.flow_run(flow_run_id)
    assert "| total | 0.0006 |" in api.artifact(told, "two-stages-summary")["data"]


def test_a_run_has_a_page_once_there_is_a_server_and_starts_none(runs, held, gate, prefect_home):
    stop_server()
    run = runs.start(TWO_STAGES, held)
    wait_for_stage(run, "train")
    is_started = server_status().pid is not None
    page = run.read_state()["prefect_url"]

    later = Api(ensure_server())
    flow_run = later.flow_run_of(run)
    gate.touch()

    assert wait_for_end(run)["state"] == "completed"
    assert (is_started, page) == (False, None)
    assert later.ended_flow_run_of(run)["state"]["type"] == "COMPLETED"
    tasks = later.tasks_of(flow_run, 2)
    assert {task["state"]["type"] for task in tasks.values()} == {"COMPLETED"}
    until(lambda: any("started; log" in line for line in later.logs_of(flow_run)))


def test_a_flow_of_the_users_own_decides_which_stage_starts_when(runs, api, monkeypatch, tmp_path):
    """A copy of the bundled flow in the current directory, changed."""
    monkeypatch.chdir(tmp_path)
    bundled = (PROJECT / "flows/pipeline.py").read_text()
    own = bundled.replace("    wait(list(", '    get_run_logger().info("mine")\n    wait(list(')
    assert own != bundled
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows/pipeline.py").write_text(own)

    run, _ = runs.complete(TWO_STAGES)

    assert f"the flow is {tmp_path}/flows/pipeline.py" in run.log_path.read_text()
    assert events(run).index("flow_run_created") < events(run).index("job_submitted")
    until(lambda: "mine" in api.logs_of(api.flow_run_of(run)))


def test_a_secret_of_the_environment_reaches_no_record_and_no_page(diamond, api):
    """Fault 31: no log, record, job script, process list, error or page shows the secret."""
    _, run, _ = diamond
    flow_run = api.ended_flow_run_of(run)

    files = [path for path in Path(run.path).rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in repr(flow_run)
    assert SECRET not in "".join(api.logs_of(flow_run))
