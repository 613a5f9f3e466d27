"""A stage attempt as a request to Vertex AI: a custom job with a replica for each host.

Pure: from an attempt and its resources to the request's address and JSON. Vertex wants the first
replica in a pool of its own; `vertex_task` reads in each of them which rank it is.
"""

from __future__ import annotations

import json
from typing import Any

from redco_flow.errors import DoesNotFit
from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.xmanager.container_command import (
    ContainerJob,
    rank_command,
    shared_variables,
)
from redco_flow.launch.xmanager.stored_secrets import STORED_VARIABLES

_MAX_DISPLAY_NAME = 128
_ACCELERATOR_COUNTS = (0, 1, 2, 4, 8, 16)


def render_custom_job(job: ContainerJob) -> str:
    """Return the request as text: method and address, then the body.

    Raises:
        DoesNotFit: Vertex has no such hosts.
    """
    vertex = job.settings.vertex
    address = (
        f"https://{vertex.region}-aiplatform.googleapis.com/v1/projects/{vertex.project}/"
        f"locations/{vertex.region}/customJobs"
    )
    return f"POST {address}\n{json.dumps(_custom_job(job), indent=2)}\n"


def _custom_job(job: ContainerJob) -> dict[str, Any]:
    _check_fits(job)
    vertex, num_hosts = job.settings.vertex, job.resources.num_hosts
    counts = [1, num_hosts - 1] if num_hosts > 1 else [1]
    account = vertex.service_account
    return {
        "displayName": job.title[:_MAX_DISPLAY_NAME],
        "labels": {"managed-by": "redco-flow"},
        "jobSpec": {
            "workerPoolSpecs": [_pool(job, count) for count in counts],
            "scheduling": _scheduling(job),
            "network": vertex.network,
            **({} if account is None else {"serviceAccount": account}),
        },
    }


def _scheduling(job: ContainerJob) -> dict[str, Any]:
    """Trying again is the run's business, with its budgets."""
    walltime = job.resources.walltime_minutes
    # After its own end of time a rank still has its grace.
    limit = None if walltime is None else int(walltime * 60 + job.grace_seconds + 60)
    return {
        "disableRetries": True,
        "restartJobOnWorkerRestart": False,
        **({} if limit is None else {"timeout": f"{limit}s"}),
    }


def _pool(job: ContainerJob, num_replicas: int) -> dict[str, Any]:
    vertex, num_gpus = job.settings.vertex, job.resources.gpus_per_host
    machine: dict[str, Any] = {"machineType": vertex.machine_type}
    if num_gpus:
        machine |= {"acceleratorType": vertex.accelerator_type, "acceleratorCount": num_gpus}
    share = {"server": vertex.nfs_server, "path": vertex.nfs_path}
    return {
        "machineSpec": machine,
        "replicaCount": str(num_replicas),  # 64 bits, a text in Google's JSON
        "nfsMounts": [{**share, "mountPoint": str(job.workspace)}],
        "containerSpec": {
            "imageUri": vertex.image,
            "command": [vertex.python, *rank_command(job, "vertex_task")],
            "env": [{"name": name, "value": value} for name, value in _variables(job).items()],
        },
    }


def _variables(job: ContainerJob) -> dict[str, str]:
    place = ProcessPlace(
        num_processes=job.resources.num_processes,
        gpus_per_host=job.resources.gpus_per_host,
        rendezvous_seconds=job.settings.rendezvous_seconds,
    )
    stored = {one.variable: one.secret for one in job.settings.vertex.stored_variables}
    names = {STORED_VARIABLES: json.dumps(stored)} if stored else {}
    return shared_variables(job, place) | names


def _check_fits(job: ContainerJob) -> None:
    asked, vertex = job.resources, job.settings.vertex
    if asked.processes_per_host > 1:
        raise DoesNotFit(
            f"a host on Vertex AI runs one process with all its GPUs, and "
            f"xmanager.processes_per_host is {asked.processes_per_host}; set it to 1."
        )
    if asked.gpus_per_host not in _ACCELERATOR_COUNTS:
        counts = ", ".join(map(str, _ACCELERATOR_COUNTS))
        raise DoesNotFit(
            f"no machine on Vertex AI has {asked.gpus_per_host} GPUs; let "
            f"resources.gpus_per_host be one of {counts}."
        )
    if asked.gpus_per_host and vertex.accelerator_type is None:
        raise DoesNotFit(
            f"the stage asks for {asked.gpus_per_host} GPUs per host; say which in "
            f"xmanager.vertex.accelerator_type, as NVIDIA_TESLA_A100."
        )
