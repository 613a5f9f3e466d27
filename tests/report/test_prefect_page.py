"""The summary of a run in the Prefect UI: made of the run's files, without Prefect."""

from redco_flow.report.prefect_page import run_summary
from tests.report.conftest import sample_rows


def test_the_key_names_the_pipeline_and_not_the_run(make_builder, workspace):
    first, second = (make_builder().whole() for _ in range(2))

    assert first.id != second.id
    keys = [run_summary(run, workspace).key for run in (first, second)]
    assert keys == ["demo-summary", "demo-summary"]


def test_names_are_shown_as_they_are_written(make_builder, workspace):
    written = "<b>*bold*</b> [link](http://example.org) `x` _a_ snake_case"
    builder = make_builder()
    dataset = builder.preprocess()["dataset"]
    best = builder.train(dataset)["checkpoint/best/rouge2"]
    predictions = builder.predict(best, dataset, sample_rows(4))["predictions"]
    builder.evaluate(predictions, [{"rouge1": 1.0}] * 4, {written: 1.0})
    builder.close()

    found = run_summary(builder.run, workspace)

    name = r"&lt;b&gt;\*bold\*&lt;/b&gt; \[link\](http://example.org) \`x\` \_a\_ snake_case"
    assert f"| {name} | 1 |" in found.data
    # An evaluation's metrics come before the training's own.
    assert found.description.startswith(f"{name} 1, val/")


def test_the_summary_names_report_stages_and_what_cannot_be_read(builder, workspace):
    run = builder.whole()
    summary = run_summary(run, workspace).data
    run.plan_path.write_text("nonsense")

    of_damaged = run_summary(run, workspace).data

    assert f"| report | `{run.report_path}` |" in summary
    assert f"predictions `{builder.results['predict'].outputs['predictions'][:12]}`" in summary
    assert "cannot be read" not in summary
    assert "cannot be read" in of_damaged
