"""What a job on a host prints, however much of it and whatever it is."""

import pytest
from job_processes import phase_of
from tiny_stages.calls import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_fifty_megabytes_that_are_no_text_and_no_line_arrive_and_hang_nothing(submit, hosts):
    """Fault 37: no reader hangs, memory stays small, and what is shown is capped."""
    folder = hosts.shared / "fifty-megabytes"
    folder.mkdir()
    job = submit("print_fifty_megabytes", config={"folder": str(folder)})
    wait_until(lambda: phase_of(job.attempt) == "waiting")

    (folder / "go").touch()
    assert job.wait_seconds(400), job.status()

    assert job.state == "COMPLETED", job.status()
    assert job.paths.stdout.stat().st_size > 50 << 20
    assert len(job.stdout()) < 2 << 20
    assert "bytes before this are left out" in job.stdout()
