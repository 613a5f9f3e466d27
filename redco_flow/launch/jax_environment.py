"""The environment variables that JAX reads at its first import, set for one worker.

Pure: maps an environment to the variables to set. Imports no JAX: it must not be imported yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def jax_variables(
    environ: Mapping[str, str], *, num_cpu_devices: int | None, compile_cache: Path
) -> dict[str, str]:
    """Return what to set in `environ`.

    Args:
        environ: the worker's environment as inherited.
        num_cpu_devices: replaces whatever number was inherited; None leaves that alone.
        compile_cache: where compiled programs are kept, unless the environment names a place.
    """
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache),
        # By default only slow compiles are kept; a restart pays for each of the others again.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    variables = {name: environ.get(name, value) for name, value in variables.items()}
    if num_cpu_devices is not None:
        flags = [
            flag
            for flag in environ.get("XLA_FLAGS", "").split()
            if flag.partition("=")[0] != _HOST_DEVICES_FLAG
        ]
        variables["XLA_FLAGS"] = " ".join(flags)
        variables["JAX_NUM_CPU_DEVICES"] = str(num_cpu_devices)
    return variables
