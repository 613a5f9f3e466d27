"""Limits of a Slurm site, from what its commands printed (22.05.8 with slurmdbd)."""

from __future__ import annotations

import pytest

from redco_flow.launch.call import JobResources
from redco_flow.launch.slurm.limits import Request, parse_minutes, parse_site, parse_tres

CONFIG = """\
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = redco8022
MaxArraySize            = 11
MinJobAge               = 300 sec
"""
PARTITIONS = """\
PartitionName=main AllowQos=ALL Default=YES QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0
PartitionName=short AllowQos=ALL Default=NO QoS=N/A MaxNodes=2 MaxTime=00:05:00 MinNodes=0
"""
ASSOCIATIONS = """\
lab||tiny|1-00:00:00|100||||node=3
root||normal|1-00:00:00|100||||node=3
"""
QOS = """\
normal|||||||||||
tiny|DenyOnLimit,PartitionTimeLimit|02:00:00|5|||mem=2G||cpu=8,gres/gpu=1|||cpu=2
"""
ANSWERS = {"config": CONFIG, "partition": PARTITIONS, "assoc": ASSOCIATIONS, "qos": QOS}


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("UNLIMITED", None), ("", None), ("2-00:00:00", 2880), ("00:05:00", 5), ("1-12", 2160),
     ("90", 90), ("90:30", 90.5)],
)  # fmt: skip
def test_times_of_slurm_are_minutes(text, minutes):
    """The formats of `man sbatch`, --time."""
    assert parse_minutes(text) == minutes


def test_tres_lists_are_numbers_with_memory_in_mib():
    assert parse_tres("cpu=100,mem=16G,gres/gpu:a100=8") == {
        "cpu": 100, "mem": 16384, "gres/gpu:a100": 8
    }  # fmt: skip
    assert parse_tres("") == {}


def asked(**names):
    """A job of 4 nodes and 3 hours, with 1 GiB, 4 CPUs and 1 GPU a node."""
    resources = JobResources(
        4, walltime_minutes=180, memory_gib=1, cpus_per_host=4, gpus_per_host=1
    )
    return Request(resources, **names)


def test_every_limit_that_a_job_can_never_meet_is_named_with_its_setting():
    problems = parse_site(ANSWERS).problems(asked(partition="short", account="lab"))

    assert [path[-1] for path, _ in problems] == [
        "walltime_minutes", "num_hosts", "memory_gib", "cpus_per_host", "gpus_per_host", "num_hosts"
    ]  # fmt: skip
    said = dict(problems)
    # PartitionTimeLimit of the QOS lifts the partition's 5 min, its own limit counts first.
    assert "180 min are above the limit of 120 min (MaxWall of QOS tiny)" in problems[0][1]
    assert "node=4, above the limit of 2 (MaxNodes of partition short)" in problems[1][1]
    assert "mem=4096 MiB, above the limit of 2048 MiB" in said["resources", "memory_gib"]
    assert "cpu=16, above the limit of 8 (MaxTRESPerUser" in said["resources", "cpus_per_host"]


def test_a_job_needs_one_association_that_takes_it_and_limits_count_only_where_enforced():
    resources = JobResources(3, walltime_minutes=1000)

    assert parse_site(ANSWERS).problems(Request(resources, account="lab"))
    assert parse_site(ANSWERS).problems(Request(resources)) == []  # account root may
    no_limits = CONFIG.replace("associations,limits,qos", "associations")
    assert parse_site(ANSWERS | {"config": no_limits}).problems(asked(account="lab")) == []


def test_arrays_are_cut_by_max_array_size_and_by_the_limit_of_submitted_jobs():
    site = parse_site(ANSWERS)
    request = Request(JobResources(shards=tuple(range(30))), account="root")

    assert site.array_size(request) == 11
    assert "30 shards are submitted as 3 job arrays" in site.array_note(request)
    tiny = Request(request.resources, account="lab")
    assert site.max_submitted(tiny) == (5, "MaxSubmitJobsPerUser of QOS tiny")
    assert site.array_size(tiny) == 2
    assert parse_site({}).array_size(tiny) is None
