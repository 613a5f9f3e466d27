"""Predictions of `plan --fit` next to what trainings measured."""

import json
import math

import pytest

from redco_flow.errors import DamagedRecord
from redco_flow.records import write_json
from redco_flow.tracking.planned_fits import (
    compare_fits,
    errors_text,
    like,
    read_fits,
    recent_comparisons,
    write_fits,
)
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

GIB = 2**30
FIT = {
    "device": "a100-80g",
    "reported": r"NVIDIA A100-SXM4-80GB",
    "num_devices": 2,
    "used_bytes": 20 * GIB,
    "parts_bytes": {"parameters": 20 * GIB},
    "step_time": {"seconds": 2.0, "parts_seconds": {"products": 2.0}},
    "device_facts": {"hbm_gb_s": {"value": 2039, "origin": "data sheet"}},
    "assumed": [],
}
DEVICES = "2 × NVIDIA A100-SXM4-80GB"


@pytest.fixture
def workspace(tmp_path):
    return Workspace.open(tmp_path)


def leave_run(workspace, devices, *, fit=FIT, **measured):
    run = RunDirectory.create(workspace, "demo")
    write_fits(run, {"train": fit, "other": {"error": "not planned", "exit_code": 2}})
    progress = {"devices": devices, **measured, "time": "2026-01-31T12:00:00+00:00"}
    write_json(run.new_attempt("train").progress_path, progress)
    return run


@pytest.mark.parametrize(
    ("devices", "is_compared"),
    [
        (DEVICES, True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("2 × NVIDIA A100-SXM4-80GB MIG 1g.10gb", False),
        ("2 × NVIDIA A100-SXM4-40GB", False),
        ("NVIDIA A100-SXM4-80GB, 2 × NVIDIA L4", False),
        ("cpu", False),
    ],
)
def test_only_the_devices_that_were_predicted_for_are_compared(workspace, devices, is_compared):
    run = leave_run(workspace, devices, step_seconds=2.2, peak_memory_bytes=19 * GIB)

    found = compare_fits(run)["train"]

    if is_compared:
        assert found.ran_on == ""
        assert found.time.error == pytest.approx(0.1)
        assert found.memory.error == pytest.approx(-0.05)
    else:
        assert found.ran_on == devices
        assert [figure.measured for figure in found.figures] == [None, None]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([2.08, 2.18, 2.12], "3 recent runs on a100-80g: steps 4 to 9 % slower than predicted"),
        ([1.9, 1.86], "2 recent runs on a100-80g: steps 5 to 7 % faster than predicted"),
        ([1.9, 2.2], "2 recent runs on a100-80g: steps 5 % faster to 10 % slower than predicted"),
        ([2.0], "a recent run on a100-80g: steps 0 % slower than predicted"),
    ],
)
def test_errors_of_recent_runs_are_a_range(workspace, seconds, text):
    for one in seconds:
        leave_run(workspace, DEVICES, step_seconds=one)
    leave_run(workspace, "cpu", step_seconds=100.0)
    leave_run(workspace, "TPU v4", fit={**FIT, "device": "v4", "step_time": None})
    leave_run(workspace, DEVICES, step_seconds=0.0)
    assuming = {**FIT, "assumed": ["rows are as long as the settings allow"]}
    leave_run(workspace, DEVICES, fit=assuming, step_seconds=100.0)
    slower = {"hbm_gb_s": {"value": 1500, "origin": "measured"}}
    leave_run(workspace, DEVICES, fit={**FIT, "device_facts": slower}, step_seconds=100.0)

    found = recent_comparisons(workspace)

    assert len(found) == len(seconds) + 1
    assert errors_text(like(found, FIT)) == text


@pytest.mark.parametrize(
    "damage",
    [
        {"reported": "("},
        {"used_bytes": 0},
        {"step_time": {"seconds": 0.0, "parts_seconds": {}}},
        {"step_time": {"seconds": math.nan, "parts_seconds": {}}},
    ],
)
def test_values_that_nothing_can_be_compared_with_are_damage(workspace, damage):
    run = leave_run(workspace, DEVICES, step_seconds=2.0)
    run.fits_path.write_text(json.dumps({"train": {**FIT, **damage}}))

    with pytest.raises(DamagedRecord, match=r"fits\.json: damaged record: stage 'train'"):
        read_fits(run)
    assert compare_fits(run) == {}
