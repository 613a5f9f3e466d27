"""A stage attempt as Kubernetes objects: an Indexed Job, and the service that names its pods.

Pure: from an attempt and its resources to YAML for `kubectl apply`. Each process is a pod whose
index is its rank; any pod's end by failure ends them all. XManager's own backend makes Jobs
without an index, whose processes could not tell who they are, and waits for a failed one for ever.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import yaml

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.xmanager.container_command import (
    ContainerJob,
    rank_command,
    shared_variables,
)

_MAX_NAME = 52  # a pod adds "-<index>-<5 letters>" to it, and a label holds 63
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_LABEL = "app.kubernetes.io/instance"
_VOLUME = "workspace"


def render_indexed_job(job: ContainerJob) -> str:
    """Return the objects as YAML documents.

    Raises:
        DoesNotFit: the processes of a host cannot share its GPUs evenly.
    """
    documents = yaml.safe_dump_all([_service(job), _job(job)], sort_keys=False)
    return f"# redco-flow: {' '.join(job.title.split())}\n{documents}"


def _service(job: ContainerJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        # Headless: each pod gets a name of its own, before it is ready too.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_LABEL: _name(job)},
            "ports": [{"name": "coordinator", "port": job.settings.kubernetes.port}],
        },
    }


def _job(job: ContainerJob) -> dict[str, Any]:
    num_pods = job.resources.num_processes
    walltime = job.resources.walltime_minutes
    # After its own end of time a rank still has its grace.
    limit = None if walltime is None else int(walltime * 60 + job.grace_seconds + 60)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job),
        "spec": {
            "completions": num_pods,
            "parallelism": num_pods,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            **({} if limit is None else {"activeDeadlineSeconds": limit}),
            "template": {"metadata": {"labels": {_LABEL: _name(job)}}, "spec": _pod(job)},
        },
    }


def _pod(job: ContainerJob) -> dict[str, Any]:
    kubernetes = job.settings.kubernetes
    account = kubernetes.service_account
    return {
        "restartPolicy": "Never",
        "subdomain": _name(job),
        "terminationGracePeriodSeconds": int(job.grace_seconds) + 10,
        **({} if account is None else {"serviceAccountName": account}),
        "containers": [
            {
                "name": "rank",
                "image": kubernetes.image,
                "command": [kubernetes.python, *rank_command(job, "pod")],
                "env": _environment(job),
                "resources": _resources(job.resources),
                "volumeMounts": [{"name": _VOLUME, "mountPath": str(job.workspace)}],
            }
        ],
        "volumes": [
            {"name": _VOLUME, "persistentVolumeClaim": {"claimName": kubernetes.volume_claim}}
        ],
    }


def _environment(job: ContainerJob) -> list[dict[str, Any]]:
    """The pods' variables, all but the rank the same: a pod is a host with one process."""
    place = ProcessPlace(
        num_processes=job.resources.num_processes,
        gpus_per_host=_gpus_per_pod(job.resources),
        rendezvous_seconds=job.settings.rendezvous_seconds,
    )
    index = {"fieldRef": {"fieldPath": _INDEX}}
    coordinator = f"{_name(job)}-0.{_name(job)}:{job.settings.kubernetes.port}"
    plain = shared_variables(job, place) | {"JAX_COORDINATOR_ADDRESS": coordinator}
    stored = {
        one.variable: {"secretKeyRef": {"name": one.object, "key": one.entry}}
        for one in job.settings.kubernetes.stored_variables
    }
    referred = {"REDCO_FLOW_RANK": index, "JOB_COMPLETION_INDEX": index, **stored}
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *({"name": name, "valueFrom": source} for name, source in referred.items()),
    ]


def _resources(resources: JobResources) -> dict[str, Any]:
    """What one pod asks for: its share of a host, GPUs as the limit that they must be."""
    share = resources.processes_per_host
    cpus, memory, gpus = resources.cpus_per_host, resources.memory_gib, _gpus_per_pod(resources)
    asked: dict[str, str] = {}
    if cpus is not None:
        asked["cpu"] = f"{cpus * 1000 // share}m"
    if memory is not None:
        asked["memory"] = f"{int(memory * 1024 / share)}Mi"
    limits = {name: value for name, value in asked.items() if name == "memory"}
    if gpus:
        limits["nvidia.com/gpu"] = asked["nvidia.com/gpu"] = str(gpus)
    return {"requests": asked, "limits": limits}


def _gpus_per_pod(resources: JobResources) -> int:
    gpus, rest = divmod(resources.gpus_per_host, resources.processes_per_host)
    if rest or (resources.gpus_per_host and not gpus):
        raise DoesNotFit(
            f"{resources.processes_per_host} processes per host cannot share "
            f"{resources.gpus_per_host} GPUs evenly; let xmanager.processes_per_host divide "
            f"resources.gpus_per_host."
        )
    return gpus


def _metadata(job: ContainerJob) -> dict[str, Any]:
    return {
        "name": _name(job),
        "namespace": job.settings.kubernetes.namespace,
        "labels": {"app.kubernetes.io/managed-by": "redco-flow"},
    }


def _name(job: ContainerJob) -> str:
    """The Job's name: readable, allowed, and unique to the title."""
    readable = re.sub(r"[^a-z0-9]+", "-", job.title.lower()).strip("-")
    digest = hashlib.sha256(job.title.encode()).hexdigest()[:8]
    return f"redco-{readable[: _MAX_NAME - 15].strip('-')}-{digest}"
