"""Say with which options of XLA's the programs for a mesh are compiled, by its devices' platform.

They are given to each program (`compiler_options` of `jax.jit`), so no environment variable has
to be set before JAX starts, and a program compiled ahead of time has them too. A compiler that
does not know an option refuses the program, so it is asked which it knows.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from redco_flow.engine.sharding.mesh import own_device

CompilerOptions = dict[str, bool | int | str]

_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
# XLA for GPUs computes while it reduces and gathers only if told to.
GPU_OPTIONS: CompilerOptions = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    # Their names since JAX 0.11.
    "xla_gpu_pipeline_all_gather": _PIPELINED,
    "xla_gpu_pipeline_all_reduce": _PIPELINED,
    "xla_gpu_pipeline_reduce_scatter": _PIPELINED,
}

# libtpu 0.0.42 does so by itself for v5e; for v5p no collective is asynchronous without them.
# Source: MaxText, benchmarks/xla_flags_library.py: CF_FOR_ALL_GATHER, DATA_PARALLEL_OVERLAP.
TPU_OPTIONS: CompilerOptions = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}

# Room for larger fusions. Its DENSE_VMEM_LIMIT_FLAG, which it sets for dense models on these chips
# alone; older ones have less of that memory than this.
_BY_DEVICE_KIND: Mapping[str, CompilerOptions] = {
    "TPU v6 lite": {"xla_tpu_scoped_vmem_limit_kib": 98304}
}

_BY_PLATFORM: Mapping[str, CompilerOptions] = {"gpu": GPU_OPTIONS, "tpu": TPU_OPTIONS}
# The variables of a user's own options of XLA and libtpu.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def compiler_options(mesh: Mesh, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options for programs on a mesh, without those that the environment names.

    An option of a program would win over the same one in the environment, so that one is left out;
    and so is what this version of the devices' compiler does not know.

    Args:
        mesh: its devices need not be there.
        environ: where the user's own flags stand, in `XLA_FLAGS` or `LIBTPU_INIT_ARGS`.
    """
    named = {_name(flag) for variable in _VARIABLES for flag in environ.get(variable, "").split()}
    device = own_device(mesh.devices.flatten().tolist())
    ours = {**_BY_PLATFORM.get(device.platform, {}), **_BY_DEVICE_KIND.get(device.device_kind, {})}
    known = known_options(device, tuple(ours.items())) if ours else {}
    return {name: value for name, value in known.items() if name not in named}


@functools.cache
def known_options(
    device: jax.Device, options: tuple[tuple[str, bool | int | str], ...]
) -> CompilerOptions:
    """Return those of the options, (name, value), that a device's compiler knows.

    Args:
        device: need not be there.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    # JAX lowers nothing for devices that are not all of a mesh that the caller has set.
    with jax.set_mesh(Mesh(np.asarray([device]), ("device",))):
        program = jax.jit(jnp.negative).lower(scalar)
    known: dict[str, Any] = dict(options)
    while True:
        try:
            program.compile(known)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or unknown[1] not in known:
                return known  # What else there is, the program that is wanted will meet, too.
            del known[unknown[1]]
        else:
            return known


def _name(flag: str) -> str:
    """Return what `--name=value`, `--name` or `--noname` names."""
    name = flag.lstrip("-").partition("=")[0]
    return name.removeprefix("no") if name.startswith("noxla_") else name
