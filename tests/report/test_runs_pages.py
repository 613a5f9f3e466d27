"""Pages of several runs: comparison, sweep, history, diff; in a real browser too."""

import copy
from statistics import mean, stdev

import pytest

from redco_flow.report.compared_run import ComparedRun
from redco_flow.report.comparison import comparison_page, diff_page, overlaid
from redco_flow.report.history import HistoryEntry, history_page
from redco_flow.report.run_diff.measures import Resampling
from redco_flow.report.run_diff.runs import diff_runs
from redco_flow.report.runs_page import write_page
from redco_flow.report.sweep_page import SweptRun, sweep_page
from redco_flow.tracking.score_identity import ScoreIdentity
from tests.report.conftest import Page, sample_rows, training_records

NOW = "2026-02-01T00:00:00.000+00:00"
TRAP = "</script><img src=x onerror=document.title='trapped'>"
SCORES = {("1e-4", 0): 20.0, ("1e-4", 1): 22.0, ("1e-3", 0): 30.0, ("1e-3", 1): 35.0}


@pytest.fixture
def make_run(make_builder):
    """A run whose evaluation has this score, trained with this learning rate and seed."""

    def make(rate, seed, score):
        builder = make_builder(overrides=[f"learning_rate={rate}", f"seed={seed}"])
        builder.run.resolved_path.write_text(
            f"name: demo\nstages:\n  train: {{learning_rate: {rate}, seed: {seed}, epochs: 3}}\n"
        )
        dataset = builder.preprocess()["dataset"]
        settings = {"learning_rate": rate, "seed": seed}
        made = builder.train(dataset, records=training_records(), settings=settings)
        rows = [{**row, "prediction": f"{rate} {seed}"} for row in sample_rows(4)]
        predictions = builder.predict(made["checkpoint/last"], dataset, rows)["predictions"]
        per_example = [{"rouge1": score}] * len(rows)
        builder.evaluate(predictions, per_example, {"rouge1": score})
        return builder.close()

    return make


@pytest.fixture
def points(make_run):
    """A sweep over two learning rates and two seeds."""
    found = []
    for (rate, seed), score in SCORES.items():
        overrides = [f"learning_rate={rate}", f"seed={seed}"]
        run = ComparedRun(make_run(rate, seed, score), "  ".join(overrides))
        found.append(SweptRun(run, overrides))
    return found


@pytest.fixture
def runs(points):
    return [point.run for point in points]


PROMOTED = {"weekly-c": ["production, now"]}


def history_entries():
    given = {"sweep": "", "seconds": 60.0, "not_compared": {}, "code_changed": False}
    well = {**given, "state": "completed", "cause": "", "message": "", "data": "4" * 64}
    failed = {**well, "state": "failed", "cause": "out_of_memory", "message": TRAP}
    return [
        HistoryEntry("weekly-a", "2026-01-05T03:00:00.000+00:00", **well, metrics={"rouge1": 20.0},
                     differences={}, data_changed=None),
        HistoryEntry("weekly-b", "2026-01-12T03:00:00.000+00:00", **failed, metrics={},
                     differences={}, data_changed=False),
        HistoryEntry("weekly-c", "2026-01-19T03:00:00.000+00:00", **well, metrics={"rouge1": 25.0},
                     differences={"rouge1": 5.0}, data_changed=True),
    ]  # fmt: skip


def page_of_diff(first, second, num_resamples):
    return diff_page(diff_runs(first, second, Resampling(num_resamples)), NOW)


def altered(run, **values):
    """The run with other values of its cached properties."""
    copied = copy.copy(run)
    copied.__dict__.update(values)
    return copied


def read(page, folder) -> Page:
    return Page(write_page(page, folder / "page.html").read_text(encoding="utf-8"))


def test_a_comparison_has_the_settings_that_differ_and_marks_the_best_score(runs, tmp_path):
    page = read(comparison_page(runs, NOW), tmp_path)

    assert "stages.train.learning_rate 0.0001 0.0001 0.001 0.001" in page.text
    assert "stages.train.seed 0 1 0 1" in page.text
    assert "epochs" not in page.text
    assert page.text.count("(best)") == 1
    assert "35.00 (best)" in page.text


