"""`doctor` on the test cluster: by a job like any other, without leaving one."""

import pytest
from tiny_stages.calls import wait_until

from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.executor import SlurmExecutor
from redco_flow.tracking.lock_mechanism import LINKS, mechanism_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def examine(workspace, *, gpus_per_host=0, variables=None, disk=None, **settings):
    config = Config(**settings)
    executor = SlurmExecutor(workspace, config, variables=variables, node_directory=disk)
    return {finding.check: finding for finding in executor.examine(gpus_per_host)}


def test_a_good_cluster_has_nothing_to_mend_and_keeps_nothing(
    slurm, workspace, strict_site, tmp_path
):
    """Fault 57: the probe runs as a job's ranks do, with the variables that a job has."""
    variables = strict_site["environment"] | {"SCRATCH": str(tmp_path)}
    (tmp_path / "loaded").mkdir()
    disk = "$SCRATCH/$SITE_MODULES"
    findings = examine(workspace, variables=variables, disk=disk, **strict_site["slurm"])

    assert [name for name, finding in findings.items() if not finding.is_good] == []
    assert findings["nodes"].detail == "127.0.0.11, 127.0.0.12"
    assert findings["shared workspace"].detail == "written and read on every node"
    assert "a new file after 0." in findings["files of other nodes"].detail
    assert findings["locks"].detail == "a flock that one node holds is refused on the others"
    assert findings["ports between nodes"].detail == "any free one can be reached"
    assert "host names" in findings
    assert f"127.0.0.12: {tmp_path}/loaded, " in findings["disks of the nodes"].detail
    assert findings["signals"].detail == "URG and TERM reach a job's ranks"
    wait_until(lambda: slurm.jobs() == {})  # its end is being noted by the nodes
    assert list(workspace.glob(".doctor*")) == []


def test_a_flock_that_ends_at_the_node_is_found_and_the_workspace_uses_links(
    slurm, workspace, shim, tmp_path, monkeypatch
):
    """Fault 56: the nodes lock a file that this process holds, and one that the first node does."""
    monkeypatch.setenv("LD_PRELOAD", shim("node_locks"))  # of what srun starts
    monkeypatch.setenv("FLOCK", "local")
    monkeypatch.setenv("FLOCK_FOLDER", str(tmp_path))

    finding = examine(workspace)["locks"]

    assert finding.is_good
    assert "127.0.0.12 gets a flock that another node holds" in finding.detail
    assert mechanism_of(workspace / "sequence") == LINKS


def test_an_unknown_partition_is_named_with_the_known_ones(slurm, workspace):
    finding = examine(workspace, partition="a100")["partition"]

    assert (finding.is_good, finding.remedy) == (False, "slurm.partition: one of high, main")


def test_a_job_that_only_waits_is_cancelled_with_slurms_reason(slurm, workspace):
    with slurm.starts_nothing():
        finding = examine(workspace, doctor_wait_seconds=3)["nodes"]

    assert not finding.is_good
    assert "waited 3 s in the queue (PartitionDown); it is cancelled" in finding.detail
    wait_until(lambda: slurm.jobs() == {})


def test_nodes_without_the_interpreter_are_told_in_sruns_words(slurm, workspace):
    finding = examine(workspace, python="/nowhere/python")["nodes"]

    assert not finding.is_good
    assert "/nowhere/python" in finding.detail


def test_what_slurm_would_refuse_is_told_in_its_words_before_any_node_is_asked_for(
    slurm, workspace
):
    findings = examine(workspace, constraint="a100")

    assert not findings["account"].is_good
    assert "Invalid feature specification" in findings["account"].detail
    assert "slurm.constraint" in findings["account"].remedy
    assert "nodes" not in findings


def test_more_gpus_than_any_node_has_are_told_with_what_there_is(slurm, workspace):
    finding = examine(workspace, gpus_per_host=8)["gpus"]

    assert (finding.is_good, finding.detail) == (False, "0 of 4 nodes have 8, the most is 2")


def test_gpus_and_disks_that_a_job_does_not_have_are_told(slurm, workspace):
    findings = examine(workspace, gpus_per_host=2, disk="$SLURM_TMPDIR")

    assert findings["gpus"].is_good
    finding = findings["gpus on the nodes"]
    assert not finding.is_good
    assert "127.0.0.11 shows a job 0 of the 2 it asked for" in finding.detail
    finding = findings["disks of the nodes"]
    assert not finding.is_good
    assert "$SLURM_TMPDIR is not set on " in finding.detail


def test_a_wrapper_that_keeps_a_signal_back_is_found_out(slurm, workspace):
    finding = examine(workspace, container=["env", "--block-signal=URG"])["signals"]

    assert not finding.is_good
    assert finding.detail == "127.0.0.11 did not hear URG; 127.0.0.12 did not hear URG"


def test_a_workspace_that_the_nodes_do_not_have_is_told(slurm, workspace):
    apart = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']

    finding = examine(workspace, container=[*apart, str(workspace.parent)])["shared workspace"]

    assert not finding.is_good
    assert "not seen, or not writable, on 127.0.0.11" in finding.detail
