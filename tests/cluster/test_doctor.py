"""`doctor` on the test cluster: in seconds, without leaving a job."""

import pytest

from redco_flow.orchestrate.doctor_slurm import examine_slurm
from redco_flow.spec.profile import Profile

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def examine(workspace, **settings):
    profile = Profile(executor="slurm", workspace=str(workspace), slurm=settings)
    return {finding.check: finding for finding in examine_slurm(profile)}


def test_a_good_cluster_has_nothing_to_mend_and_keeps_nothing(slurm, workspace):
    findings = examine(workspace)

    assert [name for name, finding in findings.items() if not finding.is_good] == []
    assert findings["nodes"].detail == "127.0.0.11, 127.0.0.12"
    assert "ports between nodes" in findings
    assert slurm.jobs() == {}
    assert list(workspace.glob(".doctor*")) == []


def test_an_unknown_partition_is_named_with_the_known_ones(slurm, workspace):
    finding = examine(workspace, partition="a100")["partition"]

    assert (finding.is_good, finding.remedy) == (False, "slurm.partition: one of high, main")


def test_nodes_without_the_interpreter_are_told_in_sruns_words(slurm, workspace):
    finding = examine(workspace, python="/nowhere/python")["nodes"]

    assert not finding.is_good
    assert "/nowhere/python" in finding.detail
