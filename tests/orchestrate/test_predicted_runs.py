"""What `plan` predicts is what a run then does, over random edits of settings, data and code."""

import json
import random
import sys

import pytest
from orchestrate_runs import InProcess, count_lines

pytestmark = pytest.mark.slow

PIPELINE = """\
name: edited
stages:
  numbers: {{kind: edited_kinds.numbers, file: numbers.json, count: {count}}}
  total: {{kind: edited_kinds.total, rate: {rate}}}
  again: {{kind: edited_kinds.total, rate: {again}}}
  report: {{kind: edited_kinds.report, metrics: [total, again]}}
"""
HEAD = """\
import json
from pathlib import Path
from redco_flow.spec.model import DataFile
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.runtime.context import Output, StageOutputs

def write(context, kind, content):
    with open("{executions}", "a") as file:
        file.write(context.stage + "\\n")
    path = context.work_dir / "metrics.json"
    path.write_text(json.dumps(content))
    return StageOutputs({{kind: Output(kind, path)}})

def read(artifact):
    return json.loads((artifact.path / "metrics.json").read_text())
"""
NUMBERS = """
INPUTS, OUTPUTS = {{}}, {{"dataset": "dataset"}}

class Config(StageConfig):
    file: DataFile
    count: int

def data_files(config):
    return [Path(config.file)]

def run(context, config):
    numbers = json.loads(Path(config.file).read_text())[:config.count]
    return write(context, "dataset", [{numbers} * number for number in numbers])
"""
TOTAL = """
INPUTS, OUTPUTS = {{"dataset": InputSlot(kind="dataset")}}, {{"metrics": "metrics"}}

class Config(StageConfig):
    rate: int

def run(context, config):
    total = {total} * config.rate * sum(read(context.input("dataset")))
    return write(context, "metrics", {{"total": total}})
"""
REPORT = """
INPUTS = {{"metrics": InputSlot(kind="metrics", many=True)}}
OUTPUTS = {{"predictions": "predictions"}}

class Config(StageConfig):
    pass

def run(context, config):
    totals = [read(one)["total"] for one in context.inputs["metrics"]]
    return write(context, "predictions", {report} * max(totals))
"""
SETTINGS = {"count": (2, 3, 9), "rate": (1, 2), "again": (2, 3)}
DATA = ([1, 2, 3], [1, 2, 4], [2, 1, 3])
# Each is the factor that a kind multiplies with; the second is another source of the same result.
CODE = ("1", "(2 - 1)", "2")
NUM_EDITS = 14


class Edited:
    """A pipeline, its data and its code, as they stand now; what each stage makes of them."""

    def __init__(self, folder):
        self.folder = folder
        self.settings = {"count": 3, "rate": 1, "again": 2}
        self.data = DATA[0]
        self.code = dict.fromkeys(("numbers", "total", "report"), CODE[0])

    def edit(self, chosen):
        """Change one thing."""
        what = chosen.choice(("settings", "data", "code"))
        if what == "settings":
            name = chosen.choice(list(SETTINGS))
            self.settings[name] = chosen.choice(SETTINGS[name])
        elif what == "data":
            self.data = chosen.choice(DATA)
        else:
            self.code[chosen.choice(list(self.code))] = chosen.choice(CODE)

    def write(self):
        """Write it all down; return the pipeline."""
        (self.folder / "numbers.json").write_text(json.dumps(self.data))
        head = HEAD.format(executions=self.folder / "executions")
        kinds = self.folder / "edited_kinds"
        for name, text in {"numbers": NUMBERS, "total": TOTAL, "report": REPORT}.items():
            (kinds / f"{name}.py").write_text(head + text.format(**{name: self.code[name]}))
        return PIPELINE.format(**self.settings)

    def keys(self):
        """For each stage, all that its result depends on, by the content of its inputs."""
        factors = {name: eval(code) for name, code in self.code.items()}
        rows = [factors["numbers"] * number for number in self.data[: self.settings["count"]]]
        rates = {"total": self.settings["rate"], "again": self.settings["again"]}
        totals = {name: factors["total"] * rate * sum(rows) for name, rate in rates.items()}
        of_numbers = ("numbers", self.code["numbers"], self.settings["count"], *self.data)
        return {
            "numbers": of_numbers,
            **{name: ("total", self.code["total"], rates[name], *rows) for name in rates},
            "report": ("report", self.code["report"], *totals.values()),
        }


def test_a_run_does_what_was_planned_and_never_the_same_work_twice(runs, tmp_path, monkeypatch):
    chosen = random.Random(0)
    edited = Edited(tmp_path)
    (tmp_path / "edited_kinds").mkdir()
    (tmp_path / "edited_kinds/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    executions, made = tmp_path / "executions", set()
    try:
        for _ in range(NUM_EDITS):
            text, keys = edited.write(), edited.keys()
            new = [name for name, key in keys.items() if key not in made]
            # Of two stages that are to make the same thing at once, one makes it for both.
            expected = sorted({keys[name]: name for name in new}.values())
            before = count_lines(executions)

            planned = runs.plan(text).stages
            outcome = InProcess(runs.write(text)).end()

            done = executions.read_text().splitlines()[before:] if executions.exists() else []
            assert outcome.state == "completed", outcome.message
            assert len(done) == len(expected), (edited.__dict__, done)
            assert {keys[name] for name in done} == {keys[name] for name in expected}
            for name, stage in planned.items():
                assert stage.action in ("run", "reuse", "wait")
                if stage.action != "wait":  # what waits is known when its inputs are
                    assert (stage.action == "run") == (name in new), (name, stage.reason)
            made.update(keys.values())
            edited.edit(chosen)
    finally:
        for name in [one for one in sys.modules if one.startswith("edited_kinds")]:
            del sys.modules[name]
