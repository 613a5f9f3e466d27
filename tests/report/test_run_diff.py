"""What differs between two runs: real run directories, a real git repository, real bootstraps."""

import json
import math
import subprocess

import pytest

from redco_flow.cli.text import page_text
from redco_flow.orchestrate.run.ingredients import CodeState
from redco_flow.records import write_json, write_text
from redco_flow.report.comparison import diff_page
from redco_flow.report.run_diff.measures import Resampling
from redco_flow.report.run_diff.runs import HIDDEN, diff_runs
from redco_flow.tracking.run_directory import RunDirectory
from tests.report.conftest import sample_rows, training_records

NUM_EXAMPLES = 60


def diff(first, second, num_resamples=0):
    return diff_runs(first, second, Resampling(num_resamples))


def text_of(found):
    return page_text(diff_page(found, ""), 120)


def by_key(changes):
    return {change.key: change for change in changes}


def finished(builder, *, data="rows", settings=None, records=None, scores=None, metrics=None):
    """A run from data to scores."""
    if settings is not None:
        write_text(builder.run.resolved_path, settings)
    dataset = builder.preprocess(text=data)["dataset"]
    best = builder.train(dataset, records=records)["checkpoint/best/rouge2"]
    predictions = builder.predict(best, dataset, sample_rows(NUM_EXAMPLES))["predictions"]
    builder.evaluate(
        predictions, scores or [{"rouge1": 0.0}] * NUM_EXAMPLES, metrics or {"rouge1": 0.0}
    )
    return builder.close()


def test_two_equal_runs_are_equal_in_everything(make_builder):
    first, second = make_builder().whole(), make_builder().whole()

    found = diff(first, second)

    assert set(found.equal) == {
        *("stages", "settings", "data", "code", "packages", "metrics", "training", "placement")
    }
    assert found.remarks == ()


def test_a_setting_is_told_with_both_values_and_the_places_where_they_were_written(make_builder):
    builders = make_builder(), make_builder(overrides=["num_epochs=3", "seed=1"])
    origins = {"source": "pipelines/demo.yaml", "line": 7, "column": 3}
    write_json(builders[0].run.origins_path, {"stages.train.num_epochs": origins})
    given = {"source": "command line", "line": 0, "column": 0}
    write_json(builders[1].run.origins_path, {"stages.train.num_epochs": given})
    text = "name: demo\nstages:\n  train:\n    num_epochs: {}\n    learning_rate: 1e-4\n"
    first = finished(builders[0], settings=text.format(2))
    second = finished(builders[1], settings=text.format(3))

    (change,) = diff(first, second).settings

    assert (change.key, change.first, change.second) == ("stages.train.num_epochs", 2, 3)
    assert change.first_place == "pipelines/demo.yaml:7"
    assert change.second_place == "command line: num_epochs=3"


def test_what_no_fingerprint_holds_is_told_apart_from_settings(make_builder):
    text = "name: demo\nstages:\n  train:\n    num_epochs: {0}\n    num_workers: {0}\n"
    first = finished(make_builder(), settings=text.format(1))
    second = finished(make_builder(), settings=text.format(2))

    found = diff(first, second)

    assert [change.key for change in found.settings] == ["stages.train.num_epochs"]
    assert [change.key for change in found.placement] == ["stages.train.num_workers"]


def test_a_model_s_directory_whose_files_are_digested_determines_nothing(make_builder):
    builders = make_builder(), make_builder()
    for builder, place in zip(builders, ("/here", "/there"), strict=True):
        section = {"name_or_path": place, "dtype": place[1:]}
        write_text(builder.run.resolved_path, json.dumps({"model": section}))
        directories = [["model", "name_or_path"]]
        builder.complete("train", {}, settings={"model": section}, directories=directories)

    found = diff(*(builder.close() for builder in builders))

    assert [change.key for change in found.settings] == ["model.dtype"]
    assert [change.key for change in found.placement] == ["model.name_or_path"]


def test_other_raw_data_are_told_by_file_with_their_digests(make_builder):
    first, second = make_builder(), make_builder()
    first.complete(
        "preprocess", {"dataset": first.write("a", "1")}, data={"x": "1" * 64, "y": "2" * 64}
    )
    second.complete(
        "preprocess", {"dataset": second.write("a", "2")}, data={"x": "1" * 64, "y": "3" * 64}
    )

    found = by_key(diff(first.close(), second.close()).data)

    assert set(found) == {"y", "dataset"}
    assert (found["y"].first, found["y"].second) == ("2" * 64, "3" * 64)
    assert found["y"].stages == ("preprocess",)


def test_values_of_a_profile_s_variables_are_not_shown(make_builder):
    first, second = make_builder(), make_builder()
    for builder, value in ((first, "one"), (second, "two")):
        profile = {"executor": "local", "environment": {"PASSWORD": value}}
        record = {"workspace": "w", "directory": "d", "profile": profile}
        write_json(builder.run.path / "launch.json", record)

    found = diff(first.close(), second.close())

    change = by_key(found.placement)["profile.environment.PASSWORD"]
    assert (change.first, change.second) == (HIDDEN, HIDDEN)


def test_the_last_losses_and_steps_of_trainings_are_told(make_builder):
    first = finished(make_builder(), records=training_records(num_steps=300))
    second = finished(make_builder(), records=training_records(num_steps=600))

    found = by_key(diff(first, second).training)

    assert (found["step"].first, found["step"].second) == (300, 600)
    expected = 1.2 + 4 * math.exp(-600 / 60) + 0.05 * math.sin(600)
    assert found["train/loss"].second == pytest.approx(expected)


