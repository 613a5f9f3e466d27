"""The test cluster itself: one command starts it, and nothing of it is left, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
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
    # Short: the sockets of Slurm's steps lie in it, and their paths have at most 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))
    starter = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory)], stdout=subprocess.PIPE, text=True
    )
    environment = os.environ | {"SLURM_CONF": starter.stdout.readline().split("=")[1].strip()}
    submit = ["sbatch", "--nodes=4", "--output=/dev/null", "--wrap", "srun sleep 600"]
    subprocess.run(submit, env=environment, check=True, stdout=subprocess.PIPE)
    wait_until(
        lambda: "R" in subprocess.check_output(["squeue", "-ho", "%t"], env=environment).decode()
    )
    assert len(processes_with(str(directory))) > 10

    starter.send_signal(number)
    starter.wait()

    wait_until(lambda: processes_with(str(directory)) == [])
