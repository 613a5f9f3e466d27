"""Count the GPUs that JAX can find on this machine without importing it, for login nodes.

Looks at the device files of NVIDIA's driver and at the variables that hide GPUs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

# Devices of other kinds (WSL, AMD, TPUs) are not counted by their files.
_OTHER_DEVICES = ("dxg", "kfd", "accel", "accel0", "vfio")
_GPU_PLATFORMS = {"cuda", "gpu"}


def count_local_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int | None:
    """Return the most GPUs that a process here can have; None where only JAX can tell.

    Args:
        environ: of the process: `JAX_PLATFORMS` and `CUDA_VISIBLE_DEVICES` hide GPUs.
        devices: the folder of device files.
    """
    platforms = set(filter(None, environ.get("JAX_PLATFORMS", "").split(",")))
    if platforms == {"cpu"}:
        return 0
    if platforms and not platforms & _GPU_PLATFORMS:
        return None
    if any((devices / name).exists() for name in _OTHER_DEVICES):
        return None
    count = len(list(devices.glob("nvidia[0-9]*")))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, sum(one.strip() not in ("", "-1") for one in visible.split(",")))


def gpu_memory_gib() -> float | None:
    """Return the memory of the smallest GPU here, by nvidia-smi; None where that fails."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return min(map(float, done.stdout.split())) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
