"""What each recipe and example takes and comes to: lines, time, metric, trivial baseline.

    python benchmarks/paradigms.py [--only fedavg maml] [--folder FOLDER]

Runs each pipeline of pipelines/ that needs neither the hub nor data of one's own, one after the
other, in a workspace of its own. Lines of code are those of the script, or of the recipe's modules
and those it shares with other recipes (models and tokenizers are the library's), without blank
lines, comments and docstrings. Prints a table in Markdown, and one JSON line last; exits with 1 if
a pipeline failed.
"""

import argparse
import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from redco_flow.errors import ConfigError
from redco_flow.orchestrate.prefect.server import ensure_server, stop_server
from redco_flow.recipes.find import find_recipe
from redco_flow.spec.load import load_pipeline
from redco_flow.stages.data.hub_references import hub_references
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace

PROJECT = Path(__file__).resolve().parents[1]
RECIPES = PROJECT / "redco_flow" / "recipes"
CONTRACT = ("model", "outputs")  # of every recipe, and not a part of any
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """A metric and what needs no training; None where that is not measured."""

    metric: str
    value: float
    baseline_name: str | None = None
    baseline: float | None = None


@dataclass(frozen=True)
class Paradigm:
    """A row of the table.

    Args:
        lines: of all text; `code`: without blank lines, comments and docstrings.
        seconds: from the command to its end, with a Prefect server running.
        score: None where the run failed, and `problem` says why.
    """

    name: str
    source: str
    code: int
    lines: int
    seconds: float
    score: Score | None
    problem: str = ""


