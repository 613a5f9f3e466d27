"""What `plan --render` shows for XManager, without the library; a pod's command really runs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_stages.calls import make_attempt

from redco_flow.errors import DoesNotFit, UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.xmanager.executor import XManagerExecutor
from redco_flow.launch.xmanager.package import require_xmanager
from redco_flow.launch.xmanager.vertex_task import rank_of
from redco_flow.spec.xmanager_section import XManagerSection
from redco_flow.tracking.attempt import AttemptDirectory

KUBERNETES = {
    "backend": "kubernetes",
    "processes_per_host": 2,
    "kubernetes": {
        "image": "registry.example/redco-flow:1",
        "volume_claim": "workspace",
        "namespace": "research",
        "stored_variables": [{"variable": "HF_TOKEN", "object": "hugging-face", "entry": "token"}],
    },
}


def executor(workspace, section=None, variables=None, **settings):
    section = XManagerSection.from_json(section or {})
    return XManagerExecutor(workspace, section, variables=variables or {}, **settings)


def objects(attempt, resources, *, workspace="/w", title="tiny-abcd train 1", **settings):
    text = executor(workspace, KUBERNETES, {"A": "b: c"}, **settings).render(
        AttemptDirectory(attempt), title, resources
    )
    return list(yaml.safe_load_all(text))


def variables_of(pod, index):
    """The container's variables as the cluster would set them; a Secret's as its name."""
    variables = {}
    for one in pod["containers"][0]["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            assert "job-completion-index" in source["fieldRef"]["fieldPath"]
            variables[one["name"]] = str(index)
        elif "secretKeyRef" not in source:
            variables[one["name"]] = one["value"]
    return variables


def test_the_local_backend_shows_every_job_with_its_command_and_its_place(tmp_path):
    text = executor(tmp_path, variables={"A": "b c"}, stall_seconds=60, grace_seconds=5).render(
        AttemptDirectory(Path("/w/1")),
        "run-RUN train 1",
        JobResources(processes_per_host=2, gpus_per_host=8, walltime_minutes=2),
    )

    lines = text.splitlines()
    assert lines[:2] == [
        "# redco-flow: run-RUN train 1",
        "experiment run-RUN, one work unit, backend local",
    ]
    command = (
        "python -P -m redco_flow.launch.xmanager.follow /w/1 "
        "--stall-seconds 60 --grace-seconds 5 --walltime-seconds 120"
    )
    assert [line for line in lines if line.startswith("job")] == [
        f"job rank0: {command}",
        f"job rank1: {command}",
    ]
    assert [line for line in lines if "_RANK=" in line] == [
        "  REDCO_FLOW_RANK=0",
        "  REDCO_FLOW_LOCAL_RANK=0",
        "  REDCO_FLOW_RANK=1",
        "  REDCO_FLOW_LOCAL_RANK=1",
    ]
    assert lines[-1] == "A='b c'"


def test_nothing_of_the_library_is_imported_to_show_what_would_be_submitted(tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from redco_flow.launch.call import JobResources\n"
        "from redco_flow.launch.xmanager.executor import XManagerExecutor\n"
        "from redco_flow.spec.xmanager_section import XManagerSection\n"
        "from redco_flow.tracking.attempt import AttemptDirectory\n"
        "executor = XManagerExecutor(sys.argv[1], XManagerSection(), variables={})\n"
        "print(executor.render(AttemptDirectory(Path('/w/1')), 'run train 1', JobResources()))\n"
        "assert not {'xmanager', 'kubernetes', 'absl'} & set(sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "job rank0" in done.stdout


def test_a_stage_of_several_hosts_does_not_fit_this_machine(tmp_path):
    with pytest.raises(DoesNotFit, match=r"asks for 2 hosts .*processes_per_host"):
        executor(tmp_path).render(
            AttemptDirectory(Path("/w/1")), "run train 1", JobResources(num_hosts=2)
        )


def test_a_job_on_kubernetes_is_indexed_and_its_pods_have_names(tmp_path):
    resources = JobResources(2, 2, 8, 15, 64.0, 90)

    service, job = objects(Path("/w/1"), resources, grace_seconds=30)

    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == name
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "research"
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimit"], pod["spec"]["restartPolicy"]) == (0, "Never")
    assert spec["activeDeadlineSeconds"] > 90 * 60
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry.example/redco-flow:1"
    assert container["resources"] == {
        "requests": {"cpu": "7500m", "memory": "32768Mi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "32768Mi", "nvidia.com/gpu": "4"},
    }
    (volume,), (mount,) = pod["spec"]["volumes"], container["volumeMounts"]
    assert volume["persistentVolumeClaim"] == {"claimName": "workspace"}
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/w")
    variables = variables_of(pod["spec"], 3)
    assert variables["A"] == "b: c"
    assert variables["REDCO_FLOW_RANK"] == variables["JOB_COMPLETION_INDEX"] == "3"
    assert variables["JAX_COORDINATOR_ADDRESS"] == f"{name}-0.{name}:8476"
    secrets = [one for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})]
    assert secrets == [
        {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}},
        }
    ]


def test_names_of_jobs_are_allowed_readable_and_distinct():
    titles = [
        "Tiny_Run.1-abcd train 1",
        "Tiny_Run.1-abcd train 2",
        "a" * 64 + " " + "b" * 64 + " 1",
    ]

    names = [
        objects(Path("/w/1"), JobResources(), title=title)[1]["metadata"]["name"]
        for title in titles
    ]

    assert len(set(names)) == 3
    assert names[0].startswith("redco-tiny-run-1-abcd-train-1-")
    for name in names:
        assert len(name) <= 52
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_gpus_that_pods_cannot_share_are_refused():
    with pytest.raises(DoesNotFit, match="3 processes per host cannot share 4 GPUs"):
        objects(Path("/w/1"), JobResources(1, 3, 4))


@pytest.mark.slow
def test_the_pods_commands_run_a_stage_together(workspace, tmp_path):
    """Two processes of this machine, started as a cluster would start the pods."""
    resources = JobResources(num_hosts=2)
    attempt = make_attempt(
        workspace, "note_process", resources=resources, config={"folder": str(tmp_path)}
    )
    _, job = objects(attempt.path, resources, workspace=workspace)
    pod = job["spec"]["template"]["spec"]
    _, *arguments = pod["containers"][0]["command"]

    search = os.pathsep.join([*sys.path, str(Path.cwd())])
    pods = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | variables_of(pod, index) | {"PYTHONPATH": search},
        )
        for index in range(2)
    ]

    assert [process.wait(120) for process in pods] == [0, 0]
    assert attempt.read_result()["outputs"].keys() == {"dataset"}
    noted = sorted(path.read_text().split(",")[0] for path in tmp_path.glob("*.noted"))
    assert noted == ["0 of 2", "1 of 2"]


VERTEX = {
    "backend": "vertex",
    "vertex": {
        "project": "research-1",
        "region": "europe-west4",
        "image": "europe-docker.pkg.dev/research-1/r/redco-flow:1",
        "machine_type": "a2-highgpu-8g",
        "accelerator_type": "NVIDIA_TESLA_A100",
        "nfs_server": "10.0.0.2",
        "nfs_path": "/share",
        "network": "projects/1/global/networks/default",
        "stored_variables": [
            {"variable": "HF_TOKEN", "secret": "projects/research-1/secrets/hf/versions/latest"}
        ],
    },
}


def custom_job(resources, *, section=VERTEX, attempt="/w/1", workspace="/w"):
    """The request's first line and its body."""
    text = executor(workspace, section, {"A": "b: c"}, stall_seconds=60, grace_seconds=5).render(
        AttemptDirectory(Path(attempt)), "tiny-abcd train 1", resources
    )
    address, _, body = text.partition("\n")
    return address, json.loads(body)


