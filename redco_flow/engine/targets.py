"""Devices to compile a program for that need not be there: `h100x8`, `a100-40gx4`, `v5p:2x2x2`.

NVIDIA's GPUs need JAX's CUDA plugin, without a driver, and ptxas and libdevice, which two packages
of NVIDIA bring (the extra `plan-gpu`); TPUs need libtpu (`plan-tpu`).
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redco_flow.engine.devices import DEVICES, Device, find_device
from redco_flow.engine.errors import EngineError
from redco_flow.engine.step.links import Fabrics

if TYPE_CHECKING:
    import jax

_EXAMPLES = "h100x8, a100-40gx4, v4x64 or v5p:2x2x2"
_GPUS_PER_HOST = 8
_GPU_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shape.shared_memory_per_core_bytes} threads_per_core_limit: 2048
  core_count: {shape.num_cores} fpus_per_core: {shape.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {shape.l2_cache_bytes}
  clock_rate_ghz: {shape.clock_ghz} device_memory_size: {memory}
  shared_memory_per_block_optin: {shape.shared_memory_per_block_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA {name}"
"""


class NoCompiler(EngineError):
    """The compiler of a target is not installed."""


@dataclass(frozen=True)
class Target:
    """Devices that are meant, there or not.

    Args:
        topology: of TPUs, the chips along each dim of their torus; of GPUs (1, hosts, GPUs a host).
        fabrics: which of the hosts share a network; None: all.
    """

    device: Device
    topology: tuple[int, ...]
    fabrics: Fabrics | None = None

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return math.prod(self.topology)

    @property
    def hosts_of_fabrics(self) -> list[int]:
        """The number of hosts of each fabric; empty where all share one."""
        return [] if self.fabrics is None else [*Counter(self.fabrics.of_host).values()]

    def set_environment(self) -> None:
        """Choose JAX's platform; to be called before JAX is imported."""
        if self.device.platform == "cuda":
            # A plugin is registered only where the platform is left open.
            os.environ.pop("JAX_PLATFORMS", None)
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            return
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu would ask the cloud what machine this is
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

    def find_devices(self) -> list[jax.Device]:
        """Return the devices.

        Raises:
            NoCompiler: their compiler is not installed; the message says what to install.
            EngineError: it knows no such slice of TPUs.
        """
        import jax
        from jax.experimental import topologies

        shape = "x".join(map(str, self.topology))
        if self.device.platform == "cuda":
            # Without ptxas or libdevice it is XLA that says so, and where it looked for them.
            parts = (f" jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
            _require("jax_plugins.xla_cuda13", "plan-gpu", "NVIDIA GPUs", "".join(parts))
            return list(
                topologies.get_topology_desc(
                    "", platform="cuda", topology=shape, target_config=_description(self.device)
                ).devices
            )
        _require("libtpu", "plan-tpu", "TPUs")
        name = f"{self.device.kind}:{shape}"
        # Of a v4 chip's two cores JAX makes one device, as of v5p's by default.
        options = {"chip_config_name": "megacore"} if self.device.kind == "v4" else {}
        try:
            return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
        except Exception as error:
            raise EngineError(f"libtpu knows no slice {name}: {_first_line(error)}") from error


def read_target(
    text: str,
    *,
    gpus_per_host: int | None = None,
    described: Mapping[str, Mapping[str, Any]] | None = None,
) -> Target:
    """Read `KINDxNUMBER` or, of TPUs, `KIND:AxBxC`.

    Args:
        gpus_per_host: 8, or as many as there are of fewer, by default.
        described: facts about devices, as of `find_device`.

    Raises:
        EngineError: no such device, or no such number or topology of them.
    """
    found = re.fullmatch(r"(.+?)(?:x(\d+)|:(\d+(?:x\d+)*))", text.strip())
    if found is None:
        raise EngineError(f"the target '{text}' is not KINDxNUMBER or KIND:TOPOLOGY: {_EXAMPLES}.")
    name, count, shape = found.groups()
    device = find_device(name, described)
    sizes = tuple(map(int, (shape or count).split("x")))
    if not all(sizes):
        raise EngineError(f"the target '{text}' has no devices.")
    if device.torus_dims is None:
        return _gpus(text, device, sizes, gpus_per_host)
    if shape is None:
        return Target(device, _torus(text, device, sizes[0]))
    if len(sizes) != device.torus_dims:
        dims = "x".join("ABC"[: device.torus_dims])
        raise EngineError(f"the target '{text}': a slice of {device.kind} is {dims}.")
    return Target(device, sizes)


def _gpus(text: str, device: Device, sizes: tuple[int, ...], per_host: int | None) -> Target:
    if device.architecture is None:
        kinds = ", ".join(one.kind for one in DEVICES if one.architecture or one.torus_dims)
        raise EngineError(
            f"nothing can be compiled for {device.kind} where there is none: use one of {kinds}."
        )
    if len(sizes) != 1:
        raise EngineError(f"the target '{text}': of GPUs give the number, as {device.kind}x8.")
    (count,) = sizes
    per_host = per_host or min(count, _GPUS_PER_HOST)
    if count % per_host:
        raise EngineError(
            f"the target '{text}': {count} GPUs are not a number of hosts with {per_host} each."
        )
    return Target(device, (1, count // per_host, per_host))


def _torus(text: str, device: Device, count: int) -> tuple[int, ...]:
    """Return the most even slice of a power of two, as 2x2x4 of 16."""
    dims, rest = [1] * (device.torus_dims or 1), count
    while rest > 1 and rest % 2 == 0:
        dims[dims.index(min(dims))] *= 2
        rest //= 2
    if rest > 1:
        raise EngineError(f"the target '{text}': give the topology of {count} chips, as v5p:2x2x3.")
    return tuple(dims if len(dims) == 3 and dims[2] == 1 else sorted(dims))


def _description(device: Device) -> str:
    shape = device.architecture
    assert shape is not None
    major, minor = divmod(shape.compute_capability, 10)
    return _GPU_DESCRIPTION.format(
        shape=shape, bandwidth=round(device.hbm_gb_s * 1e9), major=major, minor=minor,
        memory=round(device.memory_gib * 2**30), name=device.kind.upper(),
    )  # fmt: skip


def _require(module: str, extra: str, what: str, versions: str = "") -> None:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise NoCompiler(
            f"{module} is not installed, which compiles for {what}: "
            f"pip install 'redco-flow[{extra}]'{versions}"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
