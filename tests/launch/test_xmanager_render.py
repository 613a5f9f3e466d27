"""What `plan --render` shows for XManager, without the library."""

import subprocess
import sys
from pathlib import Path

import pytest

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.launch.xmanager.config import Config
from redco_flow.launch.xmanager.executor import XManagerExecutor
from redco_flow.tracking.attempt import AttemptDirectory


def executor(workspace, section=None, variables=None, **settings):
    section = Config.from_json(section or {})
    return XManagerExecutor(workspace, section, variables=variables or {}, **settings)


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
        "from redco_flow.launch.xmanager.config import Config\n"
        "from redco_flow.tracking.attempt import AttemptDirectory\n"
        "executor = XManagerExecutor(sys.argv[1], Config(), variables={})\n"
        "print(executor.render(AttemptDirectory(Path('/w/1')), 'run train 1', JobResources()))\n"
        "assert not {'xmanager', 'kubernetes', 'absl'} & set(sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "job rank0" in done.stdout


def test_a_stage_of_several_hosts_does_not_fit_this_machine():
    with pytest.raises(DoesNotFit, match=r"asks for 2 hosts .*processes_per_host"):
        Config().check_fits(JobResources(num_hosts=2))
