"""The local executor, with one thread for each job's numerical libraries."""

from redco_flow.launch import local

reattach = local.reattach  # (record) -> the job of that record, from any process


def make(profile, environment):
    """Return the executor for a profile; `environment` is what its jobs inherit."""
    return local.make(profile, {**environment, "OMP_NUM_THREADS": "1"})
