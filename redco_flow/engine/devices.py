"""Facts about accelerators: one row for each kind, of one device as JAX counts devices.

Names carry units; GiB are 2^30 bytes, GB and TFLOP 10^9 bytes and 10^12 operations. `memory_gib` is
what programs can have: of GPUs as the CUDA driver reports it, of TPUs the limit in the messages of
libtpu's compiler. TFLOP/s are of dense products; data sheets of GPUs mostly give the figures with
sparsity, which are twice as high. `tf32` is JAX's default for float32 on GPUs, `float32` what its
matmul precision "highest" computes; no page gives either for TPUs. A `gb_s` is what a device can
send and receive at the same time, that is one direction, over all of its links together: half of
NVIDIA's figure for both directions. A ring along one axis of a TPU's torus has a third of it (v4,
v5p) or half. `host_gb_s` is between devices of a host, or of a slice of TPUs; `network_gb_s` of one
device to other hosts as NVIDIA's own servers are built.
Sources: NVIDIA's data sheets, named in each row; of TPUs docs.cloud.google.com/tpu/docs/v4, v5e,
v5p, v6e and tpu7x, which describe a chip: a device of TPU7x is one of its two chiplets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from redco_flow.engine.errors import EngineError

# The share of a GPU's memory that a stage's process takes (`launch.worker_process`).
_SHARE_OF_GPU = 0.92


@dataclass(frozen=True)
class GpuArchitecture:
    """What XLA asks of a GPU to compile for it where there is none.

    Source: openxla/xla, xla/backends/gpu/target_config/specs.
    """

    compute_capability: int
    num_cores: int
    fpus_per_core: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_bytes: int
    l2_cache_bytes: int
    clock_ghz: float


@dataclass(frozen=True)
class Device:
    """One kind of device; what is not known is None.

    Args:
        kind: its name in targets, as `h100`.
        reported: a regex of JAX's `device_kind`.
        source: the data sheet, or the page.
        architecture: of GPUs that programs can be compiled for without having one.
        torus_dims: of TPUs: 2 or 3.
    """

    kind: str
    reported: str
    source: str
    bfloat16_tflops: float
    memory_gib: float
    hbm_gb_s: float
    host_gb_s: float | None = None
    network_gb_s: float | None = None
    tf32_tflops: float | None = None
    float32_tflops: float | None = None
    architecture: GpuArchitecture | None = None
    torus_dims: int | None = None

    @property
    def platform(self) -> Literal["cuda", "tpu"]:
        """JAX's name of the platform."""
        return "cuda" if self.torus_dims is None else "tpu"

    @property
    def limit_bytes(self) -> int:
        """Bytes that a stage's program can have: 92 % of a GPU, all that a TPU gives programs."""
        share = 1.0 if self.torus_dims else _SHARE_OF_GPU
        return int(share * self.memory_gib * 2**30)


_A100 = GpuArchitecture(80, 108, 64, 167936, 166912, 41943040, 1.41)
_H100 = GpuArchitecture(90, 132, 128, 233472, 232448, 52428800, 1.98)
_B200 = GpuArchitecture(100, 148, 128, 233472, 232448, 132644864, 1.965)

_A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet (2022); network: DGX A100, HDR 200 Gb/s a GPU"
_H100_SHEET = (
    "NVIDIA H100 Tensor Core GPU data sheet (2023), dense figures: Hopper white paper; network: "
    "DGX H100, NDR 400 Gb/s a GPU"
)

