"""Devices to compile a program for ahead of time, whether they are there or not.

`cpu`: devices that JAX makes of this machine's. `tpu`: a slice of v5e chips, by libtpu alone (about
600 MB; `pip install libtpu`). `gpu`: A100s, by JAX's CUDA plugin without a driver
(`pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm`, the first two of
JAX's version; the others, 310 MB, bring ptxas and libdevice, which a CUDA toolkit has as well). By
name (`find_chips`): v5p, v5e and v6e chips, A100s and H100s of 80 GB.
"""

import importlib.util
import os
from typing import Any

TARGETS = ("cpu", "tpu", "gpu")
_TPU_SLICES = {2: "v5e:1x2", 4: "v5e:2x2", 8: "v5e:2x4"}
_A100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 167936 threads_per_core_limit: 2048 core_count: 108 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1555000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41
  device_memory_size: 42331013120 shared_memory_per_block_optin: 166912
  cuda_compute_capability { major: 8 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA A100-SXM4-40GB"
"""
# Eight chips, and the memory of one that a program can have.
_SLICES_OF_EIGHT = {"v5p": "v5p:2x2x2", "v5e": "v5e:2x4", "v6e": "v6e:2x4"}
MEMORY_GIB = {"v5p": 95.74, "v5e": 15.75, "v6e": 31.25, "a100": 79.2, "h100": 79.2}
# What of a GPU's description differs from an A100's of 40 GB.
_GPUS = {
    "a100": {
        "memory_bandwidth: 1555000000000": "memory_bandwidth: 2039000000000",
        "A100-SXM4-40GB": "A100-SXM4-80GB",
    },
    "h100": {
        "shared_memory_per_core: 167936": "shared_memory_per_core: 233472",
        "core_count: 108 fpus_per_core: 64": "core_count: 132 fpus_per_core: 128",
        "memory_bandwidth: 1555000000000": "memory_bandwidth: 3350000000000",
        "l2_cache_size: 41943040": "l2_cache_size: 52428800",
        "clock_rate_ghz: 1.41": "clock_rate_ghz: 1.98",
        "shared_memory_per_block_optin: 166912": "shared_memory_per_block_optin: 232448",
        "cuda_compute_capability { major: 8 }": "cuda_compute_capability { major: 9 }",
        "A100-SXM4-40GB": "H100 80GB HBM3",
    },
}


def kind_of(chip: str) -> str:
    """Return which of TARGETS a chip is."""
    return "tpu" if chip in _SLICES_OF_EIGHT else "gpu"


def set_environment(target: str, num_cpu_devices: int) -> None:
    """Choose JAX's platform; to be called before JAX is imported."""
    flags = f"--xla_force_host_platform_device_count={num_cpu_devices}"
    os.environ["XLA_FLAGS"] = flags
    if target == "gpu":
        # A plugin is registered only where the platform is left open.
        os.environ.pop("JAX_PLATFORMS", None)
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    # libtpu would ask the cloud what machine this is.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"


def find_devices(target: str, count: int) -> list[Any]:
    """Return `count` devices of a target.

    Raises:
        SystemExit: the target's compiler is not installed; the message says what to install.
    """
    import jax

    if target == "cpu":
        return jax.devices("cpu")[:count]
    if target == "tpu":
        return _tpus(_TPU_SLICES[count])
    return _gpus(count, _A100)


def find_chips(name: str, count: int) -> list[Any]:
    """Return `count` chips, at most eight.

    Raises:
        SystemExit: their compiler is not installed; the message says what to install.
    """
    if kind_of(name) == "tpu":
        return _tpus(_SLICES_OF_EIGHT[name])[:count]
    description = _A100.replace("42331013120", str(round(MEMORY_GIB[name] * 2**30)))
    for before, after in _GPUS[name].items():
        description = description.replace(before, after)
    return _gpus(count, description)


def _tpus(topology: str) -> list[Any]:
    from jax.experimental import topologies

    _require("libtpu", "pip install libtpu")
    return list(topologies.get_topology_desc(topology, platform="tpu").devices)


def _gpus(count: int, target_config: str) -> list[Any]:
    import jax
    from jax.experimental import topologies

    version = jax.__version__
    packages = f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    # Without ptxas or libdevice it is XLA that says so, and where it looked for them.
    _require("jax_plugins.xla_cuda13", f"pip install {packages} nvidia-cuda-nvcc nvidia-nvvm")
    description = topologies.get_topology_desc(
        "", platform="cuda", topology=f"1x1x{count}", target_config=target_config
    )
    return list(description.devices)


def _require(module: str, advice: str) -> None:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise SystemExit(f"{module} is not there to compile for this target: {advice}")
