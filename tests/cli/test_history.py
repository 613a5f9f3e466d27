"""The runs of one pipeline over time: real records, written as a run writes them."""

import json
import re

import pytest

from redco_flow.cli.text import page_text
from redco_flow.cli.view import read_run_view
from redco_flow.records import write_json
from redco_flow.report.compared_run import ComparedRun
from redco_flow.report.history import history_page, read_entries
from redco_flow.tracking.aliases import AliasEvent, AliasName, AliasStore
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult, fingerprint, publish_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command


class Pipeline:
    """Leaves behind the runs of a pipeline with one stage."""

    def __init__(self, folder) -> None:
        self.workspace = Workspace.open(folder)
        self.folder = folder
        self.runs: list[RunDirectory] = []

    def complete(self, score, *, data="1", code="1", name="weekly", rows="") -> RunDirectory:
        run = RunDirectory.create(self.workspace, name)
        ingredients = {"kind": "evaluate", "data": {"rows": data * 64}, "code": {"own": code * 64}}
        ingredients["settings"] = {"score": score}
        digest = fingerprint(ingredients)
        source = self.folder / "scores.json"
        source.write_text(str(score))
        known = {"split": "test", "examples_digest": rows, "num_examples": 1 + (rows == "b")}
        metadata = known if rows else {}
        artifact = ArtifactStore(self.workspace).publish("metrics", source, metadata=metadata)
        made = {"outputs": {"metrics": artifact.id}, "metrics": {"rougeL": score}}
        publish_result(
            self.workspace,
            StageResult(digest, name, "evaluate", "evaluate", ingredients, run=run.id, **made),
        )
        self._close(
            run,
            "completed",
            artifacts=made["outputs"],
            metrics=made["metrics"],
            fingerprint=digest,
        )
        return run

    def train_and_score(self, *, accuracy, tested=None) -> None:
        """A training and, unless the run stopped before, an evaluation; kinds as in state.json."""
        made = {"state": "completed", "reused": False, "artifacts": {"checkpoint/last": "c" * 64}}
        train = {"kind": "train", **made, "metrics": {"accuracy": accuracy}}
        evaluate = {"kind": "evaluate", "state": "skipped", "artifacts": {}, "metrics": None}
        if tested is not None:
            scored = {"artifacts": {"metrics": "d" * 64}, "metrics": {"accuracy": tested}}
            evaluate |= {"state": "completed", **scored}
        run = RunDirectory.create(self.workspace, "weekly")
        stages = {"train": train, "evaluate": evaluate}
        run.write_state({"state": "completed", "exit_code": 0, "message": "", "stages": stages})
        self.runs.append(run)

    def fail(self, cause: str) -> RunDirectory:
        run = RunDirectory.create(self.workspace, "weekly")
        attempt = run.new_attempt("evaluate")
        record = {"exit_code": None, "cause": cause, "message": "killed", "signal": 9}
        write_json(attempt.exit_path, record)
        self._close(run, "failed", attempt=1, message="job 7 was killed\nmore", artifacts={})
        return run

    def _close(self, run, state, **fields) -> None:
        stages = {"evaluate": {"state": state, "reused": False, **fields}}
        run.write_state({"state": state, "exit_code": 0, "message": "", "stages": stages})
        self.runs.append(run)

    def history(self, num_last=20):
        runs = [ComparedRun(run, view=read_run_view(run)) for run in self.runs]
        return read_entries(runs, num_last=num_last)


def history_text(entries, metrics) -> str:
    return page_text(history_page("weekly", entries, metrics, {}, ""), 120)


@pytest.fixture
def pipeline(tmp_path) -> Pipeline:
    return Pipeline(tmp_path / "redco-workspace")


def test_each_score_stands_beside_its_difference_to_the_last_run_that_has_it(pipeline):
    pipeline.complete(30.0)
    pipeline.fail("out_of_memory")
    pipeline.complete(32.5)

    first, failed, last = pipeline.history()

    assert first.differences == {}
    assert failed.metrics == {}
    assert last.differences == {"rougeL": 2.5}
    assert "32.5 (+2.50)" in history_text(pipeline.history(), ["rougeL"])