def test_a_difference_of_scores_has_the_interval_of_the_binomial(make_builder):
    half = [{"rouge1": 100.0 * (i % 2)} for i in range(NUM_EXAMPLES)]
    first = finished(make_builder())
    second = finished(make_builder(), data="other", scores=half, metrics={"rouge1": 50.0})

    change = by_key(diff(first, second, num_resamples=4000).metrics)["rouge1"]

    assert (change.first, change.second, change.difference) == (0.0, 50.0, 50.0)
    # The share of 60 draws that hit a row of score 100; about a third of an example's 1.67 as
    # tolerance on either side of the normal approximation, which a binomial has steps in.
    spread = 1.96 * 100 * math.sqrt(0.25 / NUM_EXAMPLES)
    assert change.low == pytest.approx(50 - spread, abs=1.7)
    assert change.high == pytest.approx(50 + spread, abs=1.7)
    assert change.is_significant
    assert "better" in text_of(diff(first, second, num_resamples=400))


def test_scores_of_other_examples_have_no_interval_and_say_so(make_builder):
    first = finished(make_builder())
    builder = make_builder()
    summary_digest = "9" * 64
    second = finished(builder, data="other", metrics={"rouge1": 5.0})
    (artifact,) = (
        one for one in builder.store.list("metrics") if one.metadata["metrics"]["rouge1"]
    )
    path = artifact.path / "metrics.json"
    path.chmod(0o644)
    path.write_text(json.dumps({**json.loads(path.read_text()), "examples_digest": summary_digest}))

    change = by_key(diff(first, second, num_resamples=400).metrics)["rouge1"]

    assert change.low is None
    assert change.remark == "scored on other examples"


def test_scores_of_another_split_have_no_difference(make_builder):
    first = finished(make_builder())
    builder = make_builder()
    dataset = builder.preprocess(text="other")["dataset"]
    checkpoint = builder.train(dataset)["checkpoint/last"]
    predictions = builder.predict(checkpoint, dataset, sample_rows(NUM_EXAMPLES))["predictions"]
    scores = [{"rouge1": 5.0}] * NUM_EXAMPLES
    builder.evaluate(predictions, scores, {"rouge1": 5.0}, split="validation")
    second = builder.close()

    found = diff(first, second, num_resamples=400)
    change = by_key(found.metrics)["rouge1"]

    assert (change.first, change.second, change.difference, change.low) == (0.0, 5.0, None, None)
    assert change.not_compared == "another split: 'validation', not 'test'"
    assert f"not compared: {change.not_compared}" in text_of(found)


def git(folder, *words):
    words = ("git", "-c", "user.name=a", "-c", "user.email=a@b", *words)
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "recipe.py").write_text("RATE = 1\nKEPT = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    return folder


def started(workspace, repository) -> RunDirectory:
    """A run of the code as it now is."""
    code = CodeState.read(repository)
    run = RunDirectory.create(workspace, "demo", code=code.record)
    code.write_patch(run.patch_path)
    return run


def test_the_patch_leads_from_the_first_run_s_code_to_the_second_s(workspace, repository):
    """Uncommitted changes on one side, a commit and a new file on the other."""
    recipe = repository / "recipe.py"
    recipe.write_text("RATE = 2\nKEPT = 1\n")
    first = started(workspace, repository)
    recipe.write_text("RATE = 3\nKEPT = 1\n")
    git(repository, "commit", "-qam", "second")
    (repository / "new.py").write_text("NEW = 1\n")
    second = started(workspace, repository)
    objects = sorted((repository / ".git" / "objects").rglob("*"))

    patch = diff(first, second).patch

    assert sorted((repository / ".git" / "objects").rglob("*")) == objects
    (repository / "new.py").unlink()
    recipe.write_text("RATE = 2\nKEPT = 1\n")
    (repository / "patch").write_text(patch.text)
    git(repository, "apply", "patch")
    assert recipe.read_text() == "RATE = 3\nKEPT = 1\n"
    assert (repository / "new.py").read_text() == "NEW = 1\n"


def test_without_the_repository_the_uncommitted_changes_are_compared(
    workspace, repository, monkeypatch, tmp_path
):
    (repository / "recipe.py").write_text("RATE = 2\nKEPT = 1\n")
    first = started(workspace, repository)
    (repository / "recipe.py").write_text("RATE = 3\nKEPT = 1\n")
    second = started(workspace, repository)
    monkeypatch.chdir(tmp_path)

    patch = diff(first, second).patch

    assert "-+RATE = 2" in patch.text
    assert "++RATE = 3" in patch.text
    assert "no repository here has" in patch.remark


def test_a_damaged_record_is_said_and_the_rest_is_compared(make_builder):
    builders = make_builder(), make_builder()
    text = "name: demo\nstages:\n  train:\n    num_epochs: {}\n"
    first = finished(builders[0], settings=text.format(1))
    broken = text.format("2: 3: 4")
    second = finished(builders[1], data="other", settings=broken, metrics={"rouge1": 5.0})

    found = diff(first, second)

    assert any("resolved.yaml" in remark for remark in found.remarks)
    assert by_key(found.metrics)["rouge1"].difference == 5.0
