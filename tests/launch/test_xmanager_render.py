"""What `plan --render` shows for XManager, without the library; a pod's command really runs."""

import os
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


def test_what_cannot_be_submitted_is_a_usage_error_that_says_what_to_do():
    with pytest.raises(UsageError, match=r"'kubernetes' is shown and not submitted.*--render"):
        require_xmanager(XManagerSection.from_json(KUBERNETES))
