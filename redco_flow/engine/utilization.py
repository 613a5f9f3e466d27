"""How well devices are used: model FLOP/s, MFU, and the most memory that was in use.

MFU, model FLOPs utilisation, is the model's operations over what the devices could have computed
in that time, so computing again what was not kept makes it no better.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

# Dense bfloat16 TFLOP/s of one device, by what `device_kind` says of it.
# GPUs: NVIDIA's data sheets, most of which tell the figure with sparsity, twice the dense one:
# A100 (nvidia.com/en-us/data-center/a100) 312 dense; A30 165 dense; L4 242; L40S 362.05 dense;
# H100 (data-center/h100) SXM 1,979 and PCIe 1,513, dense 989.4 and 756 (white paper on Hopper),
# NVL 1,671; H200 (data-center/h200) and GH200 as H100; HGX B200 4,500, GB200 NVL72 5,000
# (data-center/gb200-nvl72).
# TPUs: the pages of Google's system architecture, docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e,
# tpu7x, which tell a chip's figure. A device is a chip, but for TPU7x: one of its two chiplets.
_PEAK_TFLOPS: dict[str, float] = {
    r"NVIDIA A100.*": 312.0,
    r"NVIDIA A30": 165.0,
    r"NVIDIA L4": 121.0,
    r"NVIDIA L40S": 362.05,
    r"NVIDIA H100 PCIe": 756.0,
    r"NVIDIA H[12]00 NVL": 835.5,
    r"NVIDIA H100 \d+GB HBM.*": 989.4,
    r"NVIDIA H200": 989.4,
    r"NVIDIA GH200.*": 989.4,
    r"NVIDIA B200": 2250.0,
    r"NVIDIA GB200": 2500.0,
    r"TPU v4": 275.0,
    r"TPU v5 lite|TPU v5e": 197.0,
    r"TPU v5|TPU v5p": 459.0,
    r"TPU v6 lite|TPU v6e": 918.0,
    r"TPU7x": 2307.0 / 2,
}


def peak_tflops(device_kind: str) -> float | None:
    """Return a device's dense bfloat16 TFLOP/s; None where it is not known.

    A part of a GPU (MIG) has not what all of it has, and is not known.
    """
    if "MIG" in device_kind:
        return None
    matching = (peak for kind, peak in _PEAK_TFLOPS.items() if re.fullmatch(kind, device_kind))
    return next(matching, None)


def utilization(
    model_flops: float, seconds: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
    """Return `tflops_per_device`, TFLOP/s, and `mfu`, from 0 to 1, of devices that are known.

    Args:
        model_flops: of all devices together, within these seconds.
    """
    tflops = model_flops / seconds / len(devices) / 1e12
    peaks = {peak_tflops(str(device.device_kind)) for device in devices}
    (peak, *others) = peaks
    if peak is None or others:
        return {"tflops_per_device": tflops}
    return {"tflops_per_device": tflops, "mfu": tflops / peak}


def peak_memory_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the most memory that one of this process' devices had in use; None if none tells."""
    process = jax.process_index()
    own = [device for device in devices if device.process_index == process]
    found: list[dict[str, Any]] = [device.memory_stats() or {} for device in own]
    return max((int(stats.get("peak_bytes_in_use") or 0) for stats in found), default=0) or None
