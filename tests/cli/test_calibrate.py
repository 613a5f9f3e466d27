"""The verb calibrate on this machine's CPU devices."""

import json

import pytest

from redco_flow.orchestrate.calibrate import calibrate
from redco_flow.spec.profile import load_own_profile
from redco_flow.tracking.calibrations import find_measuring_run, read_calibrations
from redco_flow.tracking.workspace import Workspace

NUM_DEVICES = 8
SIZES = {"product_sizes": [32, 64, 128], "copy_mib": [1, 2, 3], "exchange_mib": [1, 2, 3]}
MIB = 2**20


@pytest.mark.slow
def test_all_devices_of_a_host_are_measured_and_the_figures_kept(command, monkeypatch):
    (command.folder / "eight.yaml").write_text(f"num_cpu_devices: {NUM_DEVICES}")
    sizes = [f"calibrate.{name}={json.dumps(values)}" for name, values in SIZES.items()]
    monkeypatch.chdir(command.folder)
    # Detached at once: the same command follows this run in place of a new one.
    detached = calibrate(
        load_own_profile("eight.yaml"),
        "eight.yaml",
        lambda run: False,
        overrides=["calibrate.resources.gpus_per_host=0", *sizes],
        directory=command.folder / "redco-workspace" / "calibrations" / "first",
    )
    assert detached is None

    found = command.json("calibrate", "-p", "eight.yaml", *sizes)

    measured = {(one["operation"], one["figure"], one["size"]) for one in found["speeds"]}
    products = ("bfloat16_tflops", "tf32_tflops", "float32_tflops")
    exchanges = ("all-gather", "all-reduce", "permute")
    assert measured == {
        *(("product", figure, size) for figure in products for size in (32, 64, 128)),
        *(("copy", "hbm_gb_s", size * MIB) for size in (1, 2, 3)),
        *((name, "host_gb_s", size * MIB) for name in exchanges for size in (1, 2, 3)),
    }
    # Results are checked where they are computed: each device has sent its own numbers.
    assert {one["num_devices"] for one in found["speeds"] if one["operation"] in exchanges} == {8}
    assert all(0 < one["seconds"] < 300 and 0 < one["value"] < 1e6 for one in found["speeds"])
    workspace = Workspace(command.folder / "redco-workspace")
    assert [path.name for path in (workspace.root / "calibrations").iterdir()] == ["first"]
    assert find_measuring_run(workspace, "eight") is None
    (kept,) = read_calibrations(workspace, "eight")
    assert kept["figures"] == found["figures"]
    assert (kept["device_kind"], kept["num_devices"]) == ("cpu", NUM_DEVICES)
    assert kept["versions"].keys() == {"jax", "jaxlib"}


@pytest.mark.parametrize(
    ("profile", "overrides", "code", "said"),
    [
        (
            "{executor: slurm, slurm: {gpu_type: h100}}",
            [],
            2,
            "profile 'own' has gpu_type h100, but its `defaults` request no GPU",
        ),
        ("{executor: local}", ["calibrate.resources.gpus_per_host=64"], 3, "asks for 64 GPUs"),
    ],
)
def test_devices_that_cannot_be_measured_are_refused_before_a_run(
    command, profile, overrides, code, said
):
    (command.folder / "own.yaml").write_text(profile)

    assert said in command("calibrate", "-p", "own.yaml", *overrides, code=code)
    assert not (command.folder / "redco-workspace" / "calibrations").exists()
