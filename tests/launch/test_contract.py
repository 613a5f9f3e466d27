"""The contract of executors, held by local jobs and by an executor of a user's own."""

import os
import sys
from pathlib import Path

import pytest
from tiny_stages.contract import ExecutorContract

from redco_flow.launch.executor import make_executor
from redco_flow.spec.profile import profile_model

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


class TestLocal(ExecutorContract):
    """Jobs of this machine."""


class TestOwn(ExecutorContract):
    """The executor that the documentation shows: one module outside the package."""

    @pytest.fixture(autouse=True)
    def examples(self, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])  # jobs search there too

    @pytest.fixture
    def new_executor(self, workspace):
        def new_executor(*, environment=None, stall_seconds=600, grace_seconds=5):
            model = profile_model("own.executor")
            profile = model(
                executor="own.executor",
                workspace=str(workspace),
                environment=environment or {},
                stall_timeout_minutes=stall_seconds / 60,
                grace_seconds=float(grace_seconds),
                settings={"niceness": 3},
            )
            return make_executor(profile, os.environ)

        return new_executor
