"""What serves schedules: one process for all hosts of a home, and a server that answers errors."""

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from redco_flow.errors import UsageError
from redco_flow.orchestrate.prefect.report import refuse_retries
from redco_flow.orchestrate.recurring.deployments import (
    MISSED_TAG,
    client_of,
    connect,
    deploy,
    due_dates,
    find_deployment,
    read_flow_runs,
)
from redco_flow.orchestrate.recurring.flow_runs import FlowRuns
from redco_flow.orchestrate.recurring.missed import make_up
from redco_flow.orchestrate.recurring.serving import restore, stop_serving
from redco_flow.orchestrate.recurring.serving_record import Serving
from redco_flow.orchestrate.recurring.silence import forget_silence, is_watched
from redco_flow.tracking.schedules import Schedule, ScheduleDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command, wait_for

pytestmark = pytest.mark.slow

NOWHERE = "http://127.0.0.1:1/api"
PIPELINE = "name: dates\nstages:\n  gather: {kind: weekly_kinds.gather, file: week.json}\n"


@pytest.fixture
def other_host(tmp_path, monkeypatch):
    """A process that serves on a host of another name, with the same home."""
    words = ["unshare", "--map-root-user", "--uts", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*words, "hostname x"]).returncode:
        pytest.skip("not allowed here: unshare --uts")
    monkeypatch.setenv("REDCO_FLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_API_URL", NOWHERE)
    serve = f"hostname other; exec {sys.executable} -P -m redco_flow.cli.main serve"
    process = subprocess.Popen([*words, serve])
    wait_for(Serving.find)
    monkeypatch.delenv("PREFECT_API_URL")
    yield process
    process.kill()
    process.wait()


def test_one_process_serves_for_all_hosts_of_a_home(tmp_path, other_host):
    """Fault 61."""
    (tmp_path / "dates.yaml").write_text(PIPELINE)
    (tmp_path / "week.json").write_text("{}")
    command = Command(tmp_path)

    refusals = [
        command("serve", code=2),
        command("serve", "--detach", code=2),
        command("serve", "--stop", code=2),
        command("schedule", "add", "dates.yaml", "--every", "1d", code=2),
    ]
    path = tmp_path / "home/prefect/serve.json"
    record = json.loads(path.read_text())
    record["process"] |= {"host": os.uname().nodename, "pid_namespace": "1"}
    path.write_text(json.dumps(record))  # as in another container of this host
    with pytest.raises(UsageError, match="cannot be seen from here"):
        stop_serving()
    other_host.send_signal(signal.SIGKILL)
    other_host.wait()

    assert [f"process {other_host.pid} on other" in said for said in refusals] == [True] * 4
    assert Serving.find() is None


def test_a_run_that_is_retried_on_its_page_ends_again_and_names_the_command(prefect_server):
    """Fault 62."""
    with client_of(connect()) as client:
        from prefect import flow
        from prefect.states import AwaitingRetry, Failed

        tags = ["redco-flow", f"user: {getpass.getuser()}"]
        run = client.create_flow_run(flow(print), name="dates-abcdef", tags=tags)
        client.set_flow_run_state(run.id, Failed(message="stage fit failed"), force=True)
        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)

        refuse_retries(client)

        state = client.read_flow_run(run.id).state
    assert state.is_failed()
    assert "redco-flow retry dates-abcdef" in state.message