def count_code(text: str) -> int:
    """Count the lines that hold code."""
    docstrings = {
        row
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {row for t in found if t.type not in NO_CODE for row in range(t.start[0], t.end[0] + 1)}
    return len(code - docstrings)


def source_files(pipeline: Mapping[str, Any]) -> list[Path]:
    """Return the scripts of a pipeline's YAML, or the modules of its recipe."""
    bodies = [body for body in pipeline["stages"].values() if isinstance(body, dict)]
    if scripts := {body["path"] for body in bodies if body.get("kind") == "script"}:
        return [PROJECT / path for path in sorted(scripts)]
    module = Path(str(sys.modules[find_recipe(pipeline["recipe"]).module].__file__))
    in_folder = (module.parent / "__init__.py").is_file() and module.parent != RECIPES
    files = sorted(module.parent.glob("*.py")) if in_folder else [module]
    for file in files:  # grows: what recipes share counts for each
        names = re.findall(
            r"^ *from redco_flow\.recipes\.parts\.(\w+) import", file.read_text(), re.M
        )
        shared = (RECIPES / "parts" / f"{name}.py" for name in names if name not in CONTRACT)
        files += [one for one in shared if one.is_file() and one not in files]
    return files


def offline_pipelines(only: list[str]) -> Iterator[Path]:
    """Yield those that run as they stand, without the hub, and end with a metric."""
    for path in sorted((PROJECT / "pipelines").glob("*.yaml")):
        try:
            stages = load_pipeline(path).stages.values()
        except ConfigError:  # wants data on the command line
            continue
        needs_hub = any(True for stage in stages for _ in hub_references(stage.config))
        is_scored = any(stage.kind in ("evaluate", "script") for stage in stages)
        if is_scored and not needs_hub and (not only or path.stem in only):
            yield path


def score_of_script(metrics: Mapping[str, float]) -> Score:
    """Read a script's metrics: `x` is the metric where there are `x_…`, the last the trivial one.

    Raises:
        ValueError: there are none such.
    """
    for name, value in metrics.items():
        if compared := [other for other in metrics if other.startswith(f"{name}_")]:
            return Score(name, value, compared[-1].removeprefix(f"{name}_"), metrics[compared[-1]])
    raise ValueError(f"no metric has a baseline named after it: {', '.join(metrics)}.")


def score_of_evaluation(
    metrics: Mapping[str, float], known: Mapping[str, Any], wanted: str | None
) -> Score:
    """Return the best trivial baseline beside the metric that chose the checkpoint.

    Args:
        known: what stands in the metrics artifact: baselines, directions.
        wanted: that metric; another one is told where it was not evaluated or has no baseline.
    """
    scored = [(name, one["metrics"]) for name, one in known.get("baselines", {}).items()]
    with_baseline = [key for key in metrics if any(key in scores for _, scores in scored)]
    evaluated = [wanted] if wanted in metrics else []
    named = [key for key in evaluated if key in with_baseline]
    metric = (named or with_baseline or evaluated or list(metrics))[0]
    compared = [(scores[metric], name) for name, scores in scored if metric in scores]
    if not compared:
        return Score(metric, metrics[metric])
    best = min if known.get("directions", {}).get(metric) == "min" else max
    value, name = best(compared)
    return Score(metric, metrics[metric], name, value)


def score_of_run(pipeline: Path, workspace: Path, run: str) -> Score:
    """Read what a run says of its last stage that has metrics."""
    state = json.loads((workspace / "runs" / run / "state.json").read_text())
    last = [stage for stage in state["stages"].values() if stage.get("metrics")][-1]
    evaluated = [last["artifacts"][name] for name in last["artifacts"] if name == "metrics"]
    if not evaluated:
        return score_of_script(last["metrics"])
    predict = load_pipeline(pipeline).stages["predict"]
    chosen = predict.inputs["checkpoint"][0].output.rpartition("/")[2]
    artifact = ArtifactStore(Workspace.open(workspace)).find(evaluated[0])
    return score_of_evaluation(last["metrics"], artifact.metadata if artifact else {}, chosen)


def measure(pipeline: Path, folder: Path) -> Paradigm:
    """Run a pipeline in a folder and tell of it."""
    files = source_files(yaml.safe_load(pipeline.read_text()))
    texts = [file.read_text() for file in files]
    source = files[0].parent if files[0].name == "__init__.py" else files[0]
    code, lines = sum(map(count_code, texts)), sum(len(text.splitlines()) for text in texts)
    command = [sys.executable, "-m", "redco_flow.cli.main", "run", str(pipeline), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = round(time.perf_counter() - start, 1)
    name, where = pipeline.stem, str(source.relative_to(PROJECT))
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        score = score_of_run(pipeline, folder / "redco-workspace", said["run"])
    except (IndexError, ValueError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}; {done.stderr[-500:]}"
        return Paradigm(name, where, code, lines, seconds, None, problem)
    problem = "" if done.returncode == 0 else done.stderr[-500:]
    return Paradigm(name, where, code, lines, seconds, None if problem else score, problem)


def markdown(paradigms: list[Paradigm]) -> str:
    """Return the table."""
    head = (
        "| pipeline | written in | lines of code (of all) | seconds | metric | trivial baseline |"
    )
    return "\n".join([head, "|---|---|---:|---:|---|---|", *map(_row, paradigms)])


def _row(one: Paradigm) -> str:
    metric = baseline = "failed" if one.score is None else "—"
    if one.score is not None:
        metric = f"{one.score.metric} {one.score.value:.4g}"
    if one.score is not None and one.score.baseline is not None:
        baseline = f"{one.score.baseline:.4g} ({str(one.score.baseline_name).replace('_', ' ')})"
    size = f"{one.code} ({one.lines})"
    return f"| {one.name} | `{one.source}` | {size} | {one.seconds:.0f} | {metric} | {baseline} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of pipelines")
    parser.add_argument("--folder", type=Path, help="to run in; kept; a temporary one by default")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ |= {"REDCO_FLOW_HOME": f"{temporary}/home", "HF_HUB_OFFLINE": "1"}
        ensure_server()
        try:
            paradigms = []
            for pipeline in offline_pipelines(options.only):
                paradigms.append(measure(pipeline, folder))
                print(_row(paradigms[-1]), paradigms[-1].problem, file=sys.stderr, flush=True)
        finally:
            stop_server()
    print(markdown(paradigms))
    print(json.dumps({"paradigms": [asdict(one) for one in paradigms]}))
    sys.exit(any(one.score is None for one in paradigms))


if __name__ == "__main__":
    main()
