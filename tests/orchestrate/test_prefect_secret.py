"""Our Prefect server refuses requests without its secret; a browser gets it by one link."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from orchestrate_api import Api, secret_of
from orchestrate_runs import TWO_STAGES, Runs, wait_for_end, wait_for_stage
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from redco_flow.orchestrate.prefect.server import prefect_directory

pytestmark = pytest.mark.slow

# Standard library only: the other user has no access to this checkout.
STRANGER = """
import json, sys, urllib.error, urllib.request
url, flow_run, record, *credentials = sys.argv[1:]
attempts = {
    "read parameters": ("GET", f"/flow_runs/{flow_run}", None),
    "list": ("POST", "/flow_runs/filter", {}),
    "read logs": ("POST", "/logs/filter", {}),
    "cancel": ("POST", f"/flow_runs/{flow_run}/set_state",
               {"state": {"type": "CANCELLING", "name": "Cancelling"}}),
    "delete": ("DELETE", f"/flow_runs/{flow_run}", None),
    "settings": ("GET", "/admin/settings", None),
}
answers = {}
for name, (method, path, body) in attempts.items():
    headers = {"Content-Type": "application/json", **dict(one.split("=", 1) for one in credentials)}
    data = None if body is None else json.dumps(body).encode()
    try:
        answers[name] = urllib.request.urlopen(
            urllib.request.Request(url + path, data, headers, method=method), timeout=300).status
    except urllib.error.HTTPError as error:
        answers[name] = error.code
try:
    answers["file"] = open(record).read()
except OSError as error:
    answers["file"] = type(error).__name__
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def held_run(tmp_path_factory, prefect_server):
    """A run whose second stage waits; it is let go with the last test."""
    folder = tmp_path_factory.mktemp("held")
    runs = Runs(folder)
    run = runs.start(TWO_STAGES, [f"train.gate={folder / 'gate'}"])
    wait_for_stage(run, "train")
    Api(prefect_server).running_flow_run_of(run)
    yield run
    (folder / "gate").touch()
    wait_for_end(run)
    runs.clean_up()


def flow_run_id_of(run):
    return run.read_state()["prefect_url"].rpartition("/")[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_read_nor_cancel_nor_delete(held_run, prefect_server):
    """Fault 48: that user can neither read nor cancel runs."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")  # that everybody may start
    if python is None:
        pytest.skip("no Python of the system: install python3")
    words = [prefect_server, flow_run_id_of(held_run), str(prefect_directory() / "server.json")]
    guess = "Authorization=Basic cmVkY28tZmxvdzpndWVzcw=="

    for credentials in ([], [guess], ["Authorization=x"]):
        done = subprocess.run(
            [python, "-I", "-c", STRANGER, *words, *credentials],
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
        assert answers.pop("file") == "PermissionError"
        assert set(answers.values()) == {401}, answers

    assert Api(prefect_server).flow_run(flow_run_id_of(held_run))["state"]["type"] == "RUNNING"


@pytest.mark.parametrize("path", ["/events/in", "/events/out", "/logs/out"])
def test_no_websocket_lets_in_who_does_not_know_the_secret(path, prefect_server):
    """Fault 48: that user can neither read nor cancel runs."""
    url = prefect_server.replace("http://", "ws://") + path

    with connect(url, subprotocols=["prefect"]) as stranger:
        stranger.send(json.dumps({"type": "auth", "token": "guess"}))
        with pytest.raises(ConnectionClosed):
            stranger.recv(timeout=300)


def test_the_secret_stands_in_its_file_alone(held_run, prefect_home):
    """Fault 48: in no argument of a process, no record, no log, no database."""
    secret = secret_of(prefect_home).encode()
    password = secret.partition(b":")[2]
    assert len(password) > 40
    home, workspace = Path(prefect_home), held_run.path.parents[1]

    holders = [
        path
        for folder in (home, workspace)
        for path in folder.rglob("*")
        if path.is_file() and password in path.read_bytes()
    ]
    arguments = [
        command
        for process in Path("/proc").glob("[0-9]*")
        if password in (command := cmdline(process))
    ]

    assert holders == [prefect_directory() / "server.json"]
    assert arguments == []


def cmdline(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def ui(*words, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "redco_flow.cli.main", "ui", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.fixture
def browser(chromium):
    """A page of a browser that was never at this server."""
    context = chromium.new_context()
    context.set_default_timeout(300_000)
    yield context.new_page()
    context.close()


def test_the_link_that_ui_prints_shows_the_runs_page_in_a_browser(held_run, browser, tmp_path):
    """Fault 48: and the address alone does not."""
    page = held_run.read_state()["prefect_url"]
    workspace = held_run.path.parents[1]

    browser.goto(page)
    browser.wait_for_function("document.body.innerText.includes('redco-flow ui --prefect RUN')")
    told = ui("--prefect", held_run.id, "-w", str(workspace), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    browser.goto(told.stdout.strip())

    is_shown = "id => document.body.innerText.includes(id)"
    browser.wait_for_function(is_shown, arg=held_run.id)
    assert browser.url == page
    browser.goto("about:blank")
    browser.goto(page)  # let in once, let in
    browser.wait_for_function(is_shown, arg=held_run.id)


def test_ui_stop_names_who_uses_the_server_and_leaves_it_running(
    held_run, prefect_server, tmp_path
):
    told = ui("--stop", cwd=tmp_path, stdin=subprocess.DEVNULL)

    assert told.returncode == 2
    assert f"run {held_run.path} (process " in told.stderr
    assert "`redco-flow ui --stop --force` ends it all the same" in told.stderr
    assert ui("--status", cwd=tmp_path).stdout == f"{prefect_server} answers\n"
