"""What `plan --render` shows of a job on hosts: pure text, and no secret's value."""

from pathlib import Path

import pytest

from redco_flow.errors import DoesNotFit
from redco_flow.launch.call import JobResources
from redco_flow.launch.hosts.allocation import eligible_hosts
from redco_flow.launch.hosts.config import Config
from redco_flow.launch.hosts.executor import HostsExecutor
from redco_flow.tracking.attempt import AttemptDirectory

SECTION = Config.from_json(
    {
        "addresses": [
            {"address": "a", "gpus": 4, "fabric": "one"},
            {"address": "b", "gpus": 8, "fabric": "two", "user": "me", "jump_host": "gate"},
            {"address": "c", "gpus": 8, "fabric": "two"},
            {"address": "d"},
        ],
        "python": "~/venv/bin/python",
        "forward_environment": ["HF_TOKEN"],
    }
)


def labels(**resources):
    groups = eligible_hosts(SECTION, JobResources(**resources))
    return [[host.label for host in group] for group in groups]


def test_hosts_of_one_fabric_serve_a_group_and_each_must_have_the_gpus():
    assert labels() == [["a"], ["b", "c"], ["d"]]
    assert labels(gpus_per_host=8) == [["b", "c"]]
    assert labels(num_hosts=2) == [["b", "c"]]
    with pytest.raises(DoesNotFit, match="asks for 2 hosts with 16 GPUs"):
        labels(num_hosts=2, gpus_per_host=16)
    with pytest.raises(DoesNotFit, match=r"largest group \(hosts.addresses, one fabric\) has 2"):
        labels(num_hosts=3)


def test_with_a_link_between_fabrics_a_stage_gets_hosts_of_several_where_it_must():
    link = {"gb_s": 3.1, "latency_us": 20}
    section = Config.from_json({**SECTION.model_dump(mode="json"), "between_fabrics": link})

    few, many = JobResources(num_hosts=2), JobResources(num_hosts=3, gpus_per_host=4)

    assert [len(group) for group in eligible_hosts(section, few)] == [2]
    assert section.fabrics_of(few) is None
    (group,) = eligible_hosts(section, many)
    assert [host.label for host in group] == ["a", "b", "c"]
    assert section.fabrics_of(many) == ([1, 2], section.between_fabrics)
    with pytest.raises(DoesNotFit, match=r"largest group \(hosts.addresses, one fabric\) has 2"):
        eligible_hosts(section, JobResources(num_hosts=5))


def test_the_candidates_and_the_command_are_shown_and_a_forwarded_value_is_not(tmp_path):
    executor = HostsExecutor(
        tmp_path, SECTION, variables={"A": "b c"}, environment={"HF_TOKEN": "hf_value"}
    )
    attempt = AttemptDirectory(Path("/somewhere"))

    text = executor.render(attempt, "run stage 1", JobResources(num_hosts=2, gpus_per_host=4))

    assert text == (
        "# redco-flow: run stage 1\n"
        "2 of these hosts, 1 processes each:\n"
        "  me@b through gate, 8 GPUs, in ~/.redco-flow\n"
        "  c, 8 GPUs, in ~/.redco-flow\n"
        "~/venv/bin/python -P -m redco_flow.launch.hosts.ranks ATTEMPT\n"
        '  A="b c"\n'
        "  HF_TOKEN from this machine's environment\n"
    )
