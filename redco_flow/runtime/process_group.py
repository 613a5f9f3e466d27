"""The processes that compute one stage: ranks of a process group, and shards of a job array.

The only place that starts `jax.distributed`. A process on its own joins no group and pays nothing.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import Call
from redco_flow.launch.host_facts import package_versions
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous
from redco_flow.launch.worker_process import log
from redco_flow.records import read_json_if_present, write_json
from redco_flow.runtime.context import StageContext

LOCK = "shards.lock"
_RECORD = "shards.json"

_HEARTBEAT_TIMEOUT_SECONDS = 15
_SECONDS_TO_START = 120
_SECONDS_TO_PART = 60
_PLACES = ("JAX_COMPILATION_CACHE_DIR",)


def shards_left(work_dir: Path, num_shards: int) -> tuple[int, ...]:
    """Return the shards that are to be computed; all of them, where the parts were not joined."""
    computed = _read(work_dir).get(str(num_shards), [])
    every = range(num_shards)
    return tuple(shard for shard in every if shard not in computed) or tuple(every)


def note_computed(work_dir: Path, shard: int, num_shards: int) -> bool:
    """Write down that a shard is computed; return whether all are. Call it with the lock held."""
    record = _read(work_dir)
    computed = sorted({*record.get(str(num_shards), []), shard})
    write_json(work_dir / _RECORD, record | {str(num_shards): computed})
    return len(computed) == num_shards


def _read(work_dir: Path) -> dict[str, Any]:
    """Shards that are computed, by the number of shards."""
    return dict(read_json_if_present(work_dir / _RECORD) or {})


class ProcessGroup:
    """The processes of one job, seen from one of them.

    Args:
        context: takes reports of what is waited for.
        rank_info: which one this is.
    """

    def __init__(self, call: Call, context: StageContext, rank_info: RankInfo) -> None:
        self._call = call
        self._context = context
        self._rank_info = rank_info

    def join(self) -> bool:
        """Meet the others and start `jax.distributed`; return whether there is a stage to run.

        From here on SIGTERM is JAX's, which has all ranks agree on the step to stop after.

        Raises:
            CannotMeet: a rank is missing or would run something else, or JAX's port was taken;
                nothing has run.
            Stopped: a stop was requested while waiting.
        """
        if self._rank_info.num_processes == 1:
            return True
        coordinator = self._meeting().meet().coordinator
        if coordinator is None:
            return False
        self._context.report(phase="joining the other processes")
        self._start_jax(coordinator)
        return True

    def _start_jax(self, coordinator: str) -> None:
        import jax

        if self._rank_info.rank == 0:
            _check_port(coordinator)
        try:
            jax.distributed.initialize(
                coordinator_address=coordinator,
                num_processes=self._rank_info.num_processes,
                process_id=self._rank_info.rank,
                # Given in full: JAX would take one GPU per process wherever SLURM_* is set.
                local_device_ids=self._rank_info.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=_SECONDS_TO_START,
                heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS,
                shutdown_timeout_seconds=_SECONDS_TO_PART,
            )
        except jax.errors.JaxRuntimeError as error:
            raise _cannot_start(coordinator, error) from error

    def part(self) -> None:
        """Wait for all ranks and leave: from here on none misses another's heartbeat."""
        if self._rank_info.num_processes > 1:
            import jax

            jax.distributed.shutdown()

    def call_off(self) -> None:
        """Tell the others that there is nothing to run."""
        if self._rank_info.num_processes > 1:
            self._meeting().call_off()

    def is_called_off(self) -> bool:
        """Tell whether rank 0 has said by now that there is nothing to run."""
        return self._meeting().is_called_off()

    def _meeting(self) -> Rendezvous:
        def while_waiting(for_what: str) -> None:
            self._context.report(phase=for_what)
            self._context.raise_if_stopped()

        return Rendezvous(
            self._context.attempt_dir.path,
            self._rank_info,
            dict(facts_of(self._call, os.environ)),
            self._rank_info.rendezvous_seconds,
            while_waiting,
            log,
        )


def _check_port(coordinator: str) -> None:
    """Refuse a port that is taken: JAX may end the process at one, without a word."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        raise _cannot_start(coordinator, error) from error


def _cannot_start(coordinator: str, error: Exception) -> CannotMeet:
    return CannotMeet(
        f"the ranks met, and then JAX could not start at {coordinator} ({error}): most likely "
        f"another program took the port in between. A new attempt takes another."
    )


def facts_of(call: Call, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield all that must be the same in every process, by name."""
    yield "fingerprint", call.fingerprint
    for name, value in _leaves("config", call.config):
        yield name, value.replace(call.workspace, "workspace")  # each host may have its own
    for name, digest in call.ingredients.get("code", {}).items():
        yield f"code.{name}", str(digest)
    for name, version in package_versions().items():
        yield f"version.{name}", version
    for name, value in environ.items():
        if name.startswith(("JAX_", "XLA_", "LIBTPU_")) and name not in _PLACES:
            yield f"environment.{name}", value


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    else:
        yield path, repr(value)


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
