"""Which sweep a text names."""

import pytest

from redco_flow.errors import UsageError
from redco_flow.records import write_json
from redco_flow.tracking.sweep_directory import find_single_run, find_sweep
from redco_flow.tracking.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    """Sweeps of three pipelines; one of these has a run besides."""
    for name in ("demo-sweep-abc123", "lone-sweep-xyz789", "last-sweep-mmm555"):
        (tmp_path / "sweeps" / name).mkdir(parents=True)
        write_json(tmp_path / "sweeps" / name / "sweep.json", {"points": []})
    (tmp_path / "runs" / "demo-qqq111").mkdir(parents=True)
    return Workspace(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("demo-sweep-abc123", "demo-sweep-abc123"),
        ("demo-sweep-a", "demo-sweep-abc123"),
        ("demo-sw", "demo-sweep-abc123"),
        ("abc123", "demo-sweep-abc123"),
        ("abc", "demo-sweep-abc123"),
        ("lone", "lone-sweep-xyz789"),
        ("demo", None),  # a run begins so, too
        ("demo-qqq111", None),
        ("@last", None),
        ("last", None),
        ("", None),
        ("[a-z]", None),
        ("other", None),
    ],
)
def test_a_sweep_is_named_by_its_id_or_the_beginning_of_it(workspace, text, found):
    sweep = find_sweep(workspace, text)

    assert (sweep.id if sweep else None) == found


def test_a_beginning_of_two_sweeps_lists_them(workspace, tmp_path):
    (tmp_path / "sweeps" / "lone-sweep-other1").mkdir()
    write_json(tmp_path / "sweeps" / "lone-sweep-other1" / "sweep.json", {"points": []})

    with pytest.raises(UsageError, match="'lone' fits 2 sweeps: lone-sweep-other1, lone-sweep-xyz"):
        find_sweep(workspace, "lone")


@pytest.mark.parametrize("text", ["abc123", "demo-sw", "lone"])
def test_a_sweep_where_one_run_is_meant_is_named_in_full(workspace, text):
    with pytest.raises(
        UsageError, match=r"^(demo-sweep-abc123|lone-sweep-xyz789) is a sweep; name"
    ):
        find_single_run(workspace, text)


@pytest.mark.parametrize("text", [".", "..", "/tmp", "../runs", "x" * 300])
def test_what_names_neither_run_nor_sweep_is_no_run(workspace, text):
    with pytest.raises(UsageError, match="no run "):
        find_single_run(workspace, text)
