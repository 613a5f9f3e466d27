"""Which attempt a stage's result comes from: the run's own, or another run's."""

import pytest

from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import (
    current_attempt,
    note_shared_attempt,
    read_shared_attempt,
)
from redco_flow.tracking.workspace import Workspace


@pytest.fixture
def runs(tmp_path):
    workspace = Workspace.open(tmp_path)
    return [RunDirectory.create(workspace, "sums") for _ in range(2)]


def test_another_runs_attempt_counts_until_the_run_has_a_later_one_of_its_own(runs):
    run, maker = runs
    failed = run.new_attempt("train")
    assert current_attempt(run, "train") == failed

    shared = maker.new_attempt("train")
    note_shared_attempt(run, "train", shared)
    while_shared = current_attempt(run, "train")
    own = run.new_attempt("train")

    assert while_shared == shared
    assert read_shared_attempt(run, "train") is None
    assert current_attempt(run, "train") == own


def test_a_stage_that_no_run_makes_has_no_attempt(runs):
    assert current_attempt(runs[0], "train") is None
