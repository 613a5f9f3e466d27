"""Schedules as a person makes and serves them; and all of it killed at random."""

import getpass
import json
import os
import random
import signal
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from redco_flow.orchestrate.prefect.api import deleted_schedules, note_deleted
from redco_flow.orchestrate.prefect.server import prefect_directory as own_server_folder
from redco_flow.orchestrate.prefect.server import server_status
from redco_flow.orchestrate.recurring.deployments import (
    client_of,
    connect,
    delete_noted,
    deploy,
    find_deployment,
)
from redco_flow.orchestrate.recurring.flow_runs import FlowRuns
from redco_flow.orchestrate.recurring.serving import restore, stop_serving
from redco_flow.orchestrate.recurring.serving_record import Serving
from redco_flow.spec.yaml import read_yaml
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.schedules import Firing, ScheduleDirectory, list_schedules
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command, wait_for

pytestmark = pytest.mark.slow

BERLIN = ZoneInfo("Europe/Berlin")
LATER = "2100-01-01T00:00:00.000+00:00"

PIPELINE = """\
name: weekly
schedule: {cron: "0 3 * * 1", timezone: Europe/Berlin, missed: all}
stages:
  gather: {kind: weekly_kinds.gather, file: week.json}
  fit: {kind: weekly_kinds.fit, gate: gate}
"""


@pytest.fixture
def served(tmp_path, prefect_server):
    """A command in a folder with a pipeline, and a process that serves; it ends with the test."""
    (tmp_path / "weekly.yaml").write_text(PIPELINE)
    (tmp_path / "week.json").write_text(json.dumps({"skill": 100}))
    command = Command(tmp_path)
    yield command
    stop_serving()
    forget(tmp_path)


def forget(folder):
    """Delete what a workspace's schedules have at the server, which is that of further tests."""
    with client_of(connect()) as client:
        for schedule in list_schedules(Workspace(folder / "redco-workspace")):
            if (found := find_deployment(schedule.name, client)) is not None:
                client.delete_deployment(found.id)


def directory_of(command, name="weekly"):
    return ScheduleDirectory.of(Workspace(command.folder / "redco-workspace"), name)


def ended_firings(command, count):
    found = [one for one in directory_of(command).firings() if one.has_ended]
    return found if len(found) >= count else None


def test_a_schedule_is_made_changed_fires_is_paused_and_goes(served):
    made = served.json("schedule", "add", "weekly.yaml")
    assert (made["cron"], made["timezone"], made["missed"]) == ("0 3 * * 1", "Europe/Berlin", "all")
    assert len(made["next"]) == 3
    in_berlin = [datetime.fromisoformat(one).astimezone(BERLIN) for one in made["next"]]
    assert {(one.weekday(), one.hour) for one in in_berlin} == {(0, 3)}
    assert all(one.endswith("+00:00") for one in made["next"])
    told, _ = served.start("doctor").communicate()
    assert "nothing serves weekly: they do not fire" in told

    minutely = ("--cron", "* * * * *", "--overlap", "queue")
    described = "description=of ${date:%Y-%m-%d %H:%M:%S %z}"
    changed = served.json("schedule", "add", "weekly.yaml", *minutely, described)
    assert (changed["cron"], changed["overlap"]) == ("* * * * *", "queue")
    assert [one["name"] for one in served.json("schedule", "ls")] == ["weekly"]

    served("serve", "--detach")
    wait_for(lambda: ended_firings(served, 1), seconds=300)
    served("schedule", "run", "weekly")
    ended = wait_for(lambda: ended_firings(served, 2))
    # On a busy machine the process of the one that was due later may be there first.
    first, second, *_ = sorted(ended, key=lambda one: one.ended)
    assert (first.state, second.state) == ("completed", "skipped")
    assert second.reason == f"data unchanged since {first.run}"
    assert served.json("status", first.run)["state"] == "completed"
    when_due = datetime.fromisoformat(first.due).astimezone(BERLIN)
    resolved = read_yaml((Path(first.run_path) / "resolved.yaml").read_text(), "resolved.yaml")
    assert resolved.values["description"] == f"of {when_due:%Y-%m-%d %H:%M:%S %z}"
    assert "weekly" in served("schedule", "ls")

    served("schedule", "pause", "weekly")
    assert served.json("schedule", "show", "weekly")["is_paused"]
    # Refused while a firing that was due before the pause is not at its end.
    wait_for(lambda: all(one.has_ended for one in directory_of(served).firings()))
    wait_for(lambda: served.start("schedule", "rm", "weekly").wait() == 0)
    assert served.json("status", first.run)["state"] == "completed"
    assert "no schedules yet" in served.start("schedule", "ls").communicate()[1]
    assert served.json("schedule", "ls") == []


