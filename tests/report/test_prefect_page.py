"""What the Prefect UI shows of a run: made of the run's files, without Prefect."""

import json

import pytest

from redco_flow.records import write_json
from redco_flow.report.prefect_page import live_artifact, page_artifacts
from redco_flow.tracking.aliases import AliasEvent, AliasName, AliasStore
from tests.report.conftest import sample_rows


def shown(run, workspace):
    return {one.key: one for one in page_artifacts(run, workspace)}


@pytest.fixture
def make_run(make_builder):
    """A completed run whose evaluation has this score."""

    def make(score, **given):
        builder = make_builder(**given)
        dataset = builder.preprocess()["dataset"]
        best = builder.train(dataset)["checkpoint/best/rouge2"]
        rows = [{**row, "prediction": f"said {score}"} for row in sample_rows(4)]
        predictions = builder.predict(best, dataset, rows)["predictions"]
        builder.evaluate(predictions, [{"rouge1": score}] * 4, {"rouge1": score, "rouge2": 18.5})
        return builder.close(prefect_url=f"http://127.0.0.1:4200/runs/flow-run/{score}")

    return make


def test_keys_name_pipeline_and_what_is_shown_and_not_the_run(make_run, workspace):
    first, second = (shown(make_run(score), workspace) for score in (40.0, 42.5))

    assert list(first) == list(second) == ["demo-summary", "demo-metrics"]


def test_metrics_stand_beside_the_last_run_and_production(make_run, workspace):
    before = make_run(40.0)
    event = AliasEvent("promoted", "c" * 64, "2026-01-01", "ann", metrics={"rouge1": 45.0})
    AliasStore(workspace).move(AliasName("demo", "production"), event, after=None)

    found = shown(make_run(42.5), workspace)

    row = found["demo-metrics"].data[0]
    assert row == {
        "metric": "rouge1",
        "value": "42.50",
        before.id: "40.00",
        f"minus {before.id}": "+2.50 better",
        "@demo/production": "45.00",
        "minus @demo/production": "−2.50 worse",
    }
    said = f"rouge1 **42.50** (+2.50 to {before.id}, −2.50 to @demo/production)"
    assert found["demo-metrics"].description == said
    # `val/eval_loss` and `val/rouge2` are the training's, evaluations come first.
    names = [row["metric"] for row in found["demo-metrics"].data]
    assert names == ["rouge1", "rouge2", "val/eval_loss", "val/rouge2"]


def test_what_the_run_promoted_itself_is_beside_what_was_there_before(make_run, workspace):
    run = make_run(42.5)
    best = run.read_state()["stages"]["train"]["artifacts"]["checkpoint/best/rouge2"]
    name, store, alias = AliasName("demo", "production"), AliasStore(workspace), None
    for checkpoint, score in (("c" * 64, 41.0), (best, 42.5)):
        event = AliasEvent("promoted", checkpoint, "2026-01-01", "ann", metrics={"rouge1": score})
        alias = store.move(name, event, after=alias)

    found = shown(run, workspace)

    assert found["demo-metrics"].data[0]["minus @demo/production"] == "+1.50 better"


def test_metrics_stand_beside_the_last_run_of_the_same_pipeline(make_run, workspace):
    runs = [make_run(score) for score in (40.0, 41.0, 39.0)]
    make_run(99.0, name="another")

    row = shown(runs[-1], workspace)["demo-metrics"].data[0]

    assert row[runs[1].id] == "41.00"
    assert (runs[0].id in row, len(row)) == (False, 4)


def test_names_are_shown_as_they_are_written(make_builder, workspace):
    written = "<b>*bold*</b> [link](http://example.org) `x` _a_ snake_case"
    builder = make_builder()
    dataset = builder.preprocess()["dataset"]
    best = builder.train(dataset)["checkpoint/best/rouge2"]
    predictions = builder.predict(best, dataset, sample_rows(4))["predictions"]
    builder.evaluate(predictions, [{"rouge1": 1.0}] * 4, {written: 1.0})
    builder.close()

    row = shown(builder.run, workspace)["demo-metrics"].data[0]

    assert row["metric"] == (
        r"&lt;b&gt;\*bold\*&lt;/b&gt; \[link\](http://example.org) \`x\` \_a\_ snake_case"
    )


def test_the_summary_names_report_and_stages_and_what_cannot_be_shown(builder, workspace):
    run = builder.whole()
    artifact = builder.store.get(builder.results["evaluate"].outputs["metrics"])
    manifest = artifact.directory / "manifest.json"
    record = json.loads(manifest.read_text())
    record["metadata"]["directions"] = 7  # as no version of ours has written it
    manifest.write_text(json.dumps(record))

    found = shown(run, workspace)

    summary = found["demo-summary"].data
    assert f"| report | `{run.report_path}` |" in summary
    assert f"predictions `{builder.results['predict'].outputs['predictions'][:12]}`" in summary
    assert "The metrics cannot be shown: TypeError" in summary
    assert "demo-metrics" not in found


def test_a_training_at_work_tells_step_loss_and_time_left(builder, workspace):
    attempt = builder.attempt("train", records=[{"kind": "training", "step": 10, "loss": 2.5}])
    progress = {"phase": "training", "step": 375, "total_steps": 1500, "loss": 2.125}
    progress |= {"seconds_left": 83.0, "time": "2026-01-31T12:00:00.000+00:00"}
    write_json(attempt.progress_path, progress)

    found = live_artifact(builder.run, "train")
    write_json(attempt.progress_path, {**progress, "phase": "evaluating", "step": 1})
    evaluating = live_artifact(builder.run, "train")

    assert (found.key, found.data) == ("demo-progress-train", 25.0)
    assert found.description == "train: step 375 of 1,500, loss 2.125, 1 min 23 s left"
    assert evaluating is None
