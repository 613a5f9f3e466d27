"""The `hosts:` section: every mistake at once with its place, and no text for a shell."""

import pytest
from pydantic import ValidationError

from redco_flow.errors import ConfigError
from redco_flow.launch.hosts.config import Config, Host
from redco_flow.spec.load import load_profile


def test_an_address_is_all_that_a_host_needs():
    host = Host(address="gpu-1")

    assert (host.label, host.gpus, host.directory) == ("gpu-1", 0, "~/.redco-flow")
    assert Host(address="gpu-1", port=2222).label == "gpu-1:2222"


def test_mistakes_in_hosts_are_told_at_once_with_their_places(write):
    path = write(
        """\
        executor: hosts
        hosts:
          addresses:
            - address: gpu-1
              gpu: 8
            - {address: gpu-2, port: 70000, directory: relative}
            - {address: "-oProxyCommand=x"}
          python: python3
          lost_after_minutes: 0
        """,
        "p.yaml",
    )

    with pytest.raises(ConfigError) as caught:
        load_profile(path)

    found = sorted(str(problem).replace(str(path), "p.yaml") for problem in caught.value.problems)
    expected = [
        "p.yaml:5:7: 'hosts.addresses[0]' has no key 'gpu'; did you mean 'gpus'? Known keys: "
        "address, directory, fabric, gpus, jump_host, key, port, user.",
        "p.yaml:6:24: 'hosts.addresses[1].port' must be at most 65535, not 70000",
        "p.yaml:6:37: 'hosts.addresses[1].directory' must begin with / or ~/",
        "p.yaml:7:8: 'hosts.addresses[2].address' must be",
        "p.yaml:8:3: 'hosts.python' must begin with / or ~/",
        "p.yaml:9:3: 'hosts.lost_after_minutes' must be greater than 0.0, not 0",
    ]
    assert len(found) == len(expected), found
    assert all(one.startswith(two) for one, two in zip(found, expected, strict=True)), found


def test_hosts_without_a_machine_and_a_machine_named_twice_are_refused(write):
    with pytest.raises(ConfigError, match=r"executor 'hosts' needs hosts\.addresses"):
        load_profile(write("executor: hosts\n", "none.yaml"))
    twice = "executor: hosts\nhosts: {addresses: [{address: a}, {address: a}]}\n"
    with pytest.raises(ConfigError, match="has a more than once"):
        load_profile(write(twice, "twice.yaml"))


@pytest.mark.parametrize(
    "values",
    [
        {"address": "a; touch X"},
        {"address": "a", "user": "-l root"},
        {"address": "a", "jump_host": "$(touch X)"},
        {"address": "a", "directory": "/tmp/../etc"},
        {"address": "a", "directory": "/tmp/a\nb"},
        {"address": "a", "key": "a\x00b"},
    ],
)
def test_what_could_be_more_than_a_name_or_a_path_is_refused(values):
    """Faults 29 and 30: the path is refused; they are passed on as text and never interpreted;
    control characters are refused.
    """
    with pytest.raises(ValidationError):
        Host.from_json(values)


def test_the_section_survives_its_own_json():
    section = Config.from_json({"addresses": [{"address": "a", "jump_host": "me@b:22"}]})

    assert Config.from_json(section.model_dump(mode="json")) == section