def test_a_schedule_is_deleted_while_its_rule_keeps_the_server_from_answering(served):
    """Fault 60: an earlier release deployed rules whose dates never come."""
    served("schedule", "add", "weekly.yaml")
    # What serves may come between the note and the deletion, and would restore the deployment.
    note_deleted(own_server_folder(), "weekly", str(directory_of(served).path.parents[1]))
    with client_of(connect()) as client:
        delete_noted(client)
        assert find_deployment("weekly", client) is not None
    endless = {"rrule": "FREQ=DAILY;INTERVAL=0", "timezone": "UTC"}
    database = own_server_folder() / "prefect.db"
    kill(own_server())
    with closing(sqlite3.connect(database, timeout=300)) as connection, connection:
        connection.execute("UPDATE deployment_schedule SET schedule = ?", [json.dumps(endless)])

    removed = served.start("schedule", "rm", "weekly")
    said, note = removed.communicate(timeout=400)

    assert (removed.returncode, said) == (0, "weekly: deleted; its runs stay\n")
    assert "deleted when `redco-flow serve` reaches it" in note
    served("serve", "--detach")
    wait_for(lambda: not deleted_schedules(own_server_folder()), seconds=400)
    with client_of(connect()) as client:
        assert find_deployment("weekly", client) is None
    assert server_status().healthy


def test_mistakes_are_told_before_anything_is_made(served):
    said = served("schedule", "add", "weekly.yaml", "--cron", "0 25 * * 1", code=2)
    assert "'0 25 * * 1' is not a cron expression" in said
    (served.folder / "wrong.yaml").write_text(PIPELINE.replace("0 3 * * 1", "0 3 * *"))
    said = served("plan", "wrong.yaml", code=2)
    assert "wrong.yaml:2" in said
    assert "has 4 fields" in said
    (served.folder / "wrong.yaml").write_text(PIPELINE.replace('1"', '1", every: 6h'))
    said = served("schedule", "add", "wrong.yaml", code=2)
    assert "wrong.yaml:2:12: 'schedule': a schedule has one of cron, every and rrule" in said
    assert not directory_of(served).path.exists()


def test_firings_that_no_thread_has_are_settled_by_their_records(settled):
    """What a user asked for on a page is not undone by an older end."""
    assert settled("Cancelling").is_cancelled()
    assert settled("Running").is_scheduled()
    assert settled("Running", state="cancelled").is_scheduled()  # retried after that end
    assert settled("Running", state="cancelled", ended=LATER).is_cancelled()
    assert settled("Running", state="completed", ended=LATER).is_completed()
    assert settled("Crashed", state="failed").is_failed()
    assert settled("Running", run="failed").is_failed()
    assert settled("Running", run="failed", retries=1).is_scheduled()
    assert settled("Running", state="waiting", run="failed").is_scheduled()  # for its turn


def test_damaged_records_of_a_firing_are_logged_once(settled):
    log = []

    assert settled("Running", run="failed", damage=True, log=log.append).is_running()

    assert [line for line in log if "state.json" in line] == log
    assert len(log) == 1


def test_firings_that_are_due_at_once_run_no_more_than_allowed_at_a_time(served):
    """Fault 60: in a work pool of this user alone, so that no other user's worker starts them."""
    names = ("first", "second")
    for name in names:
        served("schedule", "add", "weekly.yaml", "--name", name)
    served("schedule", "add", "weekly.yaml", "--name", "lost")
    for name in ("lost", *names):
        served("schedule", "run", name)
    workspace = Workspace(served.folder / "redco-workspace")
    ScheduleDirectory.of(workspace, "lost").remove()  # no machine takes its flow run

    served("serve", "--detach", "--limit", "1")
    directories = [ScheduleDirectory.of(workspace, name) for name in names]

    def ended():
        firings = [one for directory in directories for one in directory.firings()]
        return firings if len([one for one in firings if one.has_ended]) == 2 else None

    firings = sorted(wait_for(ended, seconds=300), key=lambda one: one.began)
    assert all(one.ended <= other.began for one, other in pairwise(firings))
    with client_of(connect()) as client:
        pool = client.read_work_pool(find_deployment("first", client).work_pool_name)
        client.delete_deployment(find_deployment("lost", client).id)
    assert pool.name == f"redco-flow-{getpass.getuser()}"
    assert pool.concurrency_limit == 1


def test_a_look_asks_the_server_no_more_often_for_many_schedules(served):
    """Fault 60: otherwise the server of 200 schedules is busy without end."""
    served("schedule", "add", "weekly.yaml")
    workspace = Workspace(served.folder / "redco-workspace")
    numbers = []
    with client_of(connect()) as client:
        requests = []
        client._client.event_hooks["request"].append(requests.append)
        for name in ("second", "third", "fourth"):
            requests.clear()
            flow_runs = FlowRuns(print)
            restore([workspace], client, flow_runs, print)
            flow_runs.settle(client)
            numbers.append(len(requests))
            another = replace(directory_of(served).read(), name=name)
            deploy(another, workspace, client)
            ScheduleDirectory.of(workspace, name).write(another)

    assert numbers[2] == numbers[1]  # the first look also asks for the version of the server


