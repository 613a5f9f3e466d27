"""What the demo calls equal; the demo itself is `make slurm-demo`."""

from profile_demo import are_equal, side_by_side


def test_metrics_are_equal_if_they_differ_by_less_than_the_tolerance():
    assert are_equal({"loss": 5.0, "bleu": 0.0}, {"loss": 5.00004, "bleu": 0.0})
    assert not are_equal({"loss": 5.0}, {"loss": 5.001})


def test_a_metric_that_only_one_side_has_is_no_equality_and_is_shown():
    there, here = {"loss": 5.0, "bleu": 1.0}, {"loss": 5.0}

    assert not are_equal(there, here)
    assert "bleu" in side_by_side("slurm", there, here)
    assert "NOT EQUAL" in side_by_side("slurm", there, here)
