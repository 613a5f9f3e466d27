"""Which devices JAX computes on, held against the GPUs that a stage asks for."""

from __future__ import annotations

import os
import sys
from collections import Counter

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import Call


class MissingDevices(RedcoFlowError):
    """The stage asks for GPUs that JAX does not find here; nothing of it has run."""


def describe_devices() -> str:
    """Return the kinds of all processes' devices: `2 × NVIDIA H100 80GB HBM3`, or `cpu`."""
    import jax

    counts = Counter(str(device.device_kind) for device in jax.devices())
    return ", ".join(f"{n} × {kind}" if n > 1 else kind for kind, n in counts.items())


def check_devices(call: Call) -> None:
    """Compare what a stage asks for with what JAX finds; a stage without GPUs is not looked at.

    Raises:
        MissingDevices: JAX finds fewer on this host and the profile does not allow it.
    """
    asked = call.resources.gpus_per_host // call.resources.processes_per_host
    if not asked:
        return
    import jax

    found = sum(device.platform != "cpu" for device in jax.local_devices())
    if found >= asked:
        return
    message = (
        f"stage '{call.stage}' asks for {asked} GPU{'s' if asked > 1 else ''} in this process "
        f"(resources.gpus_per_host: {call.resources.gpus_per_host}), and on {os.uname().nodename} "
        f"JAX finds {found}: its devices are {describe_devices()}."
    )
    if call.missing_gpus == "error":
        raise MissingDevices(
            f"{message} Nothing of the stage has run. Install JAX for these GPUs (pip install "
            "'jax[cuda13]'; `nvidia-smi` shows what the machine has), choose a profile whose "
            "machines have them, or set resources.gpus_per_host to what there is; "
            "profile.missing_gpus=warn computes on what there is."
        )
    sys.stderr.write(
        f"redco-flow: WARNING: {message} It goes on with these (missing_gpus: warn).\n"
    )
