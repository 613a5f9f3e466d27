"""One local Prefect server: started once, found again, ended; a named one is left alone."""

import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from orchestrate_api import Api

from redco_flow.orchestrate.prefect.api import is_healthy, ui_url
from redco_flow.orchestrate.prefect.server import (
    PrefectServerError,
    ensure_server,
    external_url,
    prefect_directory,
    server_status,
    stop_server,
)
from redco_flow.records import read_json, write_json
from redco_flow.tracking.process_identity import ProcessIdentity

NOBODY = "http://127.0.0.1:9/api"
LAUNCH = "from redco_flow.orchestrate.prefect.server import ensure_server; print(ensure_server())"


@pytest.fixture(scope="module")
def database(prefect_server, tmp_path_factory):
    """A copy of the shared server's database: to make its tables takes half of a server's start."""
    path = tmp_path_factory.mktemp("database") / "prefect.db"
    with (
        closing(sqlite3.connect(prefect_directory() / "prefect.db", timeout=300)) as source,
        closing(sqlite3.connect(path)) as copy,
    ):
        source.backup(copy)
    return path


@pytest.fixture
def own_home(tmp_path):
    """A REDCO_FLOW_HOME of this test alone; the shared server stays where it is."""
    before = os.environ.get("REDCO_FLOW_HOME")
    os.environ["REDCO_FLOW_HOME"] = str(tmp_path / "home")
    os.environ.pop("PREFECT_API_URL", None)
    yield tmp_path / "home"
    stop_server(grace_seconds=2.0)
    if before is None:
        del os.environ["REDCO_FLOW_HOME"]
    else:
        os.environ["REDCO_FLOW_HOME"] = before


@pytest.fixture
def named_api():
    """PREFECT_API_URL names an API that is not there."""
    os.environ["PREFECT_API_URL"] = NOBODY
    yield NOBODY
    del os.environ["PREFECT_API_URL"]


@pytest.mark.slow
def test_a_running_server_is_found_again(prefect_server):
    assert ensure_server() == prefect_server
    status = server_status()
    assert (status.url, status.healthy, status.ours) == (prefect_server, True, True)


@pytest.mark.slow
def test_it_listens_on_this_machine_only_and_its_files_are_private(prefect_server):
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (
            prefect_directory(),
            prefect_directory().parent,
            *prefect_directory().iterdir(),
        )
        if path.is_dir() or path.name in ("prefect.db", "server.json")
    }

    assert prefect_server.startswith("http://127.0.0.1:")
    assert modes.pop("prefect.db") == modes.pop("server.json") == 0o600
    assert set(modes.values()) == {0o700}


@pytest.mark.slow
def test_its_pages_are_the_ones_that_ask_no_other_host(prefect_server):
    import http.client
    import json

    connection = http.client.HTTPConnection(prefect_server.split("/")[2], timeout=300)
    connection.request("GET", "/ui-settings")

    settings = json.loads(connection.getresponse().read())

    assert settings["default_ui"] == "v1"
    assert settings["api_url"] == prefect_server


@pytest.mark.slow
def test_two_launchers_that_need_a_server_start_one(database, own_home):
    shutil.copy(database, prefect_directory())

    launchers = [
        subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    said = [launcher.communicate(timeout=400)[0].strip() for launcher in launchers]

    pid = server_status().pid
    assert said[0] == said[1]
    assert is_healthy(said[0])
    assert stop_server()
    assert not is_healthy(said[0])
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(pid)
    assert not stop_server()


@pytest.fixture
def homes(tmp_path):
    """Environments of two users of one machine; their servers end with the test."""
    homes = [os.environ | {"REDCO_FLOW_HOME": str(tmp_path / name)} for name in ("ann", "ben")]
    for home in homes:
        home.pop("PREFECT_API_URL", None)
    yield homes
    stop = "from redco_flow.orchestrate.prefect.server import stop_server; stop_server()"
    for home in homes:
        subprocess.run([sys.executable, "-c", stop], env=home, check=True)


@pytest.mark.slow
def test_two_users_whose_servers_start_at_once_on_one_port_get_one_each(database, homes):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dead = ProcessIdentity.current().to_json() | {"start_time": 1}
    for home in homes:  # both had it before, so both prefer it now
        folder = Path(home["REDCO_FLOW_HOME"]) / "prefect" / os.uname().nodename
        folder.mkdir(parents=True)
        write_json(folder / "server.json", {"url": NOBODY, "port": port, "process": dead})
        shutil.copy(database, folder)

    launchers = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True, env=home
        )
        for home in homes
    ]
    urls = [launcher.communicate(timeout=400)[0].strip() for launcher in launchers]

    reached = [
        Api(url, home["REDCO_FLOW_HOME"]).ask("/admin/settings")["home"]
        for url, home in zip(urls, homes, strict=True)
    ]
    assert reached == [f"{home['REDCO_FLOW_HOME']}/prefect/{os.uname().nodename}" for home in homes]


def test_a_record_of_a_dead_server_is_no_server(own_home):
    dead = ProcessIdentity.current().to_json() | {"start_time": 1}
    write_json(prefect_directory() / "server.json", {"url": NOBODY, "port": 9, "process": dead})

    status = server_status()

    assert (status.url, status.healthy, status.pid) == (NOBODY, False, None)
    assert not stop_server()
    assert read_json(prefect_directory() / "server.json")["url"] == NOBODY


def test_a_named_api_that_does_not_answer_is_an_error_and_nothing_is_started(own_home, named_api):
    with pytest.raises(PrefectServerError, match="PREFECT_API_URL"):
        ensure_server()

    assert not (own_home / "prefect").exists()


def test_the_environment_names_the_api_before_the_profile_does(own_home):
    assert external_url("http://profile/api") == "http://profile/api"
    os.environ["PREFECT_API_URL"] = "http://environment/api"
    try:
        assert external_url("http://profile/api") == "http://environment/api"
    finally:
        del os.environ["PREFECT_API_URL"]


def test_the_pages_address_is_the_apis_without_its_path():
    assert ui_url("http://127.0.0.1:4200/api") == "http://127.0.0.1:4200"
