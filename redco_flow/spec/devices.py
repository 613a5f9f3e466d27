"""Facts about accelerators in a profile: the names and units of `engine.devices`."""

from __future__ import annotations

from redco_flow.spec.model import PositiveFloat, PositiveInt, Regex, StrictModel, Text


class GpuArchitecture(StrictModel):
    """Facts that XLA needs to compile for a GPU where there is none (CUDA's deviceQuery).

    Args:
        compute_capability: 90 for 9.0.
        num_cores: streaming multiprocessors.
        fpus_per_core: CUDA cores of each.
        shared_memory_per_core_bytes, shared_memory_per_block_bytes: of each streaming
            multiprocessor, and the most that one block may take.
        l2_cache_bytes: of the GPU.
        clock_ghz: the highest.
    """

    compute_capability: PositiveInt
    num_cores: PositiveInt
    fpus_per_core: PositiveInt
    shared_memory_per_core_bytes: PositiveInt
    shared_memory_per_block_bytes: PositiveInt
    l2_cache_bytes: PositiveInt
    clock_ghz: PositiveFloat


class DeviceFacts(StrictModel):
    """Facts about one kind of device that differ from the built-in ones; None leaves those.

    A GPU that is not built in needs `reported`, `bfloat16_tflops`, `memory_gib`, `hbm_gb_s` and
    `architecture`.

    Args:
        kind: the built-in GPU that the name means where it could be several: a100-40g, a100-80g or
            a100-80g-pcie of a cluster's `a100`.
        reported: a regular expression of what JAX calls it, as "NVIDIA L4".
        bfloat16_tflops, tf32_tflops, float32_tflops: 10^12 operations a second, of dense products.
        memory_gib: what programs can have.
        hbm_gb_s: 10^9 bytes a second from and to its memory.
        host_gb_s: what it sends to other devices of its host in one direction, over all its links.
        network_gb_s: likewise, to other hosts.
        architecture: to compile for a GPU that cannot be compiled for without it.
    """

    kind: Text | None = None
    reported: Regex | None = None
    bfloat16_tflops: PositiveFloat | None = None
    tf32_tflops: PositiveFloat | None = None
    float32_tflops: PositiveFloat | None = None
    memory_gib: PositiveFloat | None = None
    hbm_gb_s: PositiveFloat | None = None
    host_gb_s: PositiveFloat | None = None
    network_gb_s: PositiveFloat | None = None
    architecture: GpuArchitecture | None = None