DEVICES: tuple[Device, ...] = (
    Device(
        "a100-40g", r"NVIDIA A100-(SXM4|PCIE)-40GB", _A100_SHEET,
        bfloat16_tflops=312, tf32_tflops=156, float32_tflops=19.5,
        memory_gib=39.4, hbm_gb_s=1555, host_gb_s=300, network_gb_s=25, architecture=_A100,
    ),
    Device(
        "a100-80g", r"NVIDIA A100-SXM4-80GB", _A100_SHEET,
        bfloat16_tflops=312, tf32_tflops=156, float32_tflops=19.5,
        memory_gib=79.2, hbm_gb_s=2039, host_gb_s=300, network_gb_s=25, architecture=_A100,
    ),
    Device(
        "a100-80g-pcie", r"NVIDIA A100.*80GB.*", _A100_SHEET,
        bfloat16_tflops=312, tf32_tflops=156, float32_tflops=19.5,
        memory_gib=79.2, hbm_gb_s=1935, host_gb_s=300, architecture=_A100,
    ),
    Device(
        "a30", r"NVIDIA A30", "NVIDIA A30 data sheet (2022)",
        bfloat16_tflops=165, tf32_tflops=82, float32_tflops=10.3,
        memory_gib=23.5, hbm_gb_s=933, host_gb_s=100,
    ),
    Device(
        "l4", r"NVIDIA L4", "NVIDIA L4 data sheet (2023); PCIe 4 x16",
        bfloat16_tflops=121, tf32_tflops=60, float32_tflops=30.3,
        memory_gib=22.0, hbm_gb_s=300, host_gb_s=32,
    ),
    Device(
        "l40s", r"NVIDIA L40S", "NVIDIA L40S data sheet (2023); PCIe 4 x16",
        bfloat16_tflops=362.05, tf32_tflops=183, float32_tflops=91.6,
        memory_gib=44.4, hbm_gb_s=864, host_gb_s=32,
    ),
    Device(
        "h100", r"NVIDIA H100 \d+GB HBM.*", _H100_SHEET,
        bfloat16_tflops=989.4, tf32_tflops=494.7, float32_tflops=66.9,
        memory_gib=79.1, hbm_gb_s=3350, host_gb_s=450, network_gb_s=50, architecture=_H100,
    ),
    Device(
        "h100-pcie", r"NVIDIA H100 PCIe", _H100_SHEET,
        bfloat16_tflops=756, tf32_tflops=378, float32_tflops=51.2,
        memory_gib=79.1, hbm_gb_s=2039, host_gb_s=300,
    ),
    Device(
        "h100-nvl", r"NVIDIA H100 NVL", "NVIDIA H100 NVL data sheet (2024)",
        bfloat16_tflops=835.5, tf32_tflops=417.5, float32_tflops=60,
        memory_gib=93.1, hbm_gb_s=3900, host_gb_s=300,
    ),
    Device(
        "h200", r"NVIDIA H200", "NVIDIA H200 data sheet (2024); network: DGX H200",
        bfloat16_tflops=989.4, tf32_tflops=494.7, float32_tflops=66.9,
        memory_gib=139.8, hbm_gb_s=4800, host_gb_s=450, network_gb_s=50, architecture=_H100,
    ),
    Device(
        "h200-nvl", r"NVIDIA H200 NVL", "NVIDIA H200 data sheet (2024)",
        bfloat16_tflops=835.5, tf32_tflops=417.5, float32_tflops=60,
        memory_gib=139.8, hbm_gb_s=4800, host_gb_s=450,
    ),
    Device(
        "gh200", r"NVIDIA GH200.*", "NVIDIA GH200 data sheet (2024), with 96 GB of HBM3",
        bfloat16_tflops=989.4, tf32_tflops=494.7, float32_tflops=66.9,
        memory_gib=94.5, hbm_gb_s=4000,
    ),
    Device(
        "b200", r"NVIDIA B200", "NVIDIA HGX B200 data sheet (2025); network: DGX B200",
        bfloat16_tflops=2250, tf32_tflops=1125, float32_tflops=75,
        memory_gib=178.3, hbm_gb_s=7700, host_gb_s=900, network_gb_s=50, architecture=_B200,
    ),
    Device(
        "gb200", r"NVIDIA GB200", "NVIDIA GB200 NVL72 data sheet (2025)",
        bfloat16_tflops=2500, tf32_tflops=1250, float32_tflops=80,
        memory_gib=184.0, hbm_gb_s=8000, host_gb_s=900,
    ),
    Device(
        "v4", r"TPU v4", "docs.cloud.google.com/tpu/docs/v4; links: Jouppi et al. 2023, TPU v4",
        bfloat16_tflops=275, memory_gib=30.75, hbm_gb_s=1200, host_gb_s=300, torus_dims=3,
    ),
    Device(
        "v5e", r"TPU v5 lite|TPU v5e", "docs.cloud.google.com/tpu/docs/v5e",
        bfloat16_tflops=197, memory_gib=15.75, hbm_gb_s=819, host_gb_s=200, torus_dims=2,
    ),
    Device(
        "v5p", r"TPU v5|TPU v5p", "docs.cloud.google.com/tpu/docs/v5p",
        bfloat16_tflops=459, memory_gib=95.74, hbm_gb_s=2765, host_gb_s=600, torus_dims=3,
    ),
    Device(
        "v6e", r"TPU v6 lite|TPU v6e", "docs.cloud.google.com/tpu/docs/v6e",
        bfloat16_tflops=918, memory_gib=31.25, hbm_gb_s=1638, host_gb_s=400, torus_dims=2,
    ),
    Device(
        "tpu7x", r"TPU7x", "docs.cloud.google.com/tpu/docs/tpu7x, half of a chip's figures",
        bfloat16_tflops=2307 / 2, memory_gib=96.0, hbm_gb_s=7380 / 2, host_gb_s=300, torus_dims=3,
    ),
)  # fmt: skip


def known_device(device_kind: str) -> Device | None:
    """Return the row of what JAX calls a device.

    A part of a GPU (MIG) has not what all of it has, and is not known.
    """
    if "MIG" in device_kind:
        return None
    return next((one for one in DEVICES if re.fullmatch(one.reported, device_kind, re.I)), None)


def peak_tflops(device_kind: str) -> float | None:
    """Return a device's dense bfloat16 TFLOP/s; None where it is not known."""
    known = known_device(device_kind)
    return None if known is None else known.bfloat16_tflops


def find_device(name: str) -> Device:
    """Return the row of a name: a `kind`, or how a cluster may call a GPU (`A100-SXM4-80GB`).

    Raises:
        EngineError: no row has this name, or several do.
    """
    wanted = re.sub(r"^nvidia-|-sxm\d?(?=-)|b$", "", re.sub(r"[\s_]", "-", name.lower()))
    known = known_device(name.replace("_", " "))
    found = [one for one in DEVICES if one.kind == wanted or one is known] or [
        one for one in DEVICES if one.kind.startswith(f"{wanted}-")
    ]
    if len(found) == 1:
        return found[0]
    kinds = ", ".join(one.kind for one in found or DEVICES)
    what = "may be any of" if found else "is not known; known devices:"
    raise EngineError(f"the device '{name}' {what} {kinds}.")
