"""The `xmanager:` section of a profile."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_profile


def test_mistakes_are_told_at_once_with_their_places(write):
    path = write(
        """\
        executor: xmanager
        xmanager:
          backend: slurm
          processes_per_host: 0
        """,
        "p.yaml",
    )

    with pytest.raises(ConfigError) as caught:
        load_profile(path)

    places = sorted((one.line, one.message.split(" ")[0]) for one in caught.value.problems)
    assert places == [
        (3, "'xmanager.backend'"),
        (4, "'xmanager.processes_per_host'"),
    ]


def test_the_profile_that_is_shipped_loads():
    profile = load_profile("xmanager")

    assert (profile.executor, profile.xmanager.backend) == ("xmanager", "local")
    assert profile.section is profile.xmanager
