"""A stage attempt as Kubernetes objects: an Indexed Job, and the service that names its pods.

Pure: from an attempt and its resources to YAML for `kubectl apply`. Each process is a pod whose
index is its rank; any pod's end by failure ends them all. XManager's own backend makes Jobs
without an index, whose processes could not tell who they are, and waits for a failed one for ever.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.launch.process_place import ProcessPlace
from redco_flow.launch.process_tree import ATTEMPT_VARIABLE
from redco_flow.spec.xmanager_section import KubernetesSection, XManagerSection

_MAX_NAME = 52  # a pod adds "-<index>-<5 letters>" to it, and a label holds 63
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_LABEL = "app.kubernetes.io/instance"
_VOLUME = "workspace"


@dataclass(frozen=True)
class IndexedJob:
    """What one stage attempt is to run on a cluster.

    Args:
        attempt, workspace: absolute; the volume is mounted at the workspace's path.
        title: run, stage and attempt.
        variables: the profile's environment; no secrets.
    """

    attempt: Path
    workspace: Path
    title: str
    resources: JobResources
    settings: XManagerSection
    variables: Mapping[str, str]
    stall_seconds: float
    grace_seconds: float

    @property
    def kubernetes(self) -> KubernetesSection:
        """The cluster's part of the settings."""
        return self.settings.kubernetes

    @property
    def name(self) -> str:
        """The Job's name: readable, allowed, and unique to the title."""
        readable = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")
        digest = hashlib.sha256(self.title.encode()).hexdigest()[:8]
        return f"redco-{readable[: _MAX_NAME - 15].strip('-')}-{digest}"


def render_indexed_job(job: IndexedJob) -> str:
    """Return the objects as YAML documents.

    Raises:
        DoesNotFit: the processes of a host cannot share its GPUs evenly.
    """
    documents = yaml.safe_dump_all([_service(job), _job(job)], sort_keys=False)
    return f"# redco-flow: {' '.join(job.title.split())}\n{documents}"


def _service(job: IndexedJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        # Headless: each pod gets a name of its own, before it is ready too.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_LABEL: job.name},
            "ports": [{"name": "coordinator", "port": job.kubernetes.port}],
        },
    }


def _job(job: IndexedJob) -> dict[str, Any]:
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
            "template": {"metadata": {"labels": {_LABEL: job.name}}, "spec": _pod(job)},
        },
    }


def _pod(job: IndexedJob) -> dict[str, Any]:
    kubernetes = job.kubernetes
    account = kubernetes.service_account
    return {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "terminationGracePeriodSeconds": int(job.grace_seconds) + 10,
        **({} if account is None else {"serviceAccountName": account}),
        "containers": [
            {
                "name": "rank",
                "image": kubernetes.image,
                "command": [kubernetes.python, *_arguments(job)],
                "env": _environment(job),
                "resources": _resources(job.resources),
                "volumeMounts": [{"name": _VOLUME, "mountPath": str(job.workspace)}],
            }
        ],
        "volumes": [
            {"name": _VOLUME, "persistentVolumeClaim": {"claimName": kubernetes.volume_claim}}
        ],
    }


def _arguments(job: IndexedJob) -> list[str]:
    walltime = job.resources.walltime_minutes
    return [
        *("-P", "-m", "redco_flow.launch.xmanager.pod", str(job.attempt)),
        *("--stall-seconds", f"{job.stall_seconds:g}"),
        *("--grace-seconds", f"{job.grace_seconds:g}"),
        *([] if walltime is None else ["--walltime-seconds", str(walltime * 60)]),
    ]


def _environment(job: IndexedJob) -> list[dict[str, Any]]:
    """The pods' variables, all but the rank the same: a pod is a host with one process."""
    place = ProcessPlace(
        num_processes=job.resources.num_processes,
        gpus_per_host=_gpus_per_pod(job.resources),
        rendezvous_seconds=job.settings.rendezvous_seconds,
    ).to_environment()
    del place["REDCO_FLOW_RANK"]
    index = {"fieldRef": {"fieldPath": _INDEX}}
    coordinator = f"{job.name}-0.{job.name}:{job.kubernetes.port}"
    plain = {
        **job.variables,
        **place,
        ATTEMPT_VARIABLE: str(job.attempt),
        "JAX_COORDINATOR_ADDRESS": coordinator,
    }
    stored = {
        one.variable: {"secretKeyRef": {"name": one.object, "key": one.entry}}
        for one in job.kubernetes.stored_variables
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


def _metadata(job: IndexedJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "namespace": job.kubernetes.namespace,
        "labels": {"app.kubernetes.io/managed-by": "redco-flow"},
    }
