"""Speeds of devices, kept until they are measured again."""

import pytest

from redco_flow.records import write_json
from redco_flow.tracking.calibrations import keep_calibration, read_calibrations
from redco_flow.tracking.workspace import Workspace

FOUND = {
    "profile": "one",
    "device_kind": "NVIDIA L4",
    "num_devices": 8,
    "figures": {"hbm_gb_s": 250.0, "host_gb_s": 20.0},
    "measured_at": "2026-01-31T12:00:30+00:00",
}


def test_a_later_measurement_replaces_the_figures_that_it_has(tmp_path):
    workspace = Workspace(tmp_path)
    keep_calibration(workspace, FOUND)

    keep_calibration(workspace, {**FOUND, "num_devices": 1, "figures": {"hbm_gb_s": 260.0}})

    (kept,) = read_calibrations(workspace, "one")
    assert kept["figures"] == {"hbm_gb_s": 260.0, "host_gb_s": 20.0}


@pytest.mark.parametrize("figures", [{"hbm_gb_s": 0.0}, {"memory_gib": 1000.0}])
def test_figures_that_were_never_measured_are_left_out(tmp_path, figures):
    path = keep_calibration(Workspace(tmp_path), FOUND)
    write_json(path, {**FOUND, "figures": figures})

    assert read_calibrations(Workspace(tmp_path), "one") == []
