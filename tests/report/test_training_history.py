from redco_flow.records import write_json
from redco_flow.report.training_history import (
    TRAINER_FIELDS,
    num_not_finite,
    points_of,
    read_history,
)


def log(step, **values):
    return {"kind": "training", "step": step, "loss": 100.0 / step, **values}


def scored(step, **more):
    metrics = {"eval_loss": 3.0, "rouge2": 5.0}
    return {"kind": "evaluation", "step": step, "epoch": None, "metrics": metrics, **more}


def test_training_records_and_evaluations_are_told_apart(builder):
    attempt = builder.attempt("train", records=[log(10), scored(10)])

    history = read_history([attempt])

    assert points_of(history.logged, "loss") == [(10, 10.0)]
    assert points_of(history.evaluations, "eval_loss") == [(10, 3.0)]
    assert history.evaluation_metrics == ["rouge2"]


def test_a_resumed_attempt_replaces_what_was_logged_beyond_its_checkpoint(builder):
    first = builder.attempt("train", records=[log(10), log(20), scored(20), log(30), log(40)])
    again = [scored(20, is_resumed=True), *(log(step, loss=7.0) for step in (25, 35, 45))]
    second = builder.attempt("train", records=again)

    history = read_history([first, second])

    expected = [(10, 10.0), (20, 5.0), (25, 7.0), (35, 7.0), (45, 7.0)]
    assert points_of(history.logged, "loss") == expected
    assert points_of(history.evaluations, "rouge2") == [(20, 5.0)]
    assert history.remarks == ["Attempt 2 resumed from step 20."]


def test_an_attempt_that_resumed_without_scores_is_known_by_its_first_step(builder):
    first = builder.attempt("train", records=[log(step) for step in (10, 20, 30, 40)])
    again = [log(step, loss=7.0) for step in (30, 40, 50)]
    second = builder.attempt("train", records=again)

    history = read_history([first, second])

    expected = [(10, 10.0), (20, 5.0), (30, 7.0), (40, 7.0), (50, 7.0)]
    assert points_of(history.logged, "loss") == expected


def test_an_attempt_that_began_anew_replaces_everything(builder):
    first = builder.attempt("train", records=[log(step) for step in (10, 20, 30)])
    second = builder.attempt("train", records=[log(step, loss=7.0) for step in (10, 20)])

    history = read_history([first, second])

    assert points_of(history.logged, "loss") == [(10, 7.0), (20, 7.0)]


def test_attempts_that_computed_something_else_are_left_out(builder):
    first = builder.attempt("train", records=[log(10)])
    second = builder.attempt("train", records=[log(10, loss=1.0)])
    write_json(first.call_path, {"fingerprint": "old"})
    write_json(second.call_path, {"fingerprint": "new"})

    history = read_history([first, second])

    assert points_of(history.logged, "loss") == [(10, 1.0)]
    assert history.remarks == []


def test_a_training_that_another_run_began_says_so(builder):
    records = [scored(200, is_resumed=True), *(log(step) for step in (210, 220, 230))]
    attempt = builder.attempt("train", records=records)

    assert read_history([attempt]).remarks == [
        "An earlier run did the steps up to 200; it has its records."
    ]


def test_an_attempt_that_its_cluster_queued_again_goes_on_with_its_own_history(builder):
    before = [log(step) for step in (10, 20, 30)]
    after = [scored(20, is_resumed=True), log(30, loss=7.0), log(40, loss=7.0)]
    attempt = builder.attempt("train", records=[*before, *after])

    history = read_history([attempt])

    assert [step for step, _ in points_of(history.logged, "loss")] == [10, 20, 30, 40]
    assert points_of(history.logged, "loss")[2] == (30, 7.0)
    assert history.remarks == ["Attempt 1 was queued again and resumed from step 20."]


def test_values_that_are_not_finite_are_counted_and_left_out(builder):
    attempt = builder.attempt("train", records=[log(10), log(20, loss=None), log(30)])

    history = read_history([attempt])

    assert [step for step, _ in points_of(history.logged, "loss")] == [10, 30]
    assert num_not_finite(history.logged, "loss") == 1


def test_a_torn_last_line_is_passed_over(builder):
    attempt = builder.attempt("train", records=[log(10), log(20)])
    with attempt.metrics_path.open("a") as file:
        file.write('{"step": 30, "lo')

    history = read_history([attempt])

    assert len(history.logged) == 2
    assert history.remarks == []


def test_a_damaged_line_ends_the_reading_and_is_told(builder):
    attempt = builder.attempt("train", records=[log(10)])
    with attempt.metrics_path.open("a") as file:
        file.write("nonsense\n")

    history = read_history([attempt])

    assert len(history.logged) == 1
    assert "is damaged" in history.remarks[0]


def test_nothing_logged_is_an_empty_history(builder):
    assert read_history([]).is_empty
    assert read_history([builder.attempt("train")]).is_empty


def test_the_fields_that_are_no_measures_are_those_that_the_trainer_logs():
    """The report imports nothing of the engine, so it has the names again."""
    from redco_flow.engine.callbacks import LOGGED

    assert TRAINER_FIELDS == LOGGED
