"""The test cluster itself: one command starts it, and nothing of it is left, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_stages.calls import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "slurm_cluster.py"


def processes_with(text):
    """Every process of this machine that has `text` in its command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in words and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@pytest.mark.usefixtures("cluster")  # two clusters live side by side
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_ends_with_the_process_that_started_it_and_takes_its_jobs_along(number):
    # In a folder that it makes: paths of Slurm's sockets have at most 107 characters.
    starter = subprocess.Popen([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, text=True)
    configuration = Path(starter.stdout.readline().split("=")[1].strip())
    directory, environment = configuration.parent, os.environ | {"SLURM_CONF": str(configuration)}
    submit = ["sbatch", "--nodes=4", "--output=/dev/null", "--wrap", "srun sleep 600"]
    subprocess.run(submit, env=environment, check=True, stdout=subprocess.PIPE)
    wait_until(
        lambda: "R" in subprocess.check_output(["squeue", "-ho", "%t"], env=environment).decode()
    )
    assert len(processes_with(str(directory))) > 10

    starter.send_signal(number)
    starter.wait()

    wait_until(lambda: processes_with(str(directory)) == [])
    shutil.rmtree(directory, ignore_errors=True)  # a killed one leaves it
