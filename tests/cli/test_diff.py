import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def second(finished):
    """A second run, with another setting."""
    return finished[0].json("run", "sums.yaml", "learning_rate=3.0")


def test_two_real_runs_differ_in_the_setting_and_in_what_it_changed(finished, second):
    command, first = finished

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


def test_runs_are_compared_and_each_verb_writes_its_page(finished, second):
    command, first = finished
    both = first["run"], second["run"]

    text = command("compare", *both, "--html", "compared.html")
    found = command.json("compare", *both)["runs"]
    command("diff", *both, "--html", "diff.html")
    command("history", "sums.yaml", "--html", "history.html")
    written = command("report", first["run"], "--html", "report.html").strip()

    assert [run["settings"] for run in found] == [
        {"stages.total.learning_rate": rate} for rate in (2.0, 3.0)
    ]
    assert [run["metrics"]["total"] for run in found] == [12.0, 18.0]
    assert {"RUN", "STATE", "TIME", "stages.total.learning_rate", *both} <= set(text.split())
    assert written == "report.html"
    for page in ("compared.html", "diff.html", "history.html", "report.html"):
        assert first["run"] in (command.folder / page).read_text(encoding="utf-8")


def test_comparing_one_run_with_itself_says_what_is_needed(finished):
    command, first = finished

    said = command("compare", first["run"], first["run"], code=2)

    assert "two runs or more" in said


def test_the_history_of_real_runs_has_their_scores_in_order(finished):
    command, first = finished

    runs = command.json("history", "sums.yaml", "--metric", "total")["runs"]

    assert runs[0]["run"] == first["run"]
    assert runs[0]["metrics"]["total"] == 12.0
    assert {run["state"] for run in runs} == {"completed"}
