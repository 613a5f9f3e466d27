"""Real run directories, made through tracking's public interface, as a run leaves them behind."""

import itertools
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe

from redco_flow.records import append_json_line, write_json, write_text
from redco_flow.report.page import build_report
from redco_flow.stages.artifacts.predictions import PredictionsSummary, write_predictions
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.metrics_artifact import MetricsSummary, Prediction
from redco_flow.tracking.results import StageResult, fingerprint, publish_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

CODE = {"commit": "c0ffee" * 6 + "beef", "dirty": True, "patch_digest": "3" * 64}
DATA_SHA = {"train.csv": "1" * 64, "test.csv": "2" * 64}
ORIGINS = {
    "stages.train.learning_rate": {"source": "pipelines/demo.yaml", "line": 12, "column": 20},
    "stages.train.num_epochs": {"source": "command line", "line": 0, "column": 0},
    "data.train": {"source": "pipelines/demo.yaml", "line": 5, "column": 10},
}
SETTINGS = {
    "preprocess": {"data": {"train": "train.csv"}, "max_source_length": 64},
    "train": {
        "recipe": "text_to_text",
        "learning_rate": 1e-4,
        "num_epochs": 3,
        "schedule": {"type": "linear", "warmup_ratio": 0.1},
    },
    "predict": {"num_beams": 4},
    "evaluate": {"metrics": ["rouge"]},
}
VERSIONS = {"python": "3.11.2", "jax": "0.11.0", "flax": "0.12.1", "redco-flow": "0.1.0"}


