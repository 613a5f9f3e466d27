"""What is refused before there is a run."""

import pytest
from orchestrate_runs import TWO_STAGES

from redco_flow.errors import UsageError


def test_several_hosts_for_a_kind_of_one_process_are_refused_before_there_is_a_run(planning):
    with pytest.raises(UsageError, match="runs in one process") as refused:
        planning.write(TWO_STAGES, ["train.resources.num_hosts=2"])

    assert "set it to 1" in str(refused.value)
    assert not list(planning.workspace.runs.glob("*"))
