"""What cannot be submitted through XManager is refused before there is a run."""

import sys

import pytest

from pipelines import make_run
from redco_flow.errors import DoesNotFit, UsageError


def test_a_missing_library_is_told_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xmanager", None)  # as if it were not installed

    with pytest.raises(UsageError, match=r"uv pip install 'redco-flow\[xmanager\]'"):
        make_run(tmp_path, executor="xmanager")

    assert list((tmp_path / "workspace/runs").iterdir()) == []


def test_a_stage_of_several_hosts_is_refused(tmp_path):
    with pytest.raises(DoesNotFit, match="asks for 2 hosts"):
        make_run(tmp_path, num_hosts=2, executor="xmanager")

    assert list((tmp_path / "workspace/runs").iterdir()) == []
