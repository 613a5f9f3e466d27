"""How long the verbs that read take in a workspace of 5,000 runs and 50,000 artifacts.

    python benchmarks/tracking.py [--num-runs 5000] [--repeats 5] [--workspace DIR]

Every run has a dataset of its own, a training with eight checkpoints, and an evaluation with scores
of each example: ten artifacts, written by what writes them in a run. Prints one line per verb and
one JSON line last: medians of whole processes, by the clock and of CPU time, of `python -c pass`
beside them, and what the first call takes after the cache was deleted. `--workspace` keeps what was
made, or takes it again.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from redco_flow.records import append_json_line, write_json, write_text
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.metrics_artifact import MetricsSummary
from redco_flow.tracking.results import StageResult, fingerprint, publish_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

PIPELINE = "weekly"
NUM_CHECKPOINTS = 8
NUM_EXAMPLES = 20
CODE = {"commit": "c0ffee" * 6 + "beef", "dirty": False, "patch_digest": None}
MODULES = {f"redco_flow.module_{index}": f"{index:064x}" for index in range(60)}
VERSIONS = {"python": "3.11.7", "jax": "0.11.0", "flax": "0.12.1", "redco-flow": "0.2.0"}
RESOLVED = """\
name: weekly
data: {{train: rows-{index}.jsonl}}
stages:
  preprocess: {{kind: preprocess, max_source_length: 64}}
  train: {{kind: train, dataset: preprocess, learning_rate: 0.001, num_epochs: {index}}}
  evaluate: {{kind: evaluate, predictions: train, metrics: [rouge]}}
"""


class WorkspaceFiller:
    """Leaves behind what finished runs do, through tracking's own writers."""

    def __init__(self, root: Path) -> None:
        self.workspace = Workspace.open(root)
        self.store = ArtifactStore(self.workspace)
        self.scratch = root / "scratch"

    def add_run(self, index: int) -> None:
        """One finished run of three stages and ten artifacts, none of which another run has."""
        run = RunDirectory.create(
            self.workspace, PIPELINE, argv=["redco-flow"], pipeline_path="weekly.yaml", code=CODE
        )
        write_text(run.resolved_path, RESOLVED.format(index=index))
        place = {"source": "weekly.yaml", "line": 5, "column": 1}
        write_json(run.origins_path, {"stages.train.num_epochs": place})
        entries = {}
        dataset = self._stage(
            run, entries, "preprocess", {"dataset": self._file("rows", index)},
            data={"rows.jsonl": f"{index:064x}"},
        )  # fmt: skip
        checkpoints = {
            f"checkpoint/{n}": self._file("params", index, n) for n in range(NUM_CHECKPOINTS)
        }
        trained = self._stage(
            run, entries, "train", checkpoints, inputs=dataset, metrics={"eval_loss": 1.0},
            settings={"learning_rate": 0.001, "num_epochs": index},
        )  # fmt: skip
        scores = {"rougeL": 30 + index % 100 / 10, "rouge1": 40.0}
        made = {"metrics": self._evaluation(index, scores)}
        self._stage(run, entries, "evaluate", made, inputs=trained, metrics=scores)
        ended = {"started_at": run.record["created_at"], "ended_at": run.record["created_at"]}
        state = {"state": "completed", "exit_code": 0, "message": "", "stages": entries}
        run.write_state(state | ended)
        shutil.rmtree(self.scratch)

    def _stage(
        self, run, entries, stage, files, *, inputs=None, data=None, metrics=None, settings=None
    ) -> dict[str, str]:
        inputs = inputs or {}
        ingredients = {
            "kind": stage,
            "settings": settings or {},
            "inputs": {name: [one] for name, one in inputs.items()},
            "data": data or {},
            "code": MODULES,
        }
        digest = fingerprint(ingredients)
        attempt = run.new_attempt(stage)
        write_json(attempt.call_path, {"stage": stage, "fingerprint": digest})
        write_json(attempt.job_path, {"executor": "local", "job_id": f"{run.id}-{stage}"})
        if stage == "train":
            for step in (10, 20, 30):
                record = {"kind": "training", "step": step, "epoch": step / 10, "loss": 1 / step}
                append_json_line(attempt.metrics_path, record)
        made_by = {"run": run.id, "stage": stage, "fingerprint": digest, "code": CODE}
        outputs = {
            name: self.store.publish(
                name.partition("/")[0], path, parents=inputs, produced_by=made_by
            ).id
            for name, path in files.items()
        }
        result = StageResult(
            digest, PIPELINE, stage, stage, ingredients, outputs, metrics=metrics, run=run.id,
            attempt=1, seconds=1.0, code=CODE, host="node", versions=VERSIONS,
        )  # fmt: skip
        publish_result(self.workspace, result)
        told = {"outputs": outputs, "metrics": metrics, "seconds": 1.0, "fingerprint": digest}
        write_json(attempt.result_path, told)
        entries[stage] = {
            "state": "completed", "reused": False, "attempt": 1, "seconds": 1.0, "message": "",
            "artifacts": outputs, "metrics": metrics, "fingerprint": digest,
        }  # fmt: skip
        return outputs

    def _file(self, name: str, *numbers: int) -> Path:
        path = self.scratch / "-".join(map(str, numbers)) / name
        path.parent.mkdir(parents=True)
        path.write_text(f"{name} {numbers}")
        return path

    def _evaluation(self, index: int, scores: dict[str, float]) -> Path:
        folder = self._file("scores", index, NUM_CHECKPOINTS).parent
        summary = MetricsSummary(
            metrics=scores, directions=dict.fromkeys(scores, "max"), modules=["rouge"],
            baselines={}, num_examples=NUM_EXAMPLES, split="test", step=30, predictions="",
            checkpoint="", data="", config="", examples_digest="8" * 64,
        )  # fmt: skip
        write_json(folder / "metrics.json", summary.to_json())
        lines = [
            {"row_id": str(row), "scores": dict.fromkeys(scores, row * index % 7 * 10.0)}
            for row in range(NUM_EXAMPLES)
        ]
        text = "".join(f"{json.dumps({**line, 'statistics': {}})}\n" for line in lines)
        (folder / "per_example.jsonl").write_text(text)
        return folder