class RunBuilder:
    """Leaves behind what the stages of a run do."""

    def __init__(self, workspace: Workspace, folder: Path, *, name="demo", **create) -> None:
        self.workspace, self.folder = workspace, folder
        self.store = ArtifactStore(workspace)
        argv = ["/usr/bin/redco-flow", "run", "pipelines/demo.yaml", "num_epochs=3"]
        given = {"argv": argv, "pipeline_path": "pipelines/demo.yaml", "code": CODE, **create}
        self.run = RunDirectory.create(workspace, name, **given)
        self.entries: dict[str, dict] = {}
        self.results: dict[str, StageResult] = {}
        self.files = 0
        write_text(self.run.resolved_path, "name: demo\nstages:\n  train:\n    num_epochs: 3\n")
        write_text(self.run.patch_path, "diff --git a/x b/x\n")

    def write(self, name: str, text: str) -> Path:
        """A file in a directory of its own, to be published."""
        self.files += 1
        path = self.folder / f"out-{self.files}" / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        return path

    def attempt(self, stage: str, *, log="", records=(), fingerprint_=""):
        attempt = self.run.new_attempt(stage)
        write_json(attempt.job_path, {"executor": "local", "job_id": f"{stage}-{attempt.number}"})
        write_json(attempt.call_path, {"stage": stage, "fingerprint": fingerprint_})
        if log:
            attempt.log_path().write_text(log, encoding="utf-8")
        for record in records:
            append_json_line(attempt.metrics_path, record)
        return attempt

    def complete(
        self,
        stage,
        outputs,
        *,
        kind=None,
        inputs=None,
        data=None,
        metrics=None,
        records=(),
        seconds=12.5,
        settings=None,
        metadata=None,
        log="worker says hello\n",
        directories=(),
    ):
        """A stage that ran: outputs is name → directory or file to publish."""
        kind = kind or stage
        inputs = inputs or {}
        ingredients = {
            "kind": kind,
            "settings": settings if settings is not None else SETTINGS.get(kind, {}),
            "inputs": inputs,
            "data": data or {},
            "code": {f"redco_flow.stages.{kind}": "4" * 64},
            **({"directories": directories} if directories else {}),
        }
        digest = fingerprint(ingredients)
        attempt = self.attempt(stage, log=log, records=records, fingerprint_=digest)
        parents = {
            slot if len(ids) == 1 else f"{slot}/{index}": one
            for slot, ids in inputs.items()
            for index, one in enumerate(ids)
        }
        produced_by = {
            "stage": stage,
            "run": self.run.id,
            "attempt": attempt.number,
            "fingerprint": digest,
            "code": CODE,
            "host": "node7",
        }
        ids = {
            name: self.store.publish(
                name.partition("/")[0],
                path,
                metadata=(metadata or {}).get(name, {}),
                parents=parents,
                produced_by=produced_by,
            ).id
            for name, path in outputs.items()
        }
        result = StageResult(
            fingerprint=digest,
            pipeline="demo",
            stage=stage,
            kind=kind,
            ingredients=ingredients,
            outputs=ids,
            metrics=metrics,
            run=self.run.id,
            attempt=attempt.number,
            seconds=seconds,
            code=CODE,
            origins=ORIGINS,
            host="node7",
            versions=VERSIONS,
        )
        self.results[stage] = publish_result(self.workspace, result)
        write_json(
            attempt.result_path,
            {"fingerprint": digest, "outputs": ids, "metrics": metrics, "seconds": seconds},
        )
        self._entry(stage, "completed", attempt=attempt.number, seconds=seconds, artifacts=ids)
        self.entries[stage]["metrics"] = metrics
        return ids

    def reuse(self, stage: str, result: StageResult) -> None:
        self.results[stage] = result
        self._entry(stage, "completed", reused=True, seconds=0.0, artifacts=result.outputs)
        self.entries[stage] |= {"metrics": result.metrics, "message": f"made by {result.run}"}
        plan = {name: {"fingerprint": one.fingerprint} for name, one in self.results.items()}
        write_json(self.run.plan_path, {"stages": plan})

    def fail(self, stage: str, *, type_="ValueError", message="boom", log="", state="failed"):
        attempt = self.attempt(stage, log=log)
        if state == "failed":
            trace = f"Traceback (most recent call last):\n  File x\n{type_}: {message}\n"
            error = {"type": type_, "message": message, "traceback": trace}
            write_json(attempt.error_path, error)
        ended = {"exit_code": 1, "cause": state, "message": f"{type_}: {message}", "signal": None}
        write_json(attempt.exit_path, ended)
        self._entry(stage, state, attempt=attempt.number, message=f"job 7 failed: {message}")
        return attempt

    def skip(self, stage: str) -> None:
        self._entry(stage, "skipped", message="an upstream stage failed")

    def close(self, state="completed", message="4 stages completed", **fields) -> RunDirectory:
        self.run.write_state(
            {
                "state": state,
                "exit_code": 0 if state == "completed" else 1,
                "message": message,
                "started_at": "2026-01-31T12:00:00.000+00:00",
                "ended_at": None if state == "running" else "2026-01-31T12:04:10.000+00:00",
                "stages": self.entries,
                **fields,
            }
        )
        return self.run

    def _entry(self, stage, state, **fields) -> None:
        empty = {"reused": False, "attempt": None, "seconds": None, "artifacts": {}, "message": ""}
        self.entries[stage] = {**empty, "state": state, **fields}

    # The stages of a text-to-text pipeline.

    def preprocess(self, *, text="rows", metadata=None) -> dict[str, str]:
        files = {"dataset": self.write("train.arrow", text)}
        return self.complete("preprocess", files, data=DATA_SHA, metadata=metadata)

    def train(self, dataset: str, *, stage="train", records=None, **given) -> dict[str, str]:
        outputs = {
            "checkpoint/last": self.write("params", f"{stage} last"),
            "checkpoint/best/rouge2": self.write("params", f"{stage} best"),
        }
        metadata = {name: {"step": 300} for name in outputs}
        return self.complete(
            stage,
            outputs,
            kind="train",
            inputs={"dataset": [dataset]},
            records=training_records() if records is None else records,
            metrics={"eval_loss": 1.25, "rouge2": 18.5},
            metadata=metadata,
            **given,
        )

    def predict(
        self, checkpoint: str, dataset: str, rows, *, stage="predict", target=None
    ) -> dict[str, str]:
        frequent = {"text": "A pub.", "count": 3, "num_rows": 100}
        generation = {"num_beams": 4, "length_penalty": 1.0, "max_target_length": None}
        summary = PredictionsSummary(
            split="test",
            num_examples=len(rows),
            generation=generation,
            checkpoint=checkpoint,
            step=300,
            data=dataset,
            config="6" * 64,
            most_frequent_target=frequent,
            target=target,
        )
        folder = self.folder / f"out-{stage}"
        write_predictions(folder, [Prediction(**row) for row in rows], summary)
        return self.complete(
            stage,
            {"predictions": folder},
            kind="predict",
            inputs={"checkpoint": [checkpoint], "dataset": [dataset]},
            metadata={"predictions": summary.to_json()},
        )

    def evaluate(
        self,
        predictions: str,
        scores,
        metrics,
        *,
        baselines=None,
        confusion=None,
        parts=None,
        modules=("rouge",),
        stage="evaluate",
        split="test",
    ) -> dict[str, str]:
        made = self.store.get(predictions)
        summary = MetricsSummary(
            metrics=metrics,
            directions={key: "min" if "perplexity" in key else "max" for key in metrics},
            modules=list(modules),
            baselines=baselines or {},
            num_examples=len(scores),
            split=split,
            step=300,
            predictions=predictions,
            checkpoint=made.metadata["checkpoint"],
            data=made.metadata["data"],
            config="7" * 64,
            examples_digest="8" * 64,
            confusion=confusion,
            parts=parts,
        )
        lines = [
            json.dumps({"row_id": str(index), "scores": one, "statistics": {}})
            for index, one in enumerate(scores)
        ]
        path = self.write("per_example.jsonl", "".join(f"{line}\n" for line in lines))
        write_json(path.parent / "metrics.json", summary.to_json())
        return self.complete(
            stage,
            {"metrics": path.parent},
            kind="evaluate",
            inputs={"predictions": [predictions]},
            metrics=metrics,
            metadata={"metrics": summary.to_json()},
            records=[{"kind": "evaluation", "step": 300, "metrics": metrics}],
        )

    def compare(self, first: str, second: str, pair, *, stage="compare") -> dict[str, str]:
        record = {"format": 1, "num_examples": 60, "num_resamples": 1000, "confidence": 0.95}
        record |= {"seed": 0, "systems": [], "pairs": [pair]}
        path = self.write("comparison.json", json.dumps(record))
        name = f"{pair['key']}({pair['first']}-{pair['second']})"
        return self.complete(
            stage,
            {"metrics": path},
            kind="compare",
            inputs={"metrics": [first, second]},
            metrics={name: pair["difference"]},
            metadata={"metrics": record},
        )

    def whole(self, rows=None) -> RunDirectory:
        """A run that went well from end to end."""
        rows = sample_rows() if rows is None else rows
        dataset = self.preprocess()["dataset"]
        best = self.train(dataset)["checkpoint/best/rouge2"]
        predictions = self.predict(best, dataset, rows)["predictions"]
        scores = [{"rouge1": 2.0 * (i % 50), "rouge2": float(i % 50)} for i in range(len(rows))]
        baselines = {
            "most_frequent_target": {"text": "A pub.", "metrics": {"rouge1": 9.5, "rouge2": 0.4}},
            "copy_source": {"text": None, "metrics": {"rouge1": 12.5, "rouge2": 1.25}},
        }
        metrics = {"rouge1": 41.25, "rouge2": 18.75}
        self.evaluate(predictions, scores, metrics, baselines=baselines)
        return self.close()


