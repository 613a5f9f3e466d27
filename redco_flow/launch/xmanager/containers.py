"""A stage attempt as containers on this machine: one `docker run` for each process.

Pure: from an attempt and its resources to command lines. Of variables that are passed on only the
names stand in them; Docker takes the values from the shell that runs them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.xmanager.container_command import (
    ContainerJob,
    rank_command,
    shared_variables,
)
from redco_flow.launch.xmanager.work_unit import check_fits


def render_containers(job: ContainerJob) -> str:
    """Return the command lines, to be run side by side.

    Raises:
        DoesNotFit: it asks for more than one host, or its processes cannot share the GPUs evenly.
    """
    check_fits(job.resources)
    lines = [f"# redco-flow: {' '.join(job.title.split())}"]
    lines += [" \\\n    ".join(_parts(job, rank)) for rank in range(job.resources.num_processes)]
    return "\n".join(lines) + "\n"


def _parts(job: ContainerJob, rank: int) -> Iterator[str]:
    """One container's command, in parts that belong on a line each."""
    section, resources = job.settings.containers, job.resources
    place = ProcessPlace(
        rank=rank,
        num_processes=resources.num_processes,
        local_rank=rank,
        processes_per_host=resources.num_processes,
        gpus_per_host=resources.gpus_per_host,
        rendezvous_seconds=job.settings.rendezvous_seconds,
    )
    yield f"docker run --rm --init --network=host --stop-timeout={int(job.grace_seconds) + 10}"
    yield shlex.join(["--mount", f"type=bind,source={job.workspace},target={job.workspace}"])
    if place.local_device_ids is not None:
        yield "--gpus=all"
    if resources.cpus_per_host is not None:
        yield f"--cpus={resources.cpus_per_host / resources.num_processes:g}"
    if resources.memory_gib is not None:
        yield f"--memory={int(resources.memory_gib * 1024 / resources.num_processes)}m"
    variables = {"REDCO_FLOW_RANK": str(rank)} | shared_variables(job, place)
    for name, value in variables.items():
        yield shlex.join([f"--env={name}={value}"])
    for name in section.passed_variables:
        yield f"--env={name}"
    yield shlex.join([str(section.image), section.python, *rank_command(job, "pod")])
