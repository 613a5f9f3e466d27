"""`doctor` on real hosts: in seconds, and nothing is started there."""

import pytest

from redco_flow.launch.hosts.config import Config
from redco_flow.launch.hosts.executor import HostsExecutor

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def examine(hosts, workspace, **settings):
    config = Config.from_json(hosts.profile(**settings))
    executor = HostsExecutor(
        workspace, config, variables={"DISK": "/var"}, node_directory="$DISK/tmp"
    )
    return {finding.check: finding for finding in executor.examine(0)}


def test_good_hosts_have_nothing_to_mend(hosts, workspace):
    findings = examine(hosts, workspace)

    assert [str(one) for one in findings.values() if not one.is_good] == []
    assert set(findings) >= {host.address for host in hosts.hosts} | {
        *("packages on the hosts", "gpus", "disks", "disks of the nodes", "clock", "host names"),
        *("ports between hosts", "workspace on the hosts", "in use"),
    }
    assert findings["ports between hosts"].detail == "reachable"
    assert findings["in use"].detail == "all hosts are free"
    assert all(f"GiB in {host.directory}" in findings["disks"].detail for host in hosts.hosts)


def test_what_the_hosts_lack_is_told_each_with_its_remedy(hosts, workspace):
    addresses = [one | {"gpus": 2} for one in hosts.profile()["addresses"]]

    findings = examine(hosts, workspace, addresses=addresses, shared_workspace=True)

    wrong = {name: one for name, one in findings.items() if not one.is_good}
    assert set(wrong) == {"gpus", "shared workspace"}
    assert "has 0, the profile says 2" in wrong["gpus"].detail
    assert "nvidia-smi" in wrong["gpus"].remedy
    assert "under the same path" in wrong["shared workspace"].remedy


def test_a_host_that_cannot_be_used_is_told_in_words_and_the_others_are_looked_at(hosts, workspace):
    first, second = hosts.profile()["addresses"]
    closed = first | {"port": 9}
    unwritable = second | {"directory": "/proc/redco-flow"}

    findings = examine(hosts, workspace, addresses=[closed, unwritable, second | {"port": 22}])

    assert "cannot be reached" in findings[f"{first['address']}:9"].detail
    assert "/proc/redco-flow" in findings[second["address"]].detail
    assert findings[f"{second['address']}:22"].is_good


def test_a_cut_cable_between_hosts_is_found_by_knocking(hosts, workspace):
    """Both answer the launcher, and not each other."""
    first, second = hosts.hosts
    hosts.separate(first, second)
    try:
        findings = examine(hosts, workspace)
    finally:
        hosts.join(first, second)

    assert not findings["ports between hosts"].is_good
    assert f"from {first.address}: {second.address}:" in findings["ports between hosts"].detail
