import pytest

from redco_flow.report.samples import sample_sets
from redco_flow.report.stage_facts import read_stages


def row(prediction="p", references=("r",), row_id="1", source="s"):
    given = {"row_id": row_id, "source": source, "prediction": prediction}
    return {**given, "references": list(references)}


@pytest.fixture
def sets(builder):
    def read(rows, scores=None, directions=None):
        dataset = builder.preprocess()["dataset"]
        best = builder.train(dataset)["checkpoint/best/rouge2"]
        predictions = builder.predict(best, dataset, rows)["predictions"]
        if scores is not None:
            builder.evaluate(predictions, scores, {"rouge1": 1.0})
        stages = read_stages(builder.close(), builder.workspace, pytest.fail)
        return sample_sets(stages.values(), builder.store)

    return read


def test_the_best_the_worst_and_others_are_shown_once_each(sets):
    rows = [row(row_id=str(index)) for index in range(50)]

    (shown,) = sets(rows, [{"rouge1": float(index)} for index in range(50)])

    ids = {
        why: [one.row_id for one in shown.samples if one.why == why] for why in ("best", "worst")
    }
    assert ids == {"best": ["49", "48", "47"], "worst": ["0", "1", "2"]}
    assert [one.why for one in shown.samples].count("random") == 4
    assert len({one.row_id for one in shown.samples}) == 10
    assert shown.chosen_how == "the best and the worst by rouge1, the others at random"
    assert (shown.num_rows, shown.stage) == (50, "evaluate")
    assert shown.made_how == "split test, num_beams 4, length_penalty 1.0"


def test_others_are_there_to_be_searched_and_none_twice(sets):
    rows = [row(row_id=str(index)) for index in range(150)]

    (shown,) = sets(rows, [{"rouge1": float(index)} for index in range(150)])

    ids = [one.row_id for one in (*shown.samples, *shown.more)]
    assert (len(shown.samples), len(shown.more)) == (10, 90)
    assert len(set(ids)) == len(ids)


def test_words_of_a_reference_that_are_not_predicted_are_told_apart(sets):
    (shown,) = sets([row("A pub by the river.", ("A cheap pub by the River.",))])

    (reference,) = shown.samples[0].reference_pieces
    assert reference == (("A ", False), ("cheap", True), (" pub by the River.", False))


def test_words_of_a_reference_that_are_predicted_in_another_order_are_told_apart(sets):
    (shown,) = sets([row("a[0] == b", ("a[b] != 0",))])

    (reference,) = shown.samples[0].reference_pieces
    assert [text for text, is_missing in reference if is_missing] in (["b"], ["0"])


def test_few_predictions_are_all_shown_and_none_twice(sets):
    rows = [row(row_id=str(index)) for index in range(4)]

    (shown,) = sets(rows, [{"rouge1": float(index)} for index in range(4)])

    assert sorted(one.row_id for one in shown.samples) == ["0", "1", "2", "3"]


def test_where_all_score_the_same_none_is_called_the_best(sets):
    (shown,) = sets([row(row_id=str(index)) for index in range(50)], [{"rouge1": 0.0}] * 50)

    assert {one.why for one in shown.samples} == {"random"}
    assert len({one.row_id for one in shown.samples}) == 10
    assert shown.chosen_how == "at random, for all score the same by rouge1"


def test_without_scores_the_first_predictions_are_shown(sets):
    (shown,) = sets([row(row_id=str(index)) for index in range(50)])

    assert [one.row_id for one in shown.samples] == [str(index) for index in range(10)]
    assert {one.why for one in shown.samples} == {"first"}
    assert "no scores by example" in shown.chosen_how


def test_scores_of_other_examples_are_not_used(sets):
    (shown,) = sets([row()] * 5, [{"rouge1": 1.0}] * 4)

    assert {one.why for one in shown.samples} == {"first"}


def test_words_that_no_reference_has_are_marked(sets):
    (shown,) = sets([row("The Eagle serves good pie.", ["the eagle, pie", "it serves"])])

    assert shown.samples[0].pieces == (
        ("The Eagle serves ", False),
        ("good", True),
        (" pie.", False),
    )


def test_without_references_nothing_is_marked(sets):
    (shown,) = sets([row("any word", [])])

    assert shown.samples[0].pieces == (("any word", False),)


def test_many_references_and_long_texts_are_cut_and_it_is_said(sets):
    (shown,) = sets([row("x" * 10_000, [f"r{index}" for index in range(8)])])

    assert (len(shown.samples[0].references), shown.samples[0].num_left_out) == (3, 5)
    assert shown.samples[0].pieces[-1] == ("… [10,000 characters]", False)


def test_an_empty_prediction_is_shown_as_empty(sets, builder, read_report):
    sets([row("", ["r"])])

    assert "prediction (empty) reference r" in read_report(builder.run).text


def test_every_predictions_artifact_has_its_samples(sets, builder):
    sets([row("one")], [{"rouge1": 1.0}])
    dataset = builder.results["preprocess"].outputs["dataset"]
    last = builder.results["train"].outputs["checkpoint/last"]
    builder.predict(last, dataset, [row("two")], stage="predict_last")

    stages = read_stages(builder.close(), builder.workspace, pytest.fail)
    shown = sample_sets(stages.values(), builder.store)

    assert [one.stage for one in shown] == ["evaluate", "predict_last"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.json", "{}"),
        ("per_example.jsonl", '{"length": 1}\n{"length": 2}\n'),
        ("per_example.jsonl", '{"scores": {}}\n{"scores": {"length": 2}}\n'),
    ],
)
def test_a_stage_with_metrics_of_its_own_takes_no_scores_away(builder, name, text):
    dataset = builder.preprocess()["dataset"]
    best = builder.train(dataset)["checkpoint/best/rouge2"]
    rows = [row(row_id="a"), row(row_id="b")]
    predictions = builder.predict(best, dataset, rows)["predictions"]
    own = {"metrics": builder.write(name, text)}
    builder.complete("lengths", own, inputs={"predictions": [predictions]}, metrics={"length": 1.5})
    builder.evaluate(predictions, [{"rouge1": 0.0}, {"rouge1": 1.0}], {"rouge1": 0.5})

    stages = read_stages(builder.close(), builder.workspace, pytest.fail)
    (shown,) = sample_sets(stages.values(), builder.store)

    assert shown.stage == "evaluate"
    assert [(one.why, one.row_id) for one in shown.samples] == [("best", "b"), ("best", "a")]


def test_no_predictions_make_no_samples(sets):
    assert sets([]) == []


@pytest.mark.parametrize(
    ("source", "opening"),
    [
        ("short", ""),
        ("x" * 500, "x" * 280),
        ("line\n" * 9, "line\nline\nline\nline\nline\nline"),
    ],
)
def test_a_long_source_opens_with_its_first_lines(sets, source, opening):
    (shown,) = sets([row(source=source)])

    assert shown.samples[0].opening == opening


def test_what_looks_like_a_secret_in_the_data_is_not_shown(sets):
    """The page is sent around; the artifact keeps its bytes."""
    token = "ghp_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5"[:36]
    given = row(f"p {token}", [f"r {token}", "plain"], source=f"s {token} t")

    (shown,) = sets([given])

    (one,) = shown.samples
    texts = (one.source, "".join(text for text, _ in one.pieces), *one.references)
    assert token not in "\n".join(texts)
    assert one.source.startswith("s ")
    assert one.source.endswith(" t")
    assert one.references[1] == "plain"