def training_records(num_steps=300, every=10, evals=3, start=0):
    """What a training logs: a falling loss, a linear schedule with warmup, some evaluations."""
    records = []
    for step in range(start + every, num_steps + 1, every):
        rate = 1e-4 * min(step / 30, (num_steps - step) / (num_steps - 30))
        records.append(
            {
                "kind": "training",
                "step": step,
                "total_steps": num_steps,
                "epoch": step / 100,
                "loss": 1.2 + 4 * math.exp(-step / 60) + 0.05 * math.sin(step),
                "grad_norm": 0.5 + 3 * math.exp(-step / 40),
                "learning_rate": rate,
                "tokens_per_second": 8000.0 + step,
            }
        )
        if step % (num_steps // evals) == 0:
            measured = {"eval_loss": 1.3 + 3 * math.exp(-step / 60), "rouge2": 20 - 900 / step}
            measured |= {"rouge1": 44 - 1500 / step, "rougeL": 40 - 1400 / step}
            records.append(scores(step, measured, epoch=step / 100))
    return records


def scores(step, metrics, **more):
    """What a training records when the checkpoint of an evaluation is committed."""
    record = {"kind": "evaluation", "step": step, "epoch": None, "metrics": metrics, **more}
    return {**record, "checkpoint": "5" * 64}


def sample_rows(count=60):
    return [
        {
            "row_id": f"test.csv:{index + 2}",
            "source": f"name[Blue Spice {index}], eatType[pub]",
            "prediction": f"Blue Spice {index} is a pub.",
            "references": [f"Blue Spice {index} is a pub.", "A pub in the riverside area."],
        }
        for index in range(count)
    ]


class Page(HTMLParser):
    """A page taken apart: its texts, tags and attributes."""

    _VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.plots: list[dict] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-2:] == ["div", "script"]:
            self.plots.append(json.loads(data))
        elif not {"style", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def charts(self) -> list[str]:
        """What the charts are called, for those who do not see them."""
        return [str(one["aria-label"]) for one in self.all("div") if one.get("class") == "plot"]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def has(self, tag: str, class_: str) -> bool:
        return any(class_ in (one.get("class") or "").split() for one in self.all(tag))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "workspace")


@pytest.fixture
def make_builder(workspace, tmp_path):
    numbers = itertools.count()
    return lambda **given: RunBuilder(workspace, tmp_path / f"made-{next(numbers)}", **given)


@pytest.fixture
def builder(make_builder) -> RunBuilder:
    return make_builder()


@pytest.fixture
def read_report(workspace):
    """Build a run's page and take it apart."""

    def read(run: RunDirectory) -> Page:
        path = build_report(run, workspace)
        assert path == run.report_path
        return Page(path.read_text(encoding="utf-8"))

    return read


class OpenedPage:
    """A page in a browser, with all that it asked for and complained of."""

    def __init__(self, browser, path: Path, *, width=1100, scheme="light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.context.set_default_timeout(300_000)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda one: self.asked.append(one.url))
        self.page.on("console", lambda one: self.complaints.append(one.text))
        self.page.on("pageerror", lambda one: self.complaints.append(str(one)))
        self.page.goto(path.as_uri())

    def drawn(self):
        """The page, once its charts are drawn."""
        self.page.wait_for_selector("html.has-charts", state="attached")
        return self.page

    def violations(self) -> list[str]:
        """What axe finds fault with: rule and element."""
        found = Axe().run(self.page).response["violations"]
        return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


@pytest.fixture
def open_page(chromium):
    """Open a page of ours: path, width and scheme of colours."""
    opened: list[OpenedPage] = []

    def open_(path: Path, **given) -> OpenedPage:
        opened.append(OpenedPage(chromium, path, **given))
        return opened[-1]

    yield open_
    for one in opened:
        one.context.close()