def environment(bytecode: Path) -> dict[str, str]:
    """With compiled modules, as an installed package has them, in a folder of their own."""
    kept = {key: one for key, one in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(bytecode)}


@dataclass(frozen=True)
class Seconds:
    """What a process took.

    Args:
        elapsed: by the clock.
        cpu: user and system time, which other processes of a busy machine change little.
    """

    elapsed: float
    cpu: float


def seconds_of(command: list[str], variables: dict[str, str]) -> Seconds:
    start, before = time.perf_counter(), _cpu_of_children()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    return Seconds(time.perf_counter() - start, _cpu_of_children() - before)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(
    command: list[str], cache: Path, repeats: int, variables: dict[str, str]
) -> tuple[Seconds, Seconds]:
    """Seconds of the first call without any cache, and medians of `repeats` calls after it."""
    seconds_of(command, variables)  # compiles the modules
    shutil.rmtree(cache, ignore_errors=True)
    first = seconds_of(command, variables)
    later = [seconds_of(command, variables) for _ in range(repeats)]
    elapsed = statistics.median(one.elapsed for one in later)
    return first, Seconds(elapsed, statistics.median(one.cpu for one in later))


def run_verbs(root: Path, repeats: int) -> dict[str, tuple[Seconds, Seconds]]:
    """Time each verb."""
    program = [sys.executable, "-m", "redco_flow.cli.main"]
    where = ["--workspace", str(root)]
    listed = subprocess.run(
        [*program, "ls", "--json", "--last", "2", *where], check=True, capture_output=True
    )
    last, before = (run["run"] for run in json.loads(listed.stdout))
    verbs = {
        "ls": ["ls"],
        "status": ["status"],
        "why": ["why", "rougeL"],
        "artifacts": ["artifacts"],
        "history": ["history", PIPELINE],
        "diff": ["diff", before, last],
    }
    cache = root / "cache"
    commands = {"python": [sys.executable, "-c", "pass"]}
    commands |= {name: [*program, *words, *where] for name, words in verbs.items()}
    with tempfile.TemporaryDirectory() as bytecode:
        variables = environment(Path(bytecode))
        return {name: measure(words, cache, repeats, variables) for name, words in commands.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-runs", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workspace", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.workspace or Path(folder)
        if not (root / "runs").is_dir():
            filler = WorkspaceFiller(root)
            for index in range(options.num_runs):
                filler.add_run(index)
        num_runs = len(list((root / "runs").iterdir()))
        num_artifacts = sum(1 for _ in root.glob("artifacts/*/*/manifest.json"))
        seconds = run_verbs(root, options.repeats)
    for name, (first, later) in seconds.items():
        print(
            f"{name:10} {later.elapsed * 1000:6.0f} ms, {later.cpu * 1000:5.0f} ms of CPU; "
            f"without any cache {first.elapsed * 1000:6.0f} ms, {first.cpu * 1000:5.0f} ms of CPU"
        )
    rounded = {
        name: {"elapsed": round(later.elapsed, 3), "cpu": round(later.cpu, 3)}
        for name, (_, later) in seconds.items()
    }
    counts = {"num_runs": num_runs, "num_artifacts": num_artifacts}
    print(json.dumps({**counts, "median_seconds": rounded}))


if __name__ == "__main__":
    main()
