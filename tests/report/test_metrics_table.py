import pytest

from redco_flow.report.metrics import comparisons, confusions, metrics_groups
from redco_flow.report.stage_facts import read_stages


@pytest.fixture
def groups(builder):
    def read():
        stages = read_stages(builder.close(), builder.workspace, pytest.fail)
        return metrics_groups(stages.values(), builder.store)

    return read


def evaluated(builder, metrics, baselines=None, **given):
    dataset = builder.preprocess()["dataset"]
    best = builder.train(dataset)["checkpoint/best/rouge2"]
    rows = [{"row_id": "1", "source": "s", "prediction": "p", "references": ["r"]}]
    predictions = builder.predict(best, dataset, rows)["predictions"]
    builder.evaluate(predictions, [metrics], metrics, baselines=baselines, **given)
    return best


def test_metrics_stand_beside_every_baseline(builder, groups):
    baselines = {
        "most_frequent_target": {"text": "A pub.", "metrics": {"rouge1": 9.5}},
        "copy_source": {"text": None, "metrics": {"rouge1": 12.5}},
    }
    best = evaluated(builder, {"rouge1": 41.25}, baselines)

    group = groups()[0]

    assert [(one.name, one.text) for one in group.baselines] == [
        ("most frequent target", "A pub."),
        ("copy source", ""),
    ]
    assert group.rows[0].baselines == (9.5, 12.5)
    assert group.rows[0].difference == "+28.75"
    assert group.rows[0].is_better is True
    assert (group.rows[0].bar, group.rows[0].ticks) == (41.25, (9.5, 12.5))
    assert group.num_examples == 1
    assert group.scored == f"split test, checkpoint {best[:12]} of stage train, step 300"


def test_a_metric_below_its_baseline_says_so(builder, groups):
    evaluated(builder, {"rouge1": 5.0}, {"copy_source": {"metrics": {"rouge1": 6.5}}})

    row = groups()[0].rows[0]

    assert (row.difference, row.is_better) == ("−1.50", False)


def test_a_metric_equal_to_its_baseline_is_neither_better_nor_worse(builder, groups):
    evaluated(builder, {"rouge1": 5.0}, {"copy_source": {"metrics": {"rouge1": 5.0}}})

    assert groups()[0].rows[0].is_better is None
    assert groups()[0].rows[0].difference == "0.00"


def test_a_metric_without_a_baseline_stands_alone(builder, groups):
    evaluated(builder, {"rouge1": 5.0, "own": 1.0}, {"copy_source": {"metrics": {"rouge1": 5.0}}})

    assert groups()[0].rows[1].baselines == (None,)
    assert groups()[0].rows[1].difference == ""


def test_values_beyond_percentages_are_not_drawn_as_bars(builder, groups):
    evaluated(builder, {"perplexity": 250.0})

    assert groups()[0].rows[0].bar is None
    assert not groups()[0].has_bars


def test_fractions_of_lm_eval_are_drawn_on_a_scale_to_1_beside_what_has_no_bar(builder, groups):
    evaluated(builder, {"hard/acc": 0.4, "hard/perplexity": 250.0}, modules=())

    assert [row.bar for row in groups()[0].rows] == [40.0, None]


def test_what_a_training_reports_of_itself_comes_after_the_evaluations(builder, groups):
    evaluated(builder, {"rouge2": 5.0})

    first, second = groups()

    assert (first.stage, first.is_evaluation) == ("evaluate", True)
    assert (second.stage, second.is_evaluation) == ("train", False)
    assert [(row.name, row.better) for row in second.rows] == [
        ("val/eval_loss", "lower"),
        ("val/rouge2", "higher"),
    ]


def test_a_confusion_shows_what_was_taken_for_what_and_says_that_rare_classes_share_a_row(
    builder, read_report
):
    counts = {"classes": ["<a>", "b", None], "counts": [[7, 3, 0], [0, 4, 0], [1, 0, 2]]}
    evaluated(builder, {"accuracy": 64.7}, confusion=counts)
    run = builder.close()

    (found,) = confusions(read_stages(run, builder.workspace, pytest.fail).values(), builder.store)
    text = read_report(run).text

    assert found.classes == ("<a>", "b", "others")
    assert [row.recall for row in found.rows] == ["70.0", "100.0", ""]
    cells = [(one.count, one.is_right, one.percent) for one in found.rows[0].cells]
    assert cells == [(7, True, 70.0), (3, False, 30.0), (0, False, 0.0)]
    assert found.rows[0].cells[1].text == "3 of 10 “<a>” were taken for “b”"
    assert "3 (30.0 %)" in text
    assert (found.rows[2].cells[2].count, found.rows[2].cells[2].is_right) == (2, False)
    assert "Stage evaluate: true and predicted classes" in text
    assert "The 2 commonest classes; the rest are “others”" in text


def test_a_comparison_tells_who_is_better_and_how_sure_that_is(builder, groups, read_report):
    evaluated(builder, {"rouge1": 41.0})
    made = builder.results["evaluate"].outputs["metrics"]
    pair = {"key": "rouge1", "better": "max", "first": "small", "second": "large"}
    pair |= {"first_score": 41.0, "second_score": 44.5, "difference": -3.5}
    pair |= {"low": -5.25, "high": -1.75, "p_value": 0.0012, "is_significant": True}
    builder.compare(made, made, pair)

    stages = read_stages(builder.close(), builder.workspace, pytest.fail)
    row = [cell.text for cell in comparisons(stages.values(), builder.store)["compare"].rows[0]]

    assert row[:3] == ["rouge1", "small 41.00", "large 44.50"]
    assert row[3:] == ["−3.50", "−5.25 to −1.75", "0.0012", "large is better"]
    assert "compare" not in [group.stage for group in groups()]
    assert (
        "compare: paired bootstrap over 60 examples, 1,000 draws" in read_report(builder.run).text
    )


def test_an_unsure_difference_has_no_winner(builder):
    evaluated(builder, {"rouge1": 41.0})
    made = builder.results["evaluate"].outputs["metrics"]
    pair = {"key": "loss", "better": "min", "first": "a", "second": "b", "difference": 0.1}
    pair |= {"first_score": 1.1, "second_score": 1.0, "low": -1.0, "high": 1.0}
    builder.compare(made, made, pair | {"p_value": 0.6, "is_significant": False})

    stages = read_stages(builder.close(), builder.workspace, pytest.fail)

    (table,) = comparisons(stages.values(), builder.store).values()
    assert table.rows[0][-1].text == "not significant"