def test_a_schedule_that_is_edited_to_fire_too_often_is_switched_off(served):
    from prefect.client.schemas.schedules import IntervalSchedule

    served("schedule", "add", "weekly.yaml")
    log = []
    with client_of(connect()) as client:
        found = find_deployment("weekly", client)
        often = IntervalSchedule(interval=timedelta(seconds=15))
        client.update_deployment_schedule(found.id, found.schedules[0].id, schedule=often)

        FlowRuns(log.append).settle(client)

        [schedule] = find_deployment("weekly", client).schedules
    assert not schedule.active
    assert [line for line in log if "'weekly' is switched off" in line and "'15s'" in line]


@pytest.fixture(scope="module")
def settled(tmp_path_factory, prefect_server):
    """What settling makes of a flow run in a state, whose firing's record says another."""
    from prefect import states

    tmp_path = tmp_path_factory.mktemp("settled")
    (tmp_path / "weekly.yaml").write_text(PIPELINE)
    command = Command(tmp_path)
    (tmp_path / "week.json").write_text(json.dumps({"skill": 100}))
    command("schedule", "add", "weekly.yaml", "--name", "settled")
    directory = directory_of(command, "settled")
    with client_of(connect()) as client:
        deployment = find_deployment("settled", client)

        def settled(said, state="running", ended=None, run="", damage=False, retries=0, log=print):
            flow_run = client.create_flow_run_from_deployment(
                deployment.id, parameters={**deployment.parameters, "retries": retries}
            )
            firing = Firing(str(flow_run.id), utc_now(), state, ended=ended or utc_now())
            if run:
                path = RunDirectory.create(Workspace(directory.path.parents[1]), "weekly")
                path.write_state({"state": run, "stages": {}})
                if damage:
                    path.state_path.write_text("{")
                firing = replace(firing, run=path.id, run_path=str(path.path))
            directory.write_firing(firing)
            time.sleep(0.01)  # records have milliseconds
            client.set_flow_run_state(flow_run.id, getattr(states, said)(), force=True)
            flow_runs = FlowRuns(log)
            flow_runs.settle(client)
            found = client.read_flow_run(flow_run.id).state
            flow_runs.settle(client)
            client.delete_flow_run(flow_run.id)
            directory.write_firing(replace(firing, state="cancelled", ended=utc_now()))
            return found

        yield settled
        forget(tmp_path)


def test_killed_at_random_times_nothing_fires_twice_and_nothing_is_lost(served):
    """Fault 50: server, what serves, and the run's launcher, at random times of its run."""
    (served.folder / "week.json").write_text(json.dumps({"skill": 100, "is_slow": True}))
    served("schedule", "add", "weekly.yaml", "--cron", "0 0 1 1 *")
    served("serve", "--detach")
    first = own_server()
    kill(first)
    # By what serves: nothing else runs that needs a server.
    wait_for(lambda: own_server() != first and server_status().healthy)
    assert served.json("schedule", "show", "weekly")["next"]
    served("schedule", "run", "weekly")
    rng = random.Random(4)

    for number in range(3):
        time.sleep(rng.uniform(0.1, 4.0))  # at a random time: that is the fault
        found = victims(served)
        kill(found[number % len(found)])
        if Serving.find() is None:
            served("serve", "--detach")
    (served.folder / "gate").touch()
    [firing] = wait_for(lambda: ended_firings(served, 1), seconds=300)

    assert firing.state == "completed"
    assert [one.name for one in (served.folder / "redco-workspace" / "runs").iterdir()] == [
        firing.run
    ]
    states = wait_for(lambda: final_states(), seconds=400)
    assert states == ["COMPLETED"]
    run = RunDirectory(Path(firing.run_path))
    assert run.read_state()["state"] == "completed"


def home():
    return next(Path(os.environ["REDCO_FLOW_HOME"], "prefect").glob("*/server.json")).parent


def own_server():
    record = json.loads((home() / "server.json").read_text())
    return ProcessIdentity.from_json(record["process"])


def victims(command):
    """The processes that live: the server, what serves, the launcher of the firing's run."""
    found = [own_server()] if own_server().is_alive() else []
    runs = (command.folder / "redco-workspace" / "runs").glob("*")
    launchers = [lease.holder for run in runs if (lease := find_holder(run)) is not None]
    return [*found, Serving.find().process, *launchers]


def kill(process):
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.is_alive())


def final_states():
    """The states of the schedule's flow runs, once all of them have ended."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

    with suppress(Exception), client_of(connect()) as client:  # the server may just be starting
        of = DeploymentFilter(id=DeploymentFilterId(any_=[find_deployment("weekly", client).id]))
        states = [
            one.state for one in client.read_flow_runs(deployment_filter=of) if one.start_time
        ]
        return [one.type.value for one in states] if all(one.is_final() for one in states) else None
    return None
