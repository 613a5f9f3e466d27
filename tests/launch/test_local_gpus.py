"""Counting this machine's GPUs by device files and variables, without JAX."""

from __future__ import annotations

import pytest

from redco_flow.launch.host_facts import count_local_gpus, gpu_memory_gib


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ([], {}, 0),
        (["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"], {}, 2),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (["nvidia0"], {"JAX_PLATFORMS": "cpu"}, 0),
        (["nvidia0"], {"JAX_PLATFORMS": "cuda,cpu"}, 1),
        ([], {"JAX_PLATFORMS": "tpu"}, None),
        (["dxg"], {}, None),
        (["accel0"], {}, None),
    ],
)
def test_gpus_are_counted_by_device_files_and_variables(tmp_path, files, environ, expected):
    for name in files:
        (tmp_path / name).touch()

    assert count_local_gpus(environ, tmp_path) == expected


@pytest.mark.parametrize(
    ("printed", "expected"), [("81920\n40960\n", 40.0), ("[N/A]\n", None), ("", None)]
)
def test_the_memory_of_the_smallest_gpu_is_what_nvidia_smi_prints(
    tmp_path, monkeypatch, printed, expected
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert gpu_memory_gib() == expected
