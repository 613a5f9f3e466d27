"""Many schedules that are due at once: how many processes there are, and how each firing ended.

    python benchmarks/schedules.py [--schedules 200] [--limit 10] [--seconds 3600]

Makes schedules of a script of one line in a home and a workspace of their own, serves them, and
has all of them due at one moment. Ten schedules each have the same settings, so that most firings
find that their result is there already. Prints one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

PIPELINE = """\
name: work
stages:
  work: {kind: script, path: work.py, arguments: {number: 0}}
"""
_COMMAND = [sys.executable, "-m", "redco_flow.cli.main"]


def make_schedules(folder: Path, count: int) -> list[str]:
    """Make and deploy the schedules; return their deployments' ids."""
    from redco_flow.orchestrate.recurring.deployments import client_of, connect, deploy
    from redco_flow.orchestrate.recurring.serving_record import note_workspace
    from redco_flow.tracking.schedules import Schedule, ScheduleDirectory
    from redco_flow.tracking.workspace import Workspace

    workspace = Workspace.open(folder / "workspace")
    note_workspace(workspace)
    ids = []
    with client_of(connect()) as client:
        for number in range(count):
            schedule = Schedule(
                name=f"work-{number}",
                pipeline=str(folder / "pipeline.yaml"),
                directory=str(folder),
                overrides=[f"work.arguments.number={number % max(count // 10, 1)}"],
                cron="0 0 1 1 *",
            )
            ids.append(str(deploy(schedule, workspace, client)))
            ScheduleDirectory.of(workspace, schedule.name).write(schedule)
    return ids


def fire(ids: list[str], due: datetime) -> None:
    """Have every deployment fire at a moment."""
    from prefect.states import Scheduled

    from redco_flow.orchestrate.recurring.deployments import client_of, connect

    with client_of(connect()) as client:
        for one in ids:
            state = Scheduled(scheduled_time=due)
            client.create_flow_run_from_deployment(one, state=state)


def processes(folder: Path) -> Counter[str]:
    """Count the processes of a home, by what they are."""
    mark, found = f"REDCO_FLOW_HOME={folder}/home".encode(), Counter[str]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) == os.getpid() or mark not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            modules = [one for one in words if "redco_flow" in one or one.endswith(".py")]
            found[Path(modules[0]).name if modules else words[0]] += 1
    return found


def wait_for_ends(folder: Path, count: int, seconds: float) -> tuple[Counter[str], int]:
    """Wait until all firings have ended; return the most processes at once, by kind and in all."""
    from redco_flow.tracking.schedules import list_schedules
    from redco_flow.tracking.workspace import Workspace

    most, most_in_all = Counter[str](), 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(20):
            now = processes(folder)
            most, most_in_all = most | now, max(most_in_all, now.total())
            time.sleep(0.5)
        firings = [
            one
            for each in list_schedules(Workspace(folder / "workspace"))
            for one in each.firings()
        ]
        states = Counter(str(one.state) for one in firings)
        sys.stderr.write(f"{dict(states)} {dict(now)}\n")
        if sum(one.has_ended for one in firings) >= count:
            break
    return most, most_in_all


def summary(folder: Path) -> dict[str, object]:
    """Return what the records say: ends of firings, and how often each script ran."""
    from redco_flow.tracking.schedules import list_schedules
    from redco_flow.tracking.workspace import Workspace

    workspace = Workspace(folder / "workspace")
    firings = [one for each in list_schedules(workspace) for one in each.firings()]
    worked_path = folder / "worked"
    worked = Counter(worked_path.read_text().split() if worked_path.exists() else ())
    return {
        "firings": len(firings),
        "ends": dict(Counter(f"{one.state}: {one.reason}"[:80] for one in firings)),
        "runs": len(list(workspace.runs.iterdir())),
        "scripts": len(worked),
        "ran_twice": sum(count > 1 for count in worked.values()),
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all firings to end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["REDCO_FLOW_HOME"] = f"{folder}/home"
        (folder / "pipeline.yaml").write_text(PIPELINE)
        line = f"open({str(folder / 'worked')!r}, 'a').write(sys.argv[2] + chr(10))"
        (folder / "work.py").write_text(f"import sys\n{line}\n")
        ids = make_schedules(folder, options.schedules)
        serve = subprocess.Popen([*_COMMAND, "serve", "--limit", str(options.limit)], cwd=folder)
        try:
            fire(ids, datetime.now(UTC) + timedelta(seconds=60))
            since = time.monotonic()
            most, most_in_all = wait_for_ends(folder, options.schedules, options.seconds)
            seconds = round(time.monotonic() - since)
        finally:
            serve.terminate()
            serve.wait()
            subprocess.run([*_COMMAND, "ui", "--stop"], check=False)
        print(
            json.dumps(
                {
                    **summary(folder),
                    "seconds": seconds,
                    "most_processes": most_in_all,
                    "of_a_kind": dict(most),
                }
            )
        )


if __name__ == "__main__":
    main()
