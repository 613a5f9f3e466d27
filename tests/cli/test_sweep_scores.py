"""The best point of a sweep: only among scores that were measured on the same rows."""

import pytest

from redco_flow.cli.sweep_view import read_sweep_view, sweep_text
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory, SweepPoint
from redco_flow.tracking.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    return Workspace.open(tmp_path / "redco-workspace")


@pytest.fixture
def sweep(workspace, tmp_path):
    """A sweep of completed points with these scores, each on rows of this digest."""

    def make(**points):
        found = SweepDirectory.create(workspace, "demo")
        runs = []
        for value, (accuracy, rows) in points.items():
            run = RunDirectory.create(workspace, "demo", sweep=found.id)
            source = tmp_path / f"{value}.json"
            source.write_text(f"{accuracy} {rows}")
            known = {"directions": {"accuracy": "max"}, "split": "test", "examples_digest": rows}
            made = ArtifactStore(workspace).publish("metrics", source, metadata=known)
            scored = {"artifacts": {"metrics": made.id}, "metrics": {"accuracy": accuracy}}
            stages = {"evaluate": {"kind": "evaluate", "state": "completed", **scored}}
            state = {"state": "completed", "exit_code": 0, "message": "", "stages": stages}
            run.write_state(state)
            runs.append(SweepPoint(run.id, [f"seed={value}"]))
        found.write(runs, max_parallel=1, argv=[], ahead=False)
        return found

    return make


def test_the_best_point_is_named_where_all_were_scored_on_the_same_rows(sweep):
    view = read_sweep_view(sweep(a=(50.0, "r"), b=(70.0, "r")))

    assert view["best"]["accuracy"]["point"] == ["seed=b"]
    assert view["not_compared"] == {}


def test_no_point_is_the_best_where_one_was_scored_on_other_rows(sweep):
    made = sweep(a=(50.0, "r"), b=(70.0, "other"))

    view = read_sweep_view(made)

    first, second = (point.run for point in made.points)
    why = f"{second} is not compared with {first}: other rows of 'test'"
    assert view["best"] == {}
    assert view["not_compared"] == {"accuracy": why}
    assert f"no best accuracy: {why}" in sweep_text(view)
    assert "70" in sweep_text(view)
