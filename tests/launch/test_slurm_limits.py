"""Limits of a Slurm site, from what its commands printed (22.05.8 with slurmdbd)."""

from __future__ import annotations

import json
import os

import pytest

from redco_flow.launch.call import JobResources
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.limits import (
    JobRequest,
    ask_site,
    parse_minutes,
    parse_site,
    parse_tres,
)

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
    return JobRequest(resources, **names)


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

    assert parse_site(ANSWERS).problems(JobRequest(resources, account="lab"))
    assert parse_site(ANSWERS).problems(JobRequest(resources)) == []  # account root may
    no_limits = CONFIG.replace("associations,limits,qos", "associations")
    assert parse_site(ANSWERS | {"config": no_limits}).problems(asked(account="lab")) == []


def test_arrays_are_cut_by_max_array_size_and_by_the_limit_of_submitted_jobs():
    site = parse_site(ANSWERS)
    request = JobRequest(JobResources(shards=tuple(range(30))), account="root")

    assert site.array_size(request) == 11
    assert "30 shards are submitted as 3 job arrays" in site.array_note(request)
    tiny = JobRequest(request.resources, account="lab")
    assert site.max_submitted(tiny) == (5, "MaxSubmitJobsPerUser of QOS tiny")
    assert site.array_size(tiny) == 2
    assert parse_site({}).array_size(tiny) is None


def test_the_qos_of_an_association_without_a_default_is_not_guessed():
    """The controller takes the only QOS of the association, or that of root: `man slurm.conf`."""
    qos = QOS.replace("normal|||||||||||", "normal||00:30:00|||||||||")
    no_default = ANSWERS | {"assoc": "lab|||||||||\n", "qos": qos}

    assert parse_site(no_default).problems(asked()) == []
    assert parse_site(no_default).problems(asked(qos="normal"))


def test_the_least_of_a_qos_counts_for_cpus_only_where_a_stage_requests_them():
    site, chosen = parse_site(ANSWERS), {"account": "lab", "qos": "tiny"}

    (problem,) = site.problems(JobRequest(JobResources(cpus_per_host=1), **chosen))
    assert "cpu=1 is below the least of 2 (MinTRES of QOS tiny)" in problem[1]
    assert site.problems(JobRequest(JobResources(), **chosen)) == []


def fake_commands(folder, **answers):
    """Commands of a site in a folder that print these answers, and fail without one."""
    folder.mkdir(exist_ok=True)
    for name in ("scontrol", "sacctmgr"):
        script = folder / name
        script.write_text(
            f'#!/bin/bash\necho "$*" >> {folder}/calls\n'
            "for word in config partition assoc qos; do\n"
            f'case " $* " in *" $word "*) exec cat {folder}/$word;; esac; done\n'
        )
        script.chmod(0o755)
    for key, text in answers.items():
        (folder / key).write_text(text)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "REDCO_FLOW_HOME": str(folder / "home")}


def test_answers_are_kept_for_minutes_and_those_that_lack_something_for_half_a_minute(tmp_path):
    """By a file, and not again as new by a process that lives longer than it."""
    environ = fake_commands(tmp_path / "site", **ANSWERS)
    calls, told = tmp_path / "site/calls", ask_site(environ)
    (kept,) = (tmp_path / "site/home").iterdir()

    assert (told.max_array_size, told.unknown) == (11, [])
    assert ask_site(environ) == told
    assert len(calls.read_text().splitlines()) == 4
    record = json.loads(kept.read_text())
    fake_commands(tmp_path / "site", config=CONFIG.replace("= 11", "= 99"))
    (tmp_path / "site/qos").unlink()
    ask_site(environ, fresh=True)
    changed = json.loads(kept.read_text())
    assert "= 99" in changed["answers"]["config"]
    assert len(changed["unknown"]) == 1
    for seconds, size in ((20, 11), (40, 99)):
        unknown = {"unknown": ["an outage"], "time": record["time"] - seconds}
        kept.write_text(json.dumps(record | unknown))
        assert ask_site(environ, fresh=False).max_array_size == size


@pytest.mark.parametrize(
    "config", ["AccountingStorageEnforce = limits", "MaxArraySize = ²", "no settings", ""]
)
def test_unexpected_answers_are_unknown(tmp_path, config):
    site = ask_site(fake_commands(tmp_path, **(ANSWERS | {"config": config})))

    assert site.max_array_size is None
    assert site.problems(asked()) == []


def test_options_of_the_profile_replace_what_is_compared(tmp_path):
    environ = fake_commands(tmp_path, **ANSWERS)
    request = asked().resources

    def refused(*options, **settings):
        config = Config(options=list(options), **settings)
        return [path[-1] for path, _ in config.compare_with_site(request, environ)[0]]

    chosen = {"partition": "short", "account": "lab"}
    sizes = ["num_hosts", "memory_gib", "cpus_per_host", "gpus_per_host", "num_hosts"]
    assert refused(**chosen) == ["walltime_minutes", *sizes]
    assert refused("--part=short", "--accou lab") == refused(**chosen)
    assert refused("-p short", "-A lab", "-t 60") == sizes
    assert refused("--time=60", "--exclusive", **chosen) == []
    assert refused("--mem=1G --gres=gpu:1", "--time=1:00:00", **chosen) == ["num_hosts"] * 2
    assert refused("--cpus-per-t=1", "-t '5'", **chosen) == [sizes[0], *sizes[-2:]]


def test_nothing_is_refused_where_a_plugin_may_change_the_request(tmp_path):
    answers = ANSWERS | {"config": f"{CONFIG}JobSubmitPlugins        = lua\n"}
    config = Config(partition="short", account="lab")
    environ = fake_commands(tmp_path, **answers)

    problems, notes = config.compare_with_site(asked().resources, environ)

    assert problems == []
    assert len(notes) == 6
    assert "resources.walltime_minutes: 180 min are above the limit of 120 min" in notes[0]
    assert "(unless the site's lua changes the request)" in notes[0]