def test_a_custom_job_on_vertex_has_a_replica_for_each_host_and_rank_0_a_pool_of_its_own():
    address, body = custom_job(JobResources(num_hosts=3, gpus_per_host=8, walltime_minutes=90))

    assert address == (
        "POST https://europe-west4-aiplatform.googleapis.com/v1/projects/research-1/"
        "locations/europe-west4/customJobs"
    )
    first, others = body["jobSpec"]["workerPoolSpecs"]
    assert (first["replicaCount"], others["replicaCount"]) == ("1", "2")
    assert {**first, "replicaCount": "2"} == others
    assert first["machineSpec"] == {
        "machineType": "a2-highgpu-8g",
        "acceleratorType": "NVIDIA_TESLA_A100",
        "acceleratorCount": 8,
    }
    assert first["nfsMounts"] == [{"server": "10.0.0.2", "path": "/share", "mountPoint": "/w"}]
    container = first["containerSpec"]
    assert container["command"] == [
        *("python", "-P", "-m", "redco_flow.launch.xmanager.vertex_task", "/w/1"),
        *("--stall-seconds", "60", "--grace-seconds", "5", "--walltime-seconds", "5400"),
    ]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables["A"] == "b: c"
    assert variables["REDCO_FLOW_NUM_PROCESSES"] == "3"
    assert "REDCO_FLOW_RANK" not in variables
    assert json.loads(variables["REDCO_FLOW_STORED_VARIABLES"]) == {
        "HF_TOKEN": "projects/research-1/secrets/hf/versions/latest"
    }
    scheduling = body["jobSpec"]["scheduling"]
    assert scheduling == {
        "disableRetries": True,
        "restartJobOnWorkerRestart": False,
        "timeout": "5465s",
    }


