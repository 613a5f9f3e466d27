"""Ask a Prefect server what it knows, by plain HTTP: no client of ours or Prefect's in between."""

import base64
import http.client
import json
import os
from pathlib import Path

from orchestrate_runs import until

FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def secret_of(home):
    """What the server that was started with this home asks for."""
    record = Path(home) / "prefect" / os.uname().nodename / "server.json"
    return json.loads(record.read_text())["auth"]


class Api:
    """One server's API.

    Args:
        home: of the user who started it.
    """

    def __init__(self, url, home=None):
        self._host, _, self._path = url.removeprefix("http://").partition("/")
        secret = secret_of(home or os.environ["REDCO_FLOW_HOME"])
        self._token = base64.b64encode(secret.encode()).decode()

    def ask(self, path, **body):
        connection = http.client.HTTPConnection(self._host, timeout=300)
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Basic {self._token}",
        }
        text = json.dumps(body) if body else None
        connection.request("POST" if body else "GET", f"/{self._path}{path}", text, headers)
        response = connection.getresponse()
        content = response.read()
        assert response.status < 300, content
        return json.loads(content)

    def flow_run(self, flow_run_id):
        return self.ask(f"/flow_runs/{flow_run_id}")

    def flow_run_of(self, run):
        """The run's newest flow run, once it is known."""
        url = until(lambda: run.read_state().get("prefect_url"), seconds=400)
        return self.flow_run(url.rpartition("/")[2])

    def running_flow_run_of(self, run):
        """The same, once its flow runs, which begins after the run's stages."""

        def running():
            flow_run = self.flow_run_of(run)
            return flow_run if flow_run["state"]["type"] == "RUNNING" else None

        return until(running, seconds=400)

    def ended_flow_run_of(self, run):
        """The same, once the server has its end."""

        def ended():
            flow_run = self.flow_run_of(run)
            return flow_run if flow_run["state"]["type"] in FINAL else None

        return until(ended)

    def cancel(self, flow_run):
        """What the page's button does."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.ask(f"/flow_runs/{flow_run['id']}/set_state", state=state)

    def tasks_of(self, flow_run, count):
        """Task runs by name, once that many have ended; the server learns of that by events."""
        wanted = {"id": {"any_": [flow_run["id"]]}}

        def told():
            found = self.ask("/task_runs/filter", flow_runs=wanted)
            states = [one["state"] or {"type": None} for one in found]
            is_told = len(found) == count and all(state["type"] in FINAL for state in states)
            return found if is_told else None

        return {task["name"]: task for task in until(told)}

    def logs_of(self, flow_run):
        wanted = {"flow_run_id": {"any_": [flow_run["id"]]}}
        return [log["message"] for log in self.ask("/logs/filter", logs=wanted, limit=200)]

    def artifact(self, flow_run, key):
        """The flow run's only artifact of that key, once it is there."""
        wanted = {"artifacts": {"key": {"any_": [key]}}}
        wanted["flow_runs"] = {"id": {"any_": [flow_run["id"]]}}
        (found,) = until(lambda: self.ask("/artifacts/filter", **wanted))
        return found
