"""Build attempts of the tiny stage in a workspace, as the orchestrator would."""

import time
from pathlib import Path

from redco_flow.launch.call import Call, InputReference, write_call
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.code_digest import module_digests
from redco_flow.tracking.results import fingerprint
from redco_flow.tracking.workspace import Workspace

KIND = "tiny_stages.act"


def make_call(workspace, action="write", *, run="tiny-abcd", number=1, inputs=(), **changes):
    config = {"action": action} | changes.pop("config", {})
    ingredients = {
        "kind": KIND,
        "settings": config,
        "inputs": {"dataset": [artifact.id for artifact in inputs]},
        "data": {},
        "code": module_digests([KIND]),
    }
    ingredients |= changes.pop("ingredients", {})
    references = [
        InputReference(artifact.id, str(artifact.path), artifact.kind, "before", "dataset")
        for artifact in inputs
    ]
    values = {
        "run": run,
        "pipeline": "tiny",
        "stage": "act",
        "kind": KIND,
        "attempt": number,
        "config": config,
        "inputs": {"dataset": references},
        "fingerprint": fingerprint(ingredients),
        "ingredients": ingredients,
        "workspace": str(workspace),
    }
    return Call(**(values | changes))


def new_attempt(workspace, *, run="tiny-abcd", number=1):
    Workspace.open(workspace)
    path = Path(workspace) / "runs" / run / "stages" / "act" / "attempts" / str(number)
    path.mkdir(parents=True)
    return AttemptDirectory(path)


def make_attempt(workspace, action="write", *, run="tiny-abcd", number=1, **changes):
    attempt = new_attempt(workspace, run=run, number=number)
    write_call(attempt, make_call(workspace, action, run=run, number=number, **changes))
    return attempt


def wait_until(condition, seconds=400.0):
    """Wait for what another process does; its value, or an error when it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        looked_at = time.monotonic()
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        # A look through all processes, or at Slurm, costs much: no more than a fifth of a core.
        time.sleep(max(0.01, min(0.5, 4 * (time.monotonic() - looked_at))))
