"""Facts about accelerators: one row for each kind, of one device as JAX counts devices.

Names carry units; GiB are 2^30 bytes, GB and TFLOP 10^9 bytes and 10^12 operations. `memory_gib` is
what programs can have: of GPUs as the CUDA driver reports it, of TPUs the limit in the messages of
libtpu's compiler. TFLOP/s are of dense products; data sheets of GPUs mostly give the figures with
sparsity, which are twice as high. TF32 is JAX's default for float32 on GPUs, float32 what its
matmul precision "highest" computes; no page gives either for TPUs. GB/s of links are what a device
sends in one direction, over all of its links together, while it receives as much: half of NVIDIA's
figures, which add up both. A ring along one axis of a TPU's torus has a third of it (v4, v5p) or
half. `host_gb_s` is between devices of a host, or of a slice of TPUs; `network_gb_s` of one device
to other hosts, as NVIDIA's own servers are built.
Sources: NVIDIA's data sheets, named in each row; of TPUs docs.cloud.google.com/tpu/docs/v4, v5e,
v5p, v6e and tpu7x, which describe a chip: a device of TPU7x is one of its two chiplets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from redco_flow.engine.errors import EngineError

_A100_TFLOPS = 312.0
_UNITS = ("_tflops", "_gib", "_gb_s")
_NEEDED = ("reported", "bfloat16_tflops", "memory_gib", "hbm_gb_s", "architecture")


@dataclass(frozen=True)
class GpuArchitecture:
    """The facts that XLA needs to compile for a GPU where there is none.

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
        described: the facts that are not from the source, but described by the user.
        measured: what programs attained of some facts (`engine.device_speed`).
    """

    kind: str
    reported: str
    source: str
    bfloat16_tflops: float
    tf32_tflops: float | None
    float32_tflops: float | None
    memory_gib: float
    hbm_gb_s: float
    host_gb_s: float | None
    network_gb_s: float | None
    architecture: GpuArchitecture | None = None
    torus_dims: int | None = None
    described: frozenset[str] = frozenset()
    measured: Mapping[str, float] = field(default_factory=dict)

    def is_reported_as(self, device_kind: str) -> bool:
        """Return whether JAX calls such a device so.

        A part of a GPU (MIG) has not what all of it has, and is not such a device.
        """
        is_part = "MIG" in device_kind
        return not is_part and bool(re.fullmatch(self.reported, device_kind, re.IGNORECASE))

    @property
    def platform(self) -> Literal["cuda", "tpu"]:
        """JAX's name of the platform."""
        return "cuda" if self.torus_dims is None else "tpu"

    def limit_bytes(self, share_of_gpu: float) -> int:
        """Return the bytes that a program can have: all that a TPU gives programs, or a share."""
        share = 1.0 if self.torus_dims else share_of_gpu
        return int(share * self.memory_gib * 2**30)


_A100 = GpuArchitecture(80, 108, 64, 167936, 166912, 41943040, 1.41)
_H100 = GpuArchitecture(90, 132, 128, 233472, 232448, 52428800, 1.98)
_B200 = GpuArchitecture(100, 148, 128, 233472, 232448, 132644864, 1.965)

_A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet (2022); network: DGX A100, HDR 200 Gb/s a GPU"
_H100_SHEET = (
    "NVIDIA H100 Tensor Core GPU data sheet (2023), dense figures: Hopper white paper; network: "
    "DGX H100, NDR 400 Gb/s a GPU"
)

# kind, reported, source, TFLOP/s (bfloat16, tf32, float32), GiB, GB/s (HBM, host, network), …
DEVICES: tuple[Device, ...] = (
    Device("a100-40g", r"NVIDIA A100-(SXM4|PCIE)-40GB", _A100_SHEET,
           312, 156, 19.5, 39.4, 1555, 300, 25, _A100),
    Device("a100-80g", r"NVIDIA A100-SXM4-80GB", _A100_SHEET,
           312, 156, 19.5, 79.2, 2039, 300, 25, _A100),
    Device("a100-80g-pcie", r"NVIDIA A100( 80GB PCIe|-PCIE-80GB)", _A100_SHEET,
           312, 156, 19.5, 79.2, 1935, 300, None, _A100),
    Device("a30", r"NVIDIA A30", "NVIDIA A30 data sheet (2022)",
           165, 82, 10.3, 23.5, 933, 100, None),
    Device("l4", r"NVIDIA L4", "NVIDIA L4 data sheet (2023); PCIe 4 x16",
           121, 60, 30.3, 22, 300, 32, None),
    Device("l40s", r"NVIDIA L40S", "NVIDIA L40S data sheet (2023); PCIe 4 x16",
           362.05, 183, 91.6, 44.4, 864, 32, None),
    Device("h100", r"NVIDIA H100 \d+GB HBM.*", _H100_SHEET,
           989.4, 494.7, 66.9, 79.1, 3350, 450, 50, _H100),
    Device("h100-pcie", r"NVIDIA H100 PCIe", _H100_SHEET, 756, 378, 51.2, 79.1, 2039, 300, None),
    Device("h100-nvl", r"NVIDIA H100 NVL", "NVIDIA H100 NVL data sheet (2024)",
           835.5, 417.5, 60, 93.1, 3900, 300, None),
    Device("h200", r"NVIDIA H200", "NVIDIA H200 data sheet (2024); network: DGX H200",
           989.4, 494.7, 66.9, 139.8, 4800, 450, 50, _H100),
    Device("h200-nvl", r"NVIDIA H200 NVL", "NVIDIA H200 data sheet (2024)",
           835.5, 417.5, 60, 139.8, 4800, 450, None),
    Device("gh200", r"NVIDIA GH200.*", "NVIDIA GH200 data sheet (2024), with 96 GB of HBM3",
           989.4, 494.7, 66.9, 94.5, 4000, None, None),
    Device("b200", r"NVIDIA B200", "NVIDIA HGX B200 data sheet (2025); network: DGX B200",
           2250, 1125, 75, 178.3, 7700, 900, 50, _B200),
    Device("gb200", r"NVIDIA GB200", "NVIDIA GB200 NVL72 data sheet (2025)",
           2500, 1250, 80, 184, 8000, 900, None),
    Device("v4", r"TPU v4", "docs.cloud.google.com/tpu/docs/v4; links: Jouppi et al. 2023, TPU v4",
           275, None, None, 30.75, 1200, 300, None, None, 3),
    Device("v5e", r"TPU v5 lite|TPU v5e", "docs.cloud.google.com/tpu/docs/v5e",
           197, None, None, 15.75, 819, 200, None, None, 2),
    Device("v5p", r"TPU v5|TPU v5p", "docs.cloud.google.com/tpu/docs/v5p",
           459, None, None, 95.74, 2765, 600, None, None, 3),
    Device("v6e", r"TPU v6 lite|TPU v6e", "docs.cloud.google.com/tpu/docs/v6e",
           918, None, None, 31.25, 1638, 400, None, None, 2),
    Device("tpu7x", r"TPU7x", "docs.cloud.google.com/tpu/docs/tpu7x, half of a chip's figures",
           2307 / 2, None, None, 96, 7380 / 2, 300, None, None, 3),
)  # fmt: skip


