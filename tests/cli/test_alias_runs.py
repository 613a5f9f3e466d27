"""A run takes a promoted checkpoint, and keeps it though another one is promoted."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

READING = """\
name: reading
stages:
  reread: {kind: orchestrate_kinds.reread, checkpoint: "@sums/production"}
"""


def test_a_promoted_checkpoint_is_read_by_another_pipeline_until_another_is_promoted(finished):
    command, first = finished
    second = command.json("run", "sums.yaml", "learning_rate=3.0")
    (command.folder / "reading.yaml").write_text(READING)
    ids = [one["stages"]["total"]["artifacts"]["checkpoint"] for one in (first, second)]

    command("promote", f"{first['run']}/total", "--as", "production")
    done = command.json("run", "reading.yaml")

    assert done["metrics"]["reread"] == first["metrics"]["total"]
    run = Path(command.json("status", done["run"])["report"]).parent
    assert ids[0] in (run / "resolved.yaml").read_text()
    [pin] = json.loads((run / "plan.json").read_text())["aliases"]
    assert (pin["alias"], pin["checkpoint"]) == ("@sums/production", ids[0])
    call = json.loads((run / "stages/reread/attempts/1/call.json").read_text())
    [taken] = call["inputs"]["checkpoint"]
    assert (taken["stage"], taken["id"]) == ("@sums/production", ids[0])
    assert f"@sums/production is checkpoint {ids[0][:12]}" in command("plan", "reading.yaml")
    assert command.json("plan", "reading.yaml")["stages"]["reread"]["action"] == "reuse"

    command("promote", f"{second['run']}/total", "--as", "production")
    assert command.json("plan", "reading.yaml")["stages"]["reread"]["action"] == "run"
    assert "is @sums/production: promoted by" in command("why", "@production")

    command("rollback")
    assert command.json("plan", "reading.yaml")["stages"]["reread"]["action"] == "reuse"
    shown = command("status", first["run"])
    assert "(@sums/production)" in shown
