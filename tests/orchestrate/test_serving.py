"""What serves schedules: one process for all hosts of a home, and a server that answers errors."""

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from redco_flow.errors import UsageError
from redco_flow.orchestrate.prefect.report import refuse_retries
from redco_flow.orchestrate.recurring.deployments import client_of, connect
from redco_flow.orchestrate.recurring.serving import stop_serving
from redco_flow.orchestrate.recurring.serving_record import Serving
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