@pytest.fixture
def failing_api(monkeypatch):
    """An API whose health page answers, and nothing else."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path.endswith("/health") else 500)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
    yield server
    server.shutdown()


def test_a_server_that_answers_errors_is_one_line(tmp_path, failing_api):
    """Fault 61."""
    (tmp_path / "dates.yaml").write_text(PIPELINE)
    (tmp_path / "week.json").write_text("{}")
    command = Command(tmp_path)

    said = command("schedule", "add", "dates.yaml", "--every", "1d", code=1)

    assert "answers 500 to /api/" in said
    assert "Traceback" not in said


def test_what_is_installed_for_a_reboot_finds_home_and_server(tmp_path, monkeypatch):
    """In systemd.syntax(7) and systemd.unit(5), \\ and " are escaped, and % is doubled."""
    monkeypatch.setenv("REDCO_FLOW_HOME", f'{tmp_path}/a "%" home')
    monkeypatch.setenv("PREFECT_API_URL", "http://host/a%20b/api")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("empty", "systemd"):
        (tmp_path / name).mkdir()
    (tmp_path / "systemd/systemctl").touch(mode=0o755)
    command = Command(tmp_path)
    serve = "-P -m redco_flow.cli.main serve"

    unit = command("serve", "--install", environment={"PATH": str(tmp_path / "systemd")})
    line = command("serve", "--install", environment={"PATH": str(tmp_path / "empty")})

    assert Path(unit.strip()).read_text().split("[Service]\n")[1].splitlines()[:3] == [
        rf'Environment="REDCO_FLOW_HOME={tmp_path}/a \"%%\" home"',
        'Environment="PREFECT_API_URL=http://host/a%%20b/api"',
        f'ExecStart="{sys.executable}" {serve} --limit 10',
    ]
    # As cron(8) does: without the backslashes, to a shell.
    shown = ["sh", "-c", f'printf "%s\\n" {line.removeprefix("@reboot ").replace(chr(92), "")}']
    assert subprocess.check_output(shown, text=True).splitlines() == [
        "env",
        f'REDCO_FLOW_HOME={tmp_path}/a "%" home',
        "PREFECT_API_URL=http://host/a%20b/api",
        *f"{sys.executable} {serve} --detach --limit 10".split(),
    ]


def test_what_came_due_while_nothing_served_is_made_up_for_or_in_the_history(
    prefect_server, tmp_path
):
    """Fault 51: Prefect makes flow runs of three dates ahead; nothing serves for much longer."""
    from prefect.client.schemas.actions import DeploymentUpdate

    directory = ScheduleDirectory.of(Workspace(tmp_path), "hourly")
    directory.write(Schedule("hourly", "dates.yaml", str(tmp_path), cron="0 * * * *"))
    an_hour, a_day = timedelta(hours=1), timedelta(days=1)
    with client_of(connect()) as client:
        deployment = deploy(directory.read(), Workspace(tmp_path), client)
        added = client.read_deployment(deployment).schedules[0].updated.astimezone(UTC)
        hour = added.replace(minute=0, second=0, microsecond=0)

        def made():
            dates = due_dates(deployment, hour - a_day, hour + 9 * a_day, client)
            return sorted((date - hour).total_seconds() / 3600 for date in dates)

        def keys():
            flow_runs = read_flow_runs([deployment], client)
            return {one.expected_start_time: one.idempotency_key for one in flow_runs}

        def serve_again(missed, first, last):
            parameters = client.read_deployment(deployment).parameters | {"missed": missed}
            client.update_deployment(deployment, DeploymentUpdate(parameters=parameters))
            period = (hour + (first + 0.5) * an_hour, hour + (last + 0.5) * an_hour)
            make_up(directory, deployment, client, *period)

        wait_for(lambda: len(made()) == 3, seconds=300)
        date, of_server = min(keys().items())
        serve_again("all", -20, 10)  # what came due before it was added is not of it
        every = made()
        serve_again("latest", 10, 115)
        serve_again("skip", 115, 120)
        dates, made_up = made(), keys()
        deploy(directory.read(), Workspace(tmp_path), client)
        forgotten = made_up.keys() - keys().keys()
        client.delete_deployment(deployment)

    assert every == list(range(1, 11))
    assert dates == [*every, 115]
    # By the server's own keys, no date has a second flow run, whoever makes it.
    assert made_up == {one: of_server.replace(str(date), str(one)) for one in made_up}
    assert forgotten >= {hour + k * an_hour for k in (*range(4, 11), 115)}  # it was changed
    assert [(one.due, one.reason.partition(" due")[0]) for one in directory.firings()] == [
        ((hour + 15 * an_hour).isoformat(), "nothing served: 100 or more"),
        ((hour + 116 * an_hour).isoformat(), "nothing served: 5"),
    ]