def test_a_score_on_other_rows_has_the_reason_below_it_and_no_score_is_the_best(runs, tmp_path):
    other = {"rouge1": ScoreIdentity("test", "other rows")}
    one_differs = [*runs[:-1], altered(runs[-1], identities=other)]

    page = read(comparison_page(one_differs, NOW), tmp_path)

    assert "(best)" not in page.text
    label = " ".join(runs[0].label.split())
    assert f"35.00 not compared with {label}: other rows of 'test'" in page.text


def test_many_metrics_of_a_few_runs_have_a_line_each(runs, tmp_path):
    metrics = {f"metric {index}": float(index) for index in range(12)}
    few = [altered(run, metrics=metrics) for run in runs]

    page = read(comparison_page(few, NOW), tmp_path)

    assert "metric 11 11.00 11.00 11.00 11.00" in page.text


def test_scores_of_parts_stand_beside_each_other_and_the_best_of_each_is_marked(runs, tmp_path):
    of_parts = [
        altered(run, parts={"rouge1": {"de": score, "fr": 10.0}})
        for run, score in zip(runs, (1.0, 3.0, 2.0), strict=False)
    ]

    page = read(comparison_page(of_parts, NOW), tmp_path)

    assert "rouge1 of each part" in page.text
    first, second = (" ".join(run.label.split()) for run in of_parts[:2])
    assert f"{first} 1.00 10.00 {second} 3.00 (best) 10.00" in page.text
    assert "rouge1 of each part" not in read(comparison_page(runs, NOW), tmp_path).text


def test_scores_of_parts_name_their_stage_where_several_stages_have_some(make_builder):
    builder = make_builder()
    dataset = builder.preprocess()["dataset"]
    checkpoint = builder.train(dataset, records=training_records())["checkpoint/last"]
    predictions = builder.predict(checkpoint, dataset, sample_rows(4))["predictions"]
    for stage, value in (("evaluate", 1.0), ("evaluate_again", 2.0)):
        parts = {"de": {"num_examples": 4, "metrics": {"rouge1": value}}}
        scores = [{"rouge1": value}] * 4
        builder.evaluate(predictions, scores, {"rouge1": value}, parts=parts, stage=stage)

    found = ComparedRun(builder.close()).parts

    assert found == {"evaluate/rouge1": {"de": 1.0}, "evaluate_again/rouge1": {"de": 2.0}}


def test_curves_of_several_runs_are_overlaid(runs):
    figures = {figure.title: figure for figure in overlaid(runs)}

    assert {
        "training loss",
        "val/eval_loss",
        "val/rouge2",
        "learning rate",
        "gradient norm",
    } <= set(figures)
    names = [trace["name"] for trace in figures["training loss"].plot["data"]]
    assert names == [run.label for run in runs]


def test_a_sweep_tells_mean_and_spread_over_its_seeds(points, tmp_path):
    failed = ComparedRun(points[0].run.run, "without a score", view={"metrics": {}})
    points.append(SweptRun(failed, ["learning_rate=1e-4", "seed=3"]))

    page = read(sweep_page("demo-sweep-abc", "completed", points, NOW), tmp_path)

    for rate, num_seeds, note in (("1e-4", 3, " 2 seeds"), ("1e-3", 2, "")):
        values = [score for (one, _), score in SCORES.items() if one == rate]
        assert f"learning_rate={rate} {num_seeds}" in page.text
        assert f"{mean(values):.2f} ± {stdev(values):.2g}{note}" in page.text
    assert "32.50 ± 3.5 (best)" in page.text
    assert "best rouge1 35.00 with learning_rate=1e-3 seed=1" in page.text


def test_a_sweep_shows_each_setting_against_each_metric_and_all_at_once(points, tmp_path):
    page = read(sweep_page("demo-sweep-abc", "completed", points, NOW), tmp_path)

    scatter = next(p for p in page.plots if p["layout"]["yaxis"]["title"]["text"] == "rouge1")
    assert scatter["data"][0]["x"] == [1e-4, 1e-4, 1e-3, 1e-3]
    assert scatter["data"][0]["y"] == list(SCORES.values())
    assert scatter["layout"]["xaxis"]["type"] == "log"
    (parallel,) = (p for p in page.plots if "ticktext" in p["layout"]["yaxis"])
    place = parallel["data"][0]["x"].index("rouge1")
    places = [trace["y"][place] for trace in parallel["data"]]
    assert places == pytest.approx([(score - 20) / 15 for score in SCORES.values()], abs=1e-5)