def test_a_stage_of_one_host_without_gpus_is_one_pool_without_accelerators():
    _, body = custom_job(JobResources())

    (pool,) = body["jobSpec"]["workerPoolSpecs"]
    assert pool["machineSpec"] == {"machineType": "a2-highgpu-8g"}
    assert "timeout" not in body["jobSpec"]["scheduling"]


@pytest.mark.parametrize(
    ("resources", "accelerator", "why"),
    [
        (JobResources(processes_per_host=2), "NVIDIA_L4", r"processes_per_host is 2; set it to 1"),
        (JobResources(gpus_per_host=3), "NVIDIA_L4", r"3 GPUs; let resources.gpus_per_host be"),
        (JobResources(gpus_per_host=8), None, r"say which in xmanager.vertex.accelerator_type"),
    ],
)
def test_hosts_that_vertex_does_not_have_are_refused(resources, accelerator, why):
    section = {**VERTEX, "vertex": VERTEX["vertex"] | {"accelerator_type": accelerator}}

    with pytest.raises(DoesNotFit, match=why):
        custom_job(resources, section=section)


def cluster_spec(pool, index):
    """What Vertex says to a replica of a job of three."""
    pools = {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]}
    return {"cluster": pools, "environment": "cloud", "task": {"type": pool, "index": index}}


def test_replicas_are_ranked_pool_by_pool():
    places = [("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1)]

    assert [rank_of(cluster_spec(*place)) for place in places] == [0, 1, 2]


@pytest.mark.slow
def test_a_replicas_command_runs_the_stage(workspace):
    """On this machine, started as Vertex would start the only replica."""
    section = {**VERTEX, "vertex": {**VERTEX["vertex"], "stored_variables": []}}
    attempt = make_attempt(workspace, "write")
    _, body = custom_job(JobResources(), section=section, attempt=attempt.path, workspace=workspace)
    (pool,) = body["jobSpec"]["workerPoolSpecs"]
    _, *arguments = pool["containerSpec"]["command"]
    variables = {one["name"]: one["value"] for one in pool["containerSpec"]["env"]}
    own = {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path.cwd())]),
        "CLUSTER_SPEC": json.dumps(cluster_spec("workerpool0", 0)),
    }

    done = subprocess.run([sys.executable, *arguments], env=os.environ | variables | own)

    assert done.returncode == 0
    assert attempt.read_result()["outputs"].keys() == {"dataset"}


def test_containers_on_this_machine_get_a_rank_each_and_variables_by_name():
    section = {
        "backend": "containers",
        "processes_per_host": 2,
        "containers": {"image": "redco-flow:1", "passed_variables": ["HF_TOKEN"]},
    }
    text = executor("/w o", section, {"A": "b c"}, grace_seconds=5).render(
        AttemptDirectory(Path("/w o/1")), "run train 1", JobResources(1, 2, 2, 3, 4.0)
    )

    _, *commands = text.replace("\\\n", "").splitlines()
    first, second = (shlex.split(command) for command in commands)
    assert first[:2] == ["docker", "run"]
    assert first[first.index("--mount") + 1] == "type=bind,source=/w o,target=/w o"
    assert {"--gpus=all", "--cpus=1.5", "--memory=2048m", "--env=A=b c"} <= set(first)
    assert "--env=HF_TOKEN" in first
    assert [one for one in second if "RANK" in one] == [
        "--env=REDCO_FLOW_RANK=1",
        "--env=REDCO_FLOW_LOCAL_RANK=1",
    ]
    image = second.index("redco-flow:1")
    assert second[image + 1 : image + 6] == [
        *("python", "-P", "-m", "redco_flow.launch.xmanager.pod", "/w o/1"),
    ]


def test_what_cannot_be_submitted_is_a_usage_error_that_says_what_to_do():
    with pytest.raises(UsageError, match=r"'kubernetes' is shown and not submitted.*--render"):
        require_xmanager(XManagerSection.from_json(KUBERNETES))
