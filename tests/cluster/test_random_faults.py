"""Random sequences of faults: each run completes or names the cause; nothing runs twice or unowned.

One of the sequences; `random_faults.py` plays any number of them.
"""

import pytest
from random_faults import try_seed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_runs_and_sweeps_come_to_their_ends_through_a_random_sequence_of_faults(
    slurm, shim, tmp_path
):
    """Fault 65: each run completes or names the fault; no stage runs twice, nothing is left."""
    trial, problem = try_seed(365, slurm, tmp_path, shim)

    assert not problem, "\n".join([*trial.events, problem])