def test_values_that_are_no_numbers_are_categories(points, tmp_path):
    named = [
        SweptRun(point.run, [f"optimizer={name}"])
        for point, name in zip(points, ("adam", "sgd", "adam", "lion"), strict=True)
    ]

    page = read(sweep_page("demo-sweep-abc", "completed", named, NOW), tmp_path)

    scatter = next(p for p in page.plots if p["layout"]["yaxis"]["title"]["text"] == "rouge1")
    assert scatter["data"][0]["x"] == ["adam", "sgd", "adam", "lion"]
    assert scatter["layout"]["xaxis"]["type"] == "category"
    assert "Over seeds" not in page.text


def test_a_history_marks_promotions_new_data_and_failures(tmp_path):
    page = read(history_page("weekly", history_entries(), ["rouge1"], PROMOTED, NOW), tmp_path)

    (plot,) = page.plots
    marks = {trace["name"]: trace for trace in plot["data"]}
    assert marks["score"]["y"] == [20.0, 25.0]
    assert marks["new data"]["x"] == marks["promoted"]["x"] == ["2026-01-19 03:00:00"]
    assert (marks["failed"]["x"], marks["failed"]["y"]) == (["2026-01-12 03:00:00"], [20.0])
    assert "last promotion production, now" in page.text
    assert "25.00 +5.00" in page.text


def test_a_diff_has_its_groups_and_both_runs_curves(make_run, tmp_path):
    first, second = make_run("1e-4", 0, 20.0), make_run("1e-3", 0, 30.0)

    page = read(page_of_diff(first, second, 100), tmp_path)

    setting = page.text[page.text.index("stages.train.learning_rate 0.0001") :]
    assert " 0.001 " in setting[:120]
    assert "rouge1 20.00 30.00 +10.00" in page.text
    assert [trace["name"] for trace in page.plots[0]["data"]] == [first.id, second.id]


def test_a_run_whose_records_are_damaged_is_compared_by_what_is_left(make_run, tmp_path):
    whole, damaged = make_run("1e-4", 0, 20.0), make_run("1e-3", 0, 30.0)
    damaged.state_path.write_text("nonsense")
    damaged.resolved_path.unlink()
    (attempt,) = damaged.attempts("train")
    attempt.metrics_path.write_text("{}\nnonsense\n")

    page = read(comparison_page([ComparedRun(one) for one in (whole, damaged)], NOW), tmp_path)

    assert f"run {whole.id} {damaged.id} state ✓ completed … damaged" in page.text
    assert "20.00" in page.text


@pytest.mark.slow
def test_each_page_fits_a_phone_is_accessible_and_asks_for_nothing(
    open_page, points, runs, tmp_path
):
    given = history_entries()
    pages = {
        "comparison": comparison_page(runs, NOW),
        "sweep": sweep_page(f"{TRAP}-sweep", "completed", points, NOW),
        "history": history_page(TRAP, given, ["rouge1"], {}, NOW),
        "diff": page_of_diff(runs[0].run, runs[1].run, 0),
    }
    for name, page in pages.items():
        path = write_page(page, tmp_path / f"{name}.html")

        opened = open_page(path, width=390)
        drawn = opened.drawn()

        assert opened.violations() == [], name
        assert drawn.evaluate("document.documentElement.scrollWidth") <= 390, name
        assert opened.asked == [path.as_uri()], name
        assert opened.complaints == [], name
        assert drawn.locator("img").count() == 0, name


@pytest.mark.slow
def test_pointing_at_a_run_in_a_history_says_which_it_is(open_page, tmp_path):
    path = write_page(
        history_page("weekly", history_entries(), ["rouge1"], PROMOTED, NOW), tmp_path / "h.html"
    )
    drawn = open_page(path).drawn()
    drawn.locator(".plot").scroll_into_view_if_needed()

    point = drawn.locator(".plot .points path").first.bounding_box()
    drawn.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    drawn.wait_for_selector(".plot .hoverlayer .hovertext")

    assert "weekly-a" in drawn.locator(".plot .hoverlayer").text_content()