LOOK = """
import threading
from redco_flow.orchestrate.recurring.deployments import client_of, connect
from redco_flow.orchestrate.recurring.flow_runs import FlowRuns
with client_of(api := connect()) as client:
    FlowRuns(print, limit=3).attend(client, api)
    for one in threading.enumerate():
        if one.name.startswith("firing"):
            one.join()
"""


def test_missed_firings_of_one_schedule_leave_places_and_end_when_it_is_paused(
    prefect_server, tmp_path
):
    from prefect.states import Scheduled

    workspace = Workspace(tmp_path)
    of = {name: ScheduleDirectory.of(workspace, name) for name in ("first", "second", "paused")}
    long_ago = datetime.now(UTC) - timedelta(days=1)
    deployed = {}
    with client_of(connect()) as client:
        for name, directory in of.items():
            schedule = Schedule(name, "dates.yaml", str(tmp_path), every="1w", missed="skip")
            directory.write(replace(schedule, is_paused=name == "paused"))
            deployed[name] = deploy(directory.read(), workspace, client)
        for hours, name in enumerate(["paused", "first", "first", "first", "second"]):
            state = Scheduled(scheduled_time=long_ago + timedelta(hours=hours))
            tags = [] if name == "second" else [MISSED_TAG]
            client.create_flow_run_from_deployment(deployed[name], state=state, tags=tags)

        subprocess.run([sys.executable, "-c", LOOK], check=True)

        waiting = {
            name: sum(
                MISSED_TAG in one.tags for one in read_flow_runs([key], client, ["SCHEDULED"])
            )
            for name, key in deployed.items()
        }
        for key in deployed.values():
            client.delete_deployment(key)

    firings = {name: [one.state for one in directory.firings()] for name, directory in of.items()}
    assert firings == {"first": ["skipped"], "second": ["skipped"], "paused": []}
    assert waiting == {"first": 2, "second": 0, "paused": 0}


def test_a_schedule_that_cannot_be_watched_fires_and_stops_no_other(
    prefect_server, tmp_path, monkeypatch
):
    monkeypatch.delenv("SILENCE_HOOK", raising=False)
    workspace, log = Workspace(tmp_path), []
    told = {"no_run_for": "1d", "told_by": {"webhook": "SILENCE_HOOK"}}
    whens = {
        "a": {"rrule": "FREQ=DAILY;INTERVAL=0"},
        "b": {"every": "1d"} | told,
        "c": {"every": "1d"},
    }
    for name, when in whens.items():
        schedule = Schedule(name, "dates.yaml", str(tmp_path), **when)
        ScheduleDirectory.of(workspace, name).write(schedule)
    flow_runs = FlowRuns(log.append)
    with client_of(connect()) as client:
        for _ in range(2):
            restore([workspace], client, flow_runs, log.append)
        found = {name: find_deployment(name, client) for name in ("a", "b", "c")}
        unwatched = is_watched("b", client)
        monkeypatch.setenv("SILENCE_HOOK", "http://127.0.0.1:1/")
        restore([workspace], client, flow_runs, log.append)
        watched = is_watched("b", client)
        forget_silence("b", client)
        for one in filter(None, found.values()):
            client.delete_deployment(one.id)

    assert [name for name, one in found.items() if one is not None] == ["b", "c"]
    assert (unwatched, watched) == (False, True)
    assert [line for line in log if line.startswith("warning: schedule 'a'") or "HOOK" in line] == [
        log[0],
        log[2],
    ]
