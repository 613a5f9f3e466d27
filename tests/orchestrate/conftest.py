"""Real runs: tiny stage kinds of our own, real processes."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

KINDS = Path(__file__).parent / "kinds"
sys.path.append(str(KINDS))  # jobs and launchers search where this process does

from orchestrate_runs import Runs, executions, gate, held  # noqa: E402, F401 (fixtures)


@pytest.fixture
def runs(tmp_path):
    """Runs, of which nothing outlives the test; with `prefect_server` they report to it."""
    runs = Runs(tmp_path)
    yield runs
    runs.clean_up()


class Receiver(ThreadingHTTPServer):
    """An HTTP server that keeps what is posted to it."""

    def __init__(self) -> None:
        self.status, self.location, self.bodies = 200, "", []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}/{path}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.bodies.append((self.path, json.loads(content)))
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def do_GET(self):
        """Keep a redirect that was followed."""
        self.server.bodies.append((self.path, {}))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        """Say nothing."""


@pytest.fixture
def receiver():
    """What is posted to somebody, until the test's end."""
    server = Receiver()
    yield server
    server.shutdown()
    server.server_close()