def test_a_validation_score_is_never_subtracted_from_an_evaluations(pipeline, tmp_path):
    """The second run stopped after its training: its only accuracy is that of its validation."""
    pipeline.train_and_score(accuracy=24.44, tested=26.92)
    pipeline.train_and_score(accuracy=24.44)

    whole, until_train = pipeline.history()

    assert whole.metrics == {"accuracy": 26.92, "val/accuracy": 24.44}
    assert until_train.metrics == {"val/accuracy": 24.44}
    assert until_train.differences == {"val/accuracy": 0.0}
    command = Command(tmp_path)
    shown = command("history", "weekly", "-n", "1", "--metric", "accuracy", code=2)
    assert "no metric 'accuracy': only val/accuracy, measured by the training" in shown


def test_scores_on_other_rows_have_no_difference_but_a_footnote(pipeline):
    pipeline.complete(30.0, rows="a")
    pipeline.complete(90.0, rows="b")
    pipeline.complete(91.0, rows="b")

    _, second, third = entries = pipeline.history()

    assert second.differences == {}
    assert second.not_compared == {"rougeL": "other rows of 'test' (2, not 1)"}
    assert third.differences == {"rougeL": 1.0}
    shown = history_text(entries, ["rougeL"]).splitlines()
    assert "90 [1]" in shown[2]
    assert shown[4] == "[1] not compared with the run before: other rows of 'test' (2, not 1)"


def test_the_first_run_shown_has_its_difference_to_the_one_before(pipeline):
    pipeline.complete(30.0)
    pipeline.complete(29.0)

    (last,) = pipeline.history(num_last=1)

    assert last.differences == {"rougeL": -1.0}


def test_new_data_and_new_code_are_told_apart(pipeline):
    pipeline.complete(30.0)
    pipeline.complete(31.0, data="2")
    pipeline.complete(32.0, data="2", code="2")
    pipeline.complete(33.0, data="2", code="2")

    entries = pipeline.history()

    assert [one.data_changed for one in entries] == [None, True, False, False]
    assert [one.code_changed for one in entries] == [None, False, True, False]
    assert entries[0].data != entries[1].data == entries[2].data


def test_a_failure_is_told_with_its_cause_and_the_first_line_of_its_message(pipeline):
    pipeline.fail("out_of_memory")

    (entry,) = pipeline.history()

    assert (entry.state, entry.cause) == ("failed", "out_of_memory")
    assert entry.message == "evaluate: job 7 was killed"
    assert "out_of_memory" in history_text([entry], [])


def test_only_the_pipeline_that_is_named_by_its_name_or_its_file_is_told(pipeline, tmp_path):
    command = Command(tmp_path)
    (tmp_path / "file.yaml").write_text("name: weekly\nstages: {}\n")
    run = pipeline.complete(30.0)
    pipeline.complete(10.0, name="other")

    by_name = command.json("history", "weekly")
    by_file = command.json("history", "file.yaml")

    assert [one["run"] for one in by_name["runs"]] == [run.id]
    assert by_file["runs"] == by_name["runs"]


def test_the_page_marks_the_run_whose_checkpoint_was_promoted(pipeline, tmp_path):
    pipeline.complete(30.0)
    pipeline.fail("out_of_memory")
    promoted = pipeline.complete(32.5, data="2")
    made = promoted.read_state()["stages"]["evaluate"]["artifacts"]["metrics"]
    event = AliasEvent("promoted", made, "2026-02-01T12:00:00.000+00:00", "ann")
    AliasStore(pipeline.workspace).move(AliasName("weekly", "production"), event, after=None)

    Command(tmp_path)("history", "weekly", "--html", "history.html")

    page = (tmp_path / "history.html").read_text(encoding="utf-8")
    (plot,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    marks = {trace["name"]: trace for trace in json.loads(plot)["data"]}
    assert marks["promoted"]["y"] == marks["new data"]["y"] == [32.5]
    assert promoted.id in marks["promoted"]["text"][0]
    assert "@weekly/production, 2026-02-01 12:00 UTC" in marks["promoted"]["text"][0]
    assert (marks["failed"]["y"], len(marks["failed"]["text"])) == ([30.0], 1)


def test_a_pipeline_or_a_metric_that_is_not_there_is_answered_with_what_is(pipeline, tmp_path):
    command = Command(tmp_path)
    pipeline.complete(30.0)

    assert "there are runs of weekly" in command("history", "weakly", code=2)
    assert "no metric 'rouge1': the metrics are rougeL" in command(
        "history", "weekly", "--metric", "rouge1", code=2
    )
