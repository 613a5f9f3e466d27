"""The command as a person runs it: a process of its own, in a directory of its own."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

KINDS = Path(__file__).parent.parent / "orchestrate" / "kinds"
sys.path.append(str(KINDS))  # for what a test plans or runs in its own process
PIPELINE = """\
name: sums
stages:
  numbers: {kind: orchestrate_kinds.numbers, count: 3}
  total:
    kind: orchestrate_kinds.total
    learning_rate: 2.0
"""


@dataclass
class Command:
    """redco-flow in `folder`, with a workspace there."""

    folder: Path

    def start(self, *words, **options):
        environment = {**os.environ, "PYTHONPATH": str(KINDS), **options.pop("environment", {})}
        return subprocess.Popen(
            [sys.executable, "-m", "redco_flow.cli.main", *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def __call__(self, *words, code=0, timeout=500, **options):
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == code, f"{words}: exit {process.returncode}\n{out}\n{err}"
        return out if code == 0 else err

    def json(self, *words, **options):
        return json.loads(self(*words, "--json", **options).splitlines()[-1])


class Served:
    """`redco-flow ui` as a process; requests to it, with its cookie unless another is given."""

    def __init__(self, command, *words):
        self.process = command.start("ui", "--port", "0", *words)
        self.link = self.process.stdout.readline().strip()
        assert self.link.startswith("http://127.0.0.1:"), self.process.communicate()
        self.address = urlsplit(self.link)
        self.base = f"http://{self.address.netloc}"
        answer = self.ask(f"{self.address.path}?{self.address.query}", cookie="")
        self.cookie = answer.getheader("Set-Cookie").partition(";")[0]

    def ask(self, path, body=None, *, cookie=None, host=None, origin=None, **headers):
        connection = http.client.HTTPConnection(self.address.netloc, timeout=300)
        headers |= {"Host": host or self.address.netloc}
        headers |= {"Cookie": self.cookie if cookie is None else cookie}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Origin": origin or self.base}
        method = "GET" if body is None else "POST"
        connection.request(method, path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        answer.content = answer.read()
        connection.close()
        return answer

    def rows(self):
        return {
            row["run"]: row for row in json.loads(self.ask("/api/runs?fresh=1").content)["runs"]
        }

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=300)
        return self.process.returncode, said


def wait_for(look, seconds=400):
    """Wait for what another process does; return what `look` then sees."""
    deadline = time.monotonic() + seconds
    while True:
        looked_at = time.monotonic()
        if found := look():
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s"
        # A look may ask a server, or start a process: no more than a fifth of a core.
        time.sleep(max(0.02, min(0.5, 4 * (time.monotonic() - looked_at))))


@pytest.fixture
def command(tmp_path):
    (tmp_path / "sums.yaml").write_text(PIPELINE)
    return Command(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of the pipeline, and the command beside it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "sums.yaml").write_text(PIPELINE)
    command = Command(folder)
    return command, command.json("run", "sums.yaml")
