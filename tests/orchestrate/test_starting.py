"""What is refused before there is a run, or before one goes on."""

import json

import pytest
from orchestrate_runs import TUNED, TWO_STAGES, wait_for_end

from redco_flow.errors import UsageError
from redco_flow.orchestrate.run.start import refuse_to_start_over
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.locks import acquire


def test_several_hosts_for_a_kind_of_one_process_are_refused_before_there_is_a_run(runs):
    with pytest.raises(UsageError, match="runs in one process") as refused:
        runs.write(TWO_STAGES, ["train.resources.num_hosts=2"])

    assert "set it to 1" in str(refused.value)
    assert not list(runs.workspace.runs.glob("*"))


def test_a_page_that_is_known_after_the_runs_end_leaves_the_next_launchers_state_alone(runs):
    """A short run is over before Prefect has answered; it may have been tried again by then."""
    run = runs.write(TWO_STAGES)
    first = StateStore(run)
    first.open_run({"numbers": "own.numbers"}, ["numbers"])
    first.close_run(State.CANCELLED, 5, "cancelled")
    first.leave()

    first.set_prefect_url("http://first")
    assert run.read_state()["prefect_url"] == "http://first"
    with acquire(run):
        second = StateStore(run)
        second.open_run({"numbers": "own.numbers"}, ["numbers"])
        first.set_prefect_url("http://late")

    assert run.read_state()["state"] == "running"
    assert run.read_state()["prefect_url"] is None  # until the second launcher has a page


@pytest.mark.slow
def test_a_training_whose_fingerprint_had_the_path_of_its_model_is_not_started_over(
    runs, tmp_path, monkeypatch
):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    run = runs.start(TUNED.format("./model"), ["train.digested=[config.json]"])
    wait_for_end(run)
    monkeypatch.chdir("/")  # it is resumed from another directory
    path = run.latest_attempt("train").call_path
    call = json.loads(path.read_text())
    step = runs.workspace.work_directory(call["fingerprint"]) / "checkpoints" / "3"
    step.mkdir(parents=True)
    (step / "commit.json").touch()

    refuse_to_start_over(run)
    assert call["ingredients"].pop("directories") == [["model", "name_or_path"]]
    path.write_text(json.dumps(call))

    with pytest.raises(UsageError, match="checkpoint of step 3 is kept"):
        refuse_to_start_over(run)
