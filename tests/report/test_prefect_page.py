"""What the Prefect UI shows of a run: made of the run's files, without Prefect."""

import base64
import re
from xml.etree import ElementTree

import pytest

from redco_flow.records import write_json
from redco_flow.report.charts import Line, LineChart
from redco_flow.report.line_picture import draw_lines
from redco_flow.report.prefect_page import live_artifacts, page_artifacts
from redco_flow.tracking.aliases import AliasEvent, AliasName, AliasStore
from tests.report.conftest import sample_rows

SVG = "{http://www.w3.org/2000/svg}"


def shown(run, workspace):
    return {one.key: one for one in page_artifacts(run, workspace)}


def pictures_of(markdown):
    found = re.findall(r"\(data:image/svg\+xml;base64,([^)]+)\)", markdown)
    return [ElementTree.fromstring(base64.b64decode(one)) for one in found]


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

    # `val/eval_loss` and `val/rouge2` are the training's, evaluations come first.
    assert list(first) == list(second)
    assert list(first) == [
        "demo-summary",
        "demo-metrics",
        "demo-metric-rouge1",
        "demo-metric-rouge2",
        "demo-metric-val-eval-loss",
        "demo-metric-val-rouge2",
        "demo-training-train",
        "demo-samples-evaluate",
    ]


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
    assert found["demo-metric-rouge1"].description == f"{said}; before: 40.00"


def test_what_the_run_promoted_itself_is_beside_what_was_there_before(make_run, workspace):
    run = make_run(42.5)
    best = run.read_state()["stages"]["train"]["artifacts"]["checkpoint/best/rouge2"]
    name, store, alias = AliasName("demo", "production"), AliasStore(workspace), None
    for checkpoint, score in (("c" * 64, 41.0), (best, 42.5)):
        event = AliasEvent("promoted", checkpoint, "2026-01-01", "ann", metrics={"rouge1": score})
        alias = store.move(name, event, after=alias)

    found = shown(run, workspace)

    assert found["demo-metrics"].data[0]["minus @demo/production"] == "+1.50 better"


def test_a_metrics_page_shows_it_over_the_runs_with_links_to_them(make_run, workspace):
    runs = [make_run(score) for score in (40.0, 41.0, 39.0)]
    make_run(99.0, name="another")

    metric = shown(runs[-1], workspace)["demo-metric-rouge1"]

    rows = [line for line in metric.data.splitlines() if line.startswith("| [demo-")]
    assert [row.split(" | ")[2:] for row in rows] == [
        ["39.00", "−2.00 |"],
        ["41.00", "+1.00 |"],
        ["40.00", " |"],
    ]
    assert f"[{runs[0].id}](http://127.0.0.1:4200/runs/flow-run/40.0)" in rows[-1]
    (picture,) = pictures_of(metric.data)
    assert len(picture.findall(f".//{SVG}circle")) == 3


def test_a_trainings_page_has_its_loss_as_a_picture(builder, workspace):
    training = shown(builder.whole(), workspace)["demo-training-train"]

    loss = pictures_of(training.data)[0]
    assert "Loss over optimizer steps" in loss.find(f"{SVG}title").text
    lines = [one.get("points").split() for one in loss.findall(f".//{SVG}polyline")]
    assert [len(points) for points in lines] == [30, 3]  # records and evaluations
    heights = [float(point.partition(",")[2]) for point in lines[0]]
    assert heights[0] < heights[-1]  # down the picture: the loss falls
    assert training.description.startswith("training loss 1.1")


def test_samples_are_rows_that_show_what_was_written_as_it_is(builder, workspace):
    written = "<b>*bold*</b> [link](http://example.org) `x` _a_ snake_case"
    rows = [{"row_id": "1", "source": "s", "prediction": written, "references": ["r"]}]
    builder.whole(rows)

    [row] = shown(builder.run, workspace)["demo-samples-evaluate"].data

    assert row["prediction"] == (
        r"&lt;b&gt;\*bold\*&lt;/b&gt; \[link\](http://example.org) \`x\` \_a\_ snake_case"
    )
    assert (row["row"], row["reference"], row["rouge1"]) == ("1", "r", "0.00")


def test_the_summary_names_report_and_records_and_what_cannot_be_shown(builder, workspace):
    run = builder.whole()
    predictions = builder.results["predict"].outputs["predictions"]
    artifact = builder.store.get(predictions)
    (artifact.path / "predictions.jsonl").unlink()

    found = shown(run, workspace)

    summary = found["demo-summary"].data
    assert f"`{run.report_path}`" in summary
    assert f"| predict/predictions | `{artifact.directory / 'manifest.json'}` |" in summary
    assert "Sample predictions cannot be shown: FileNotFoundError" in summary
    assert "demo-training-train" in found


def test_a_training_at_work_tells_step_loss_and_time_left(builder, workspace):
    attempt = builder.attempt("train", records=[{"kind": "training", "step": 10, "loss": 2.5}])
    progress = {"phase": "training", "step": 375, "total_steps": 1500, "loss": 2.125}
    progress |= {"seconds_left": 83.0, "time": "2026-01-31T12:00:00.000+00:00"}
    write_json(attempt.progress_path, progress)

    found = live_artifacts(builder.run, "train", with_curve=True)
    write_json(attempt.progress_path, {**progress, "phase": "evaluating", "step": 1})
    evaluating = live_artifacts(builder.run, "train", with_curve=False)

    assert [one.key for one in found] == ["demo-progress-train", "demo-training-train"]
    assert found[0].data == 25.0
    assert found[0].description == "train: step 375 of 1,500, loss 2.125, 1 min 23 s left"
    assert evaluating == []


@pytest.mark.parametrize(
    ("ys", "ticks"),
    [
        ([0.0, 0.4], ["0", "0.1", "0.2", "0.3", "0.4"]),
        ([7.0], ["4", "6", "8", "10"]),
        ([1e-5, 1.0], ["1e-05", "0.001", "0.1"]),
        ([-3.0, 3.0], ["-2", "0", "2"]),
    ],
)
def test_a_picture_has_round_numbers_along_its_side(ys, ticks):
    points = [(float(at), y) for at, y in enumerate(ys)]
    chart = LineChart("t", "step", "loss", [Line("a & b", points, 1)], may_be_log=min(ys) > 0)

    picture = ElementTree.fromstring(draw_lines(chart))

    texts = picture.findall(f"{SVG}text")
    assert [one.text for one in texts if one.get("x") == "62"] == ticks
