"""A disk that fills up under a training on the test cluster."""

import pytest
from job_processes import held
from small_disk import committed_steps, fill, small_disk, trained_steps
from tiny_stages.calls import wait_until

from pipelines import Driven, make_run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_cache"),
]


@pytest.fixture
def full_soon(slurm, tmp_path):
    """A workspace on a small disk, and the profile's keys for the node that sees it."""
    node = slurm.nodes[0]
    slurm.kill_node(node)  # what is mounted later, it does not see
    with small_disk(tmp_path / "small") as workspace:
        slurm.start_node(node)
        slurm.wait_until_idle()
        options = [f"--nodelist={node}"]
        yield workspace, {"walltime_minutes": 10, "options": options}
        slurm.kill_node(node)
    slurm.start_node(node)


def test_a_job_whose_disk_fills_up_says_which_and_goes_on_once_there_is_room(full_soon, tmp_path):
    """Fault 20: checkpoint, metrics, log and records of a Slurm job at once."""
    workspace, settings = full_soon
    run = make_run(
        tmp_path, workspace=workspace.name, num_epochs=2, executor="slurm", slurm=settings
    )
    ballast = workspace / "another-users"

    driven = Driven(run)
    wait_until(lambda: committed_steps(workspace))
    with held(run.attempt("train", 1)):
        fill(ballast)
    outcome = driven.end()
    message = run.attempt("train", 1).read_exit().message
    intact = committed_steps(workspace)
    ballast.unlink()
    resumed = Driven(run)

    assert resumed.end().state == "completed", "\n".join(resumed.said)
    assert outcome.state == "failed"
    assert str(workspace) in message
    assert "No space left on device" in message
    assert "Free space" in message
    assert intact
    assert trained_steps(run.attempt("train", 2))[0] == max(intact) + 1
