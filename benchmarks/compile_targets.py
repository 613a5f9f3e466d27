"""Devices to compile a program for ahead of time, whether they are there or not.

`cpu`: devices that JAX makes of this machine's. `tpu`: a slice of v5e chips. `gpu`: A100s of 40 GB.
By name (`find_chips`): v5p, v5e and v6e chips, A100s and H100s of 80 GB. What must be installed
says `redco_flow/engine/targets.py`.
"""

import os
from typing import Any

from redco_flow.engine.devices import find_device
from redco_flow.engine.targets import NoCompiler, read_target

TARGETS = ("cpu", "tpu", "gpu")
_EIGHT = {"tpu": "v5ex8", "gpu": "a100-40gx8", "a100": "a100-80gx8", "h100": "h100x8"} | {
    name: f"{name}x8" for name in ("v5p", "v5e", "v6e")
}
CHIPS = ("v5p", "v5e", "v6e", "a100", "h100")
MEMORY_GIB = {
    name: find_device("a100-80g" if name == "a100" else name).memory_gib for name in CHIPS
}


def kind_of(chip: str) -> str:
    """Return which of TARGETS a chip is."""
    return "tpu" if read_target(_EIGHT[chip]).device.platform == "tpu" else "gpu"


def set_environment(target: str, num_cpu_devices: int) -> None:
    """Choose JAX's platform; to be called before JAX is imported."""
    flags = os.environ.get("XLA_FLAGS", "")
    count = f"--xla_force_host_platform_device_count={num_cpu_devices}"
    os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()
    read_target(_EIGHT["gpu" if target == "gpu" else "tpu"]).set_environment()


def find_devices(target: str, count: int) -> list[Any]:
    """Return `count` devices of a target.

    Raises:
        SystemExit: the target's compiler is not installed; the message says what to install.
    """
    import jax

    if target == "cpu":
        return jax.devices("cpu")[:count]
    return _devices(f"{_EIGHT[target].removesuffix('8')}{count}")


def find_chips(name: str, count: int) -> list[Any]:
    """Return `count` chips, at most eight.

    Raises:
        SystemExit: their compiler is not installed; the message says what to install.
    """
    return _devices(_EIGHT[name])[:count]


def _devices(text: str) -> list[Any]:
    try:
        return read_target(text).find_devices()
    except NoCompiler as error:
        raise SystemExit(str(error)) from error
