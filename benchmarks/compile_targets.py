"""Devices to compile a program for ahead of time, whether they are there or not.

`cpu`: devices that JAX makes of this machine's. `tpu`: a slice of v5e chips, by libtpu alone (about
600 MB; `pip install libtpu`). `gpu`: A100s, by JAX's CUDA plugin without a driver
(`pip install jax-cuda13-plugin jax-cuda13-pjrt`, of JAX's version).
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
    from jax.experimental import topologies

    if target == "cpu":
        return jax.devices("cpu")[:count]
    if target == "tpu":
        _require("libtpu", "pip install libtpu")
        return list(topologies.get_topology_desc(_TPU_SLICES[count], platform="tpu").devices)
    version = jax.__version__
    packages = f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    _require("jax_plugins.xla_cuda13", f"pip install {packages}")
    description = topologies.get_topology_desc(
        "", platform="cuda", topology=f"1x1x{count}", target_config=_A100
    )
    return list(description.devices)


def _require(module: str, advice: str) -> None:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise SystemExit(f"{module} is not there to compile for this target: {advice}")
