"""How long the command line takes with 1,000 runs in the workspace.

    python benchmarks/cli.py [--num-runs 1000] [--repeats 9] [--workspace FOLDER]

Prints one line per verb and one JSON line last: medians in seconds of whole processes, and of
`python -c pass` beside them, since that is what every command pays on this machine. `ui_link` is
the time from `redco-flow ui` to its link; `page_first` and `page_next` the time in Chromium from
opening that link to drawn rows of all runs: at once after the server's start, and again.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult, publish_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
# Resolves after the frame with the first rows.
DRAWN = """() => new Promise((done) => {
  const look = () => requestAnimationFrame(
    document.querySelector("html.has-rows #table tbody tr") ? () => setTimeout(done) : look);
  look();
})"""
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


def page_seconds(command: list[str], repeats: int) -> dict[str, float]:
    """Start the page's server again and again, and open each one's link in a new browser window."""
    from playwright.sync_api import sync_playwright

    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for _ in range(repeats):
            began = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                link = server.stdout.readline().strip()
                context = browser.new_context(viewport={"width": 1300, "height": 800})
                page = context.new_page()
                seconds = [time.perf_counter() - began]
                for _ in range(2):
                    start = time.perf_counter()
                    page.goto(link, wait_until="commit")
                    page.evaluate(DRAWN)
                    seconds.append(time.perf_counter() - start)
                context.close()
                server.terminate()
            times.append(seconds)
        browser.close()
    medians = map(statistics.median, zip(*times, strict=True))
    return dict(zip(("ui_link", "page_first", "page_next"), medians, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--workspace", type=Path, help="one that is filled already")
    options = parser.parse_args()
    program = [sys.executable, "-m", "redco_flow.cli.main"]
    with tempfile.TemporaryDirectory() as folder:
        root = options.workspace or Path(folder)
        if options.workspace is None:
            fill_workspace(root, options.num_runs)
        where = ["--workspace", str(root)]
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "help": [*program, "--help"],
            "ls": [*program, "ls", *where],
            "ls_all": [*program, "ls", "--last", "1000000", *where],
            "status": [*program, "status", *where],
            "why": [*program, "why", "rougeL", *where],
        }
        seconds = {name: median_seconds(words, options.repeats) for name, words in commands.items()}
        num_runs = len(list((root / "runs").iterdir()))
        seconds |= page_seconds([*program, "ui", "--port", "0", *where], options.repeats)
    for name, value in seconds.items():
        print(f"{name:10} {value * 1000:7.0f} ms")
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    print(json.dumps({"num_runs": num_runs, "median_seconds": rounded}))


if __name__ == "__main__":
    main()