def known_device(device_kind: str) -> Device | None:
    """Return the row of what JAX calls a device."""
    return next((one for one in DEVICES if one.is_reported_as(device_kind)), None)


def peak_tflops(device_kind: str) -> float | None:
    """Return a device's dense bfloat16 TFLOP/s; None where it is not known."""
    if (known := known_device(device_kind)) is not None:
        return known.bfloat16_tflops
    is_an_a100 = device_kind.startswith("NVIDIA A100") and "MIG" not in device_kind
    return _A100_TFLOPS if is_an_a100 else None


def find_device(name: str, described: Mapping[str, Mapping[str, Any]] | None = None) -> Device:
    """Return the row of a name: a `kind`, or how a cluster may call a GPU (`A100-SXM4-80GB`).

    Args:
        described: facts by such a name, which replace those of its row, or describe a GPU that
            has none; `architecture` as a mapping. `kind` among them says which row the name means.

    Raises:
        EngineError: no row has this name, or several do; facts are missing of a GPU without one;
            or two names describe the same row.
    """
    rows = {one.kind: one for one in DEVICES}
    names: dict[str, str] = {}
    for known_as, facts in (described or {}).items():
        one = _described(known_as, facts, _rows_of(facts.get("kind", known_as), DEVICES))
        if one.kind in names:
            raise EngineError(
                f"devices.{names[one.kind]} and devices.{known_as} are both {one.kind}: "
                "write their facts under one of the names."
            )
        names[one.kind] = known_as
        rows[one.kind] = one
    by_name = [rows[kind] for kind, known_as in names.items() if known_as.lower() == name.lower()]
    found = by_name or _rows_of(name, list(rows.values()))
    if len(found) == 1:
        return found[0]
    kinds = ", ".join(one.kind for one in found or rows.values())
    if not found:
        raise EngineError(f"the device '{name}' is not known; known devices: {kinds}.")
    raise EngineError(
        f"the device '{name}' may be any of {kinds}: use one of these names, or let the profile "
        f"say which it is, as `devices: {{{name}: {{kind: {found[0].kind}}}}}`."
    )


def _rows_of(name: str, rows: Sequence[Device]) -> list[Device]:
    wanted = re.sub(r"^nvidia-|-sxm\d?(?=-|$)|b$", "", re.sub(r"[\s_]", "-", name.lower()))
    wanted = wanted.removesuffix("-80g") if wanted.startswith("h100") else wanted
    known = known_device(name.replace("_", " "))
    kinds = {wanted, name.lower(), known.kind if known else wanted}
    return [one for one in rows if one.kind in kinds] or [
        one for one in rows if one.kind.startswith(f"{wanted}-")
    ]


def _described(name: str, facts: Mapping[str, Any], rows: Sequence[Device]) -> Device:
    if len(rows) > 1:
        kinds = ", ".join(one.kind for one in rows)
        raise EngineError(
            f"devices.{name} may be any of {kinds}: add `kind: {rows[0].kind}`, or another of them."
        )
    changes = {key: value for key, value in facts.items() if key != "kind"}
    changes["described"] = frozenset(changes)
    if "architecture" in facts:
        changes["architecture"] = GpuArchitecture(**facts["architecture"])
    if rows:
        return replace(rows[0], **changes)
    known = ", ".join(one.kind for one in DEVICES)
    if "kind" in facts:
        raise EngineError(
            f"devices.{name}: kind '{facts['kind']}' is not a known device; known devices: {known}."
        )
    if missing := [fact for fact in _NEEDED if fact not in facts]:
        raise EngineError(
            f"devices.{name} is not a known device, and lacks {', '.join(missing)}; "
            f"known devices: {known}."
        )
    unknown = dict.fromkeys(one.name for one in fields(Device) if one.name.endswith(_UNITS))
    return Device(**{**unknown, "kind": name.lower(), "source": "", **changes})
