"""How long the command line takes with 1,000 runs in the workspace.

    python benchmarks/cli.py [--num-runs 1000] [--repeats 9]

Prints one line per verb and one JSON line last: medians in seconds of whole processes, and of
`python -c pass` beside them, since that is what every command pays on this machine. `rows_first`
and `rows_next` are requests to `redco-flow ui` for the rows of all runs: the first one after the
server's start, when nothing is known of any run, and the next ones.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult, publish_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

METRICS = {"rouge1": 0.41, "rouge2": 0.22, "rougeL": 0.38}


def fill_workspace(root: Path, num_runs: int) -> None:
    """Make `num_runs` finished runs, each with its own metrics artifact."""
    workspace = Workspace.open(root)
    store = ArtifactStore(workspace)
    for index in range(num_runs):
        run = RunDirectory.create(workspace, "bench", argv=["redco-flow"], pipeline_path="b.yaml")
        source = root / "metrics.json"
        source.write_text(json.dumps({**METRICS, "index": index}))
        fingerprint = f"{index:064x}"
        produced_by = {"run": run.id, "stage": "evaluate", "fingerprint": fingerprint}
        artifact = store.publish(
            "metrics", source, metadata={}, parents={}, produced_by=produced_by
        )
        publish_result(
            workspace,
            StageResult(
                fingerprint, "bench", "evaluate", "evaluate", {}, {"metrics": artifact.id},
                metrics=METRICS, run=run.id, attempt=1,
            ),
        )  # fmt: skip
        stage = {
            "state": "completed", "reused": False, "attempt": 1, "seconds": 1.0,
            "artifacts": {"metrics": artifact.id}, "metrics": METRICS, "message": "",
        }  # fmt: skip
        run.write_state(
            {
                "state": "completed",
                "exit_code": 0,
                "message": "",
                "started_at": run.record["created_at"],
                "ended_at": run.record["created_at"],
                "stages": {"evaluate": stage},
            }
        )


def median_seconds(command: list[str], repeats: int) -> float:
    """Run `command` once unmeasured, then `repeats` times."""
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if repeat:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def rows_seconds(command: list[str], repeats: int) -> dict[str, float]:
    """Start the page's server, and ask it for the rows of all runs."""
    times = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        link = server.stdout.readline().strip()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(link).read()
        for _ in range(repeats + 1):
            start = time.perf_counter()
            opener.open(f"{link.partition('?')[0]}api/runs?fresh=1").read()
            times.append(time.perf_counter() - start)
        server.terminate()
    return {"rows_first": times[0], "rows_next": statistics.median(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    program = [sys.executable, "-m", "redco_flow.cli.main"]
    with tempfile.TemporaryDirectory() as folder:
        fill_workspace(Path(folder), options.num_runs)
        where = ["--workspace", folder]
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "help": [*program, "--help"],
            "ls": [*program, "ls", *where],
            "ls_all": [*program, "ls", "--last", str(options.num_runs), *where],
            "status": [*program, "status", *where],
            "why": [*program, "why", "rougeL", *where],
        }
        seconds = {name: median_seconds(words, options.repeats) for name, words in commands.items()}
        seconds |= rows_seconds([*program, "ui", "--port", "0", *where], options.repeats)
    for name, value in seconds.items():
        print(f"{name:10} {value * 1000:7.0f} ms")
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    print(json.dumps({"num_runs": options.num_runs, "median_seconds": rounded}))


if __name__ == "__main__":
    main()
