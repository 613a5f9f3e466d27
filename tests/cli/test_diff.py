import pytest

pytestmark = pytest.mark.slow


def test_two_real_runs_differ_in_the_setting_and_in_what_it_changed(finished):
    command, first = finished
    second = command.json("run", "sums.yaml", "learning_rate=3.0")

    text = command("diff", first["run"], second["run"])
    found = command.json("diff", first["run"])

    assert "2.0 (sums.yaml:6)" in text
    assert "3.0 (command line: learning_rate=3.0)" in text
    (setting,) = found["settings"]
    assert (setting["key"], setting["first"], setting["second"]) == (
        *("stages.total.learning_rate", 2.0, 3.0),
    )
    (total,) = (one for one in found["metrics"] if one["key"] == "total")
    # 2.0 and 3.0 times the sum of 1, 2 and 3.
    assert (total["first"], total["second"], total["difference"]) == (12.0, 18.0, 6.0)
    assert {"data", "code", "packages", "stages"} <= set(found["equal"])


def test_the_history_of_real_runs_has_their_scores_in_order(finished):
    command, first = finished

    runs = command.json("history", "sums.yaml", "--metric", "total")["runs"]

    assert runs[0]["run"] == first["run"]
    assert runs[0]["metrics"]["total"] == 12.0
    assert {run["state"] for run in runs} == {"completed"}
