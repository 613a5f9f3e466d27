"""The text of a submission: what stands in it, quoted how, and what never does."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from redco_flow.errors import DoesNotFit, UsageError
from redco_flow.launch.call import JobResources
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.slurm.config import Config
from redco_flow.launch.slurm.executor import SlurmExecutor
from redco_flow.launch.slurm.nodes import expand_nodes, nodes_of_no_fabric
from redco_flow.launch.slurm.script import Submission, render, render_launcher
from redco_flow.tracking.attempt import AttemptDirectory

SETTINGS = {
    "partition": "a100",
    "account": "nlp",
    "modules": ["cuda/13.0"],
    "setup": ["source /opt/env.sh"],
    "python": "/opt/venv/bin/python",
    "options": ["--exclusive"],
    "srun_options": ["--cpu-bind=cores", "--exclusive"],
    "processes_per_host": 2,
    "gpu_type": "a100",
}
RESOURCES = JobResources(
    num_hosts=2,
    processes_per_host=2,
    gpus_per_host=8,
    cpus_per_host=32,
    memory_gib=100.5,
    walltime_minutes=60,
)
SUBMISSION = Submission(
    attempt=Path("/data/ws/runs/tiny-abcd/stages/train/attempts/1"),
    title="tiny-abcd train 1",
    directory=Path("/home/me/my project"),
    resources=RESOURCES,
    settings=Config(**SETTINGS),
    stall_seconds=1800,
    grace_seconds=30,
    variables={"NCCL_SOCKET_IFNAME": "ib0", "GREETING": "it's\there"},
)
SCRIPT = """\
#!/bin/bash
# redco-flow: tiny-abcd train 1
#SBATCH --job-name=tiny-abcd-train-1-{digest}
#SBATCH --chdir=/data/ws/runs/tiny-abcd/stages/train/attempts/1
#SBATCH --output=logs/slurm.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --export=ALL
#SBATCH --partition=a100
#SBATCH --account=nlp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --mem=102912M
#SBATCH --gpus-per-node=a100:8
#SBATCH --time=60
#SBATCH --signal=URG@120
#SBATCH --exclusive

printf '%s\\n' "$SLURM_JOB_ID" > slurm.jobid
export NCCL_SOCKET_IFNAME=ib0
export GREETING=$'it\\U00000027s\\U00000009here'
export SLURM_EXPORT_ENV=ALL  # srun hands these on, also after sbatch --export=NONE
module load cuda/13.0
source /opt/env.sh

finish() {{
    for seconds in 0 10 30; do  # the controller may be away for a moment
        sleep "$seconds"
        SLURM_EXIT_ERROR=99 srun --input=none \\
            --chdir='/home/me/my project' \\
            --cpu-bind=cores \\
            --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 \\
            /opt/venv/bin/python -P -m redco_flow.launch.slurm.job_end \\
            /data/ws/runs/tiny-abcd/stages/train/attempts/1 --num-processes 4 \\
            "$@"
        code=$?
        [ "$code" -eq 99 ] || return "$code"
    done
    /opt/venv/bin/python -P -m redco_flow.launch.slurm.job_end \
/data/ws/runs/tiny-abcd/stages/train/attempts/1 --num-processes 4 "$@"
}}

before="$(ls -lR --full-time /data/ws/runs/tiny-abcd/stages/train/attempts/1/ranks 2>&1)"
is_up=
for seconds in 5 10 20 40 60 60 60 ""; do
# Slurm may start a job late, or once more: what has completed is not repeated, and what
# its launcher has given up does not begin.
if [ -e /data/ws/runs/tiny-abcd/stages/train/attempts/1/exit.json ]; then
    grep -qs '"cause": "completed"' /data/ws/runs/tiny-abcd/stages/train/attempts/1/exit.json \
&& code=0 || code=1
elif [ -e /data/ws/runs/tiny-abcd/stages/train/attempts/1/cancel.json ]; then
    echo "It was cancelled before it started: nothing is run."
    finish
    code=$?
else
SLURM_EXIT_ERROR=99 srun --input=none \\
    --chdir='/home/me/my project' \\
    --kill-on-bad-exit=1 --wait=0 \\
    --ntasks=4 \\
    --cpus-per-task=16 \\
    --cpu-bind=cores \\
    --exclusive \\
    /opt/venv/bin/python -P -m redco_flow.launch.rank \\
    /data/ws/runs/tiny-abcd/stages/train/attempts/1 \\
    --stall-seconds 1800 \\
    --grace-seconds 30 \\
    --gpus-per-host 8 \\
    --rendezvous-seconds 300 \\
    --seconds-to-warning $((3480 - SECONDS))
code=$?
# While the controller is away, and once more when it answers; never after a rank began.
if [ "$code" -eq 99 ] && [ -n "$seconds" ] && [ -z "$is_up" ]; then
    sleep "$seconds"
    is_up=$(scontrol ping | grep "is UP")
    [ "$(ls -lR --full-time /data/ws/runs/tiny-abcd/stages/train/attempts/1/ranks 2>&1)" \
!= "$before" ] || continue
fi
finish --srun-exit-code "$code"
code=$?
# Slurm takes the job back for a later start; where it may not, the launcher does.
if [ "$code" -eq 75 ]; then
    for seconds in 0 2 8; do  # the controller may be away for a moment
        sleep "$seconds"
        scontrol requeue "$SLURM_JOB_ID" && sleep 120
    done
    finish --for-good
    code=$?
fi
fi
break
done
# By this Slurm knows whether jobs that depend on this one may start.
exit "$code"
"""


def test_a_submission_is_rendered_to_exactly_this_text():
    digest = SUBMISSION.job_name.rpartition("-")[2]

    assert render(SUBMISSION) == SCRIPT.format(digest=digest)


def test_a_stage_that_asks_for_nothing_leaves_memory_time_and_gpus_to_the_cluster():
    text = render(replace(SUBMISSION, resources=JobResources(), settings=Config()))

    for option in (
        "--mem",
        "--time",
        "--gpus-per-node",
        "--cpus-per-task",
        "--partition",
        "--seconds-to",
    ):
        assert option not in text
    assert f"finish() {{\n    {sys.executable} -P -m redco_flow.launch.slurm.job_end" in text


def test_the_container_stands_before_the_interpreter():
    settings = Config(container=["apptainer", "exec", "--nv", "my image.sif"], python="python")

    text = render(replace(SUBMISSION, settings=settings))

    assert "\n    apptainer exec --nv 'my image.sif' python -P -m redco_flow.launch.rank" in text


def test_gpus_can_be_asked_for_as_generic_resources():
    settings = Config(gpu_option="gres", gpu_type="h100")

    assert "#SBATCH --gres=gpu:h100:8\n" in render(replace(SUBMISSION, settings=settings))


def test_gpus_that_are_bound_to_tasks_are_requested_for_each_task():
    text = render(replace(SUBMISSION, settings=Config(gpu_option="gpus-per-task", gpu_type="h100")))

    assert "#SBATCH --gpus-per-task=h100:4\n" in text
    assert "    --cpus-per-task=16 \\\n    --gpus-per-task=h100:4 \\\n" in text


@pytest.mark.parametrize(
    ("visible", "local_rank", "devices"),
    [
        ("0,1,2,3", 1, [2, 3]),  # Slurm binds no task: both see the whole job's GPUs
        ("2,3", 1, [0, 1]),  # --gpus-per-task=2
        ("0,1", 1, [0, 1]),  # the same with ConstrainDevices: each task's cgroup counts from 0
        ("GPU-5c89852c,GPU-8f25a4c1", 0, [0, 1]),
        ("", 1, [2, 3]),
    ],
)
def test_a_rank_gets_its_own_gpus_whether_slurm_binds_them_or_not(visible, local_rank, devices):
    """`CUDA_VISIBLE_DEVICES` as Slurm sets it: https://slurm.schedmd.com/gres.html."""
    task = {"SLURM_NTASKS": 4, "SLURM_NNODES": 2, "SLURM_PROCID": 2 + local_rank}
    environ = {name: str(value) for name, value in task.items()}
    environ |= {"SLURM_LOCALID": str(local_rank), "CUDA_VISIBLE_DEVICES": visible}

    rank_info = RankInfo.from_slurm(environ, gpus_per_host=4, rendezvous_seconds=1)

    assert RankInfo.from_environment(rank_info.to_environment()).local_device_ids == devices


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("gpu[08-10,2],big1", ["gpu08", "gpu09", "gpu10", "gpu2", "big1"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("127.0.0.[11-12]", ["127.0.0.11", "127.0.0.12"]),
    ],
)
def test_nodes_are_read_as_scontrol_shows_hostnames(text, nodes):
    assert expand_nodes(text) == nodes


def test_ranks_of_one_fabric_are_in_a_row_also_with_unequal_numbers_of_tasks():
    """SLURM_STEP_TASKS_PER_NODE as in srun's manual: two tasks on three nodes, one on the last."""
    environ = {
        "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_NTASKS": "7", "SLURM_NNODES": "4",
    }  # fmt: skip
    fabrics = ["n[2,4]", "n3"]

    def rank(node, local_rank):
        task = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank)}
        return RankInfo.from_slurm(
            environ | task, gpus_per_host=2, rendezvous_seconds=1, fabrics=fabrics
        ).rank

    # n2, n4; n3; n1 is of none.
    assert [rank(1, 0), rank(1, 1), rank(3, 0), rank(2, 0)] == [0, 1, 2, 3]
    assert [rank(2, 1), rank(0, 0), rank(0, 1)] == [4, 5, 6]
    assert nodes_of_no_fabric(environ, fabrics) == ["n1"]


def test_nodes_of_fabrics_are_slurms_notation_and_each_in_one():
    section = Config(fabrics={"a": "n[1-3]", "b": "n4"}, between_fabrics={"gb_s": 2})

    assert section.fabrics_of(JobResources(num_hosts=4)) == ([3, 1], section.between_fabrics)
    assert section.fabrics_of(JobResources(num_hosts=2))[0] == [1, 1]
    assert section.fabrics_of(JobResources()) is None
    for wrong, reason in (
        (["n1", "n[1-2]"], "n1 is in more than one"),
        (["n[1"], "is not a list"),
        (["n[4-1]"], "ends before it begins"),
    ):
        with pytest.raises(ValueError, match=reason):
            Config(fabrics=dict(zip("ab", wrong, strict=False)))
    with pytest.raises(ValueError, match="of no use without fabrics"):
        Config(between_fabrics={"gb_s": 2})


@pytest.mark.parametrize(
    ("option", "gpus", "expected"),
    [
        ("mem-per-cpu", 8, "--mem-per-cpu=3216M"),  # 100.5 GiB on 32 CPUs
        ("mem-per-gpu", 8, "--mem-per-gpu=12864M"),
        ("mem-per-gpu", 0, "--mem-per-cpu=3216M"),
    ],
)
def test_a_stages_memory_is_requested_by_the_option_that_the_site_takes(option, gpus, expected):
    resources = replace(RESOURCES, gpus_per_host=gpus)
    settings = Config(memory_option=option)
    text = render(replace(SUBMISSION, settings=settings, resources=resources))

    assert f"#SBATCH {expected}\n" in text
    assert "--mem=" not in text


def test_resources_that_the_options_cannot_request_do_not_fit():
    with pytest.raises(DoesNotFit, match=r"set resources\.cpus_per_host"):
        Config(memory_option="mem-per-cpu").check_fits(JobResources(memory_gib=4))
    with pytest.raises(DoesNotFit, match="2 processes per host cannot share 3 GPUs"):
        Config(gpu_option="gpus-per-task").check_fits(
            JobResources(processes_per_host=2, gpus_per_host=3)
        )


def test_the_number_of_nodes_can_be_left_out_where_a_stage_is_one_process():
    one = replace(SUBMISSION, settings=Config(omit_nodes=True), resources=JobResources())

    assert not re.search(r"#SBATCH --(nodes|ntasks)", render(one))
    assert "#SBATCH --nodes=2\n" in render(replace(one, resources=RESOURCES))


def test_options_of_the_stages_jobs_are_not_of_the_job_that_drives_the_run():
    own = {"partition": "workflow", "options": ["--comment=launcher"]}
    section, _ = Config(**SETTINGS, launcher=own).for_launcher()

    assert (section.partition, section.account) == ("workflow", "nlp")
    assert section.options == ["--comment=launcher"]
    assert Config(**SETTINGS).for_launcher()[0].options == []


def test_short_options_are_checked_as_their_long_forms():
    options = ["-A nlp", "-pgpu", '-C "a100&nvlink"', "-H"]

    assert Config(options=options).options == [
        "--account=nlp",
        "--partition=gpu",
        '--constraint="a100&nvlink"',
        "--hold",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": ["-J mine"]}, "--job-name: a job is recognised by its own name"),
        ({"options": ["-M other"]}, "--clusters: jobs of another cluster cannot be followed"),
        ({"options": ["--exclusive --arr=0-3"]}, "--array: the stage would run once in each task"),
        ({"options": ["-D /tmp"]}, "--chdir: a job runs in the directory of its attempt"),
        ({"options": ["-o x.log"]}, "--output: `redco-flow logs`"),
        ({"options": ["-W"]}, "--wait: each submission would wait"),
        ({"partition": "gpu", "options": ["-p cpu"]}, r"partition \(gpu\) are both given"),
        ({"partition": "gpu", "options": ["--exclusive --part=a"]}, "are both given"),
        ({"launcher": {"account": "a", "options": ["-A b"]}}, r"account \(a\) are both given"),
    ],
)
def test_options_that_would_break_a_job_are_refused(settings, message):
    harmless = ["--wait-all-nodes=1", "--partition=cpu", '--comment="do not --wait"']
    assert Config(options=harmless).options == harmless

    with pytest.raises(ValidationError, match=message):
        Config(**settings)


def test_a_job_exports_the_profiles_variables_and_address_and_none_of_the_shells(tmp_path):
    shell = {"HF_TOKEN": "hf_abcdefgh", "PYTHONPATH": "/mine"}
    settings = Config(rendezvous_address="ic-NODE")
    executor = SlurmExecutor(
        tmp_path, settings, variables={"NCCL_DEBUG": "INFO"}, environment=shell
    )

    text = executor.render(AttemptDirectory(SUBMISSION.attempt), "tiny", RESOURCES)

    exported = re.findall(r"^export (\w+)=", text, re.MULTILINE)
    assert exported == [
        "NCCL_DEBUG",
        "PYTHONPATH",
        "REDCO_FLOW_PYTHONPATH_LAST",
        "REDCO_FLOW_ATTEMPT",
        "REDCO_FLOW_RENDEZVOUS_ADDRESS",
        "SLURM_EXPORT_ENV",
    ]
    assert "export PYTHONPATH=/mine" in text
    assert "hf_abcdefgh" not in text


def test_job_names_are_plain_and_no_two_attempts_share_one():
    titled = replace(SUBMISSION, title="a $(touch X)\n; b")
    other = replace(titled, attempt=titled.attempt / "2")

    assert titled.job_name.startswith("a-touch-X-b-")
    assert titled.job_name != other.job_name
    assert "\n;" not in render(titled)


@pytest.mark.parametrize("character", ["\n", "\\", "%", "\x1b", "\r"])
def test_paths_that_slurm_would_read_as_something_else_are_refused(character):
    """Fault 30, shell words, quotes, line breaks in names and values: they are passed on as text
    and never interpreted; control characters are refused.
    """
    odd = replace(SUBMISSION, attempt=Path(f"/data/a{character}b/1"))

    with pytest.raises(UsageError, match="cannot be submitted to Slurm"):
        render(odd)


@pytest.mark.parametrize(
    "settings",
    [
        {"setup": ["true\nrm -rf x"]},
        {"modules": ["cuda; rm x"]},
        {"partition": "a b"},
        {"options": ["-x"]},
        {"options": ["exclusive"]},
        {"constraint": "a\x00b"},
        {"container": ["apptainer\n"]},
    ],
)
def test_settings_that_would_be_a_second_command_are_refused(settings):
    with pytest.raises(ValidationError):
        Config(**settings)


def test_a_launcher_that_is_killed_each_time_is_started_ten_times_and_other_starts_do_not_count(
    tmp_path,
):
    """The script with commands in place of Slurm's: srun ends with the exit code in a file."""
    commands = {"srun": "exit $(cat code)", "scontrol": "echo >> requeued; exit 1", "sleep": ""}
    write_commands(tmp_path, commands)
    submission = replace(SUBMISSION, attempt=tmp_path, directory=tmp_path, settings=Config())
    (tmp_path / "job.sh").write_text(render_launcher(submission, ["module"], tmp_path / "log"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def is_queued_again(code):
        (tmp_path / "code").write_text(code)
        (tmp_path / "requeued").unlink(missing_ok=True)
        subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, check=False)
        return (tmp_path / "requeued").exists()

    codes = [*["137"] * 9, "75", *["99", "137"] * 5, "1", "137", "0"]
    expected = [*[True] * 19, False, False, True, False]
    assert [is_queued_again(code) for code in codes] == expected


@pytest.mark.parametrize(
    ("srun", "answer", "num_starts"),
    [
        ("exit 99", "DOWN", 8),
        ("exit 99", "UP", 2),  # the reason may be another one
        ("mkdir -p ranks/0; exit 99", "DOWN", 1),
        ("exit 1", "DOWN", 1),
    ],
)
def test_ranks_are_started_again_while_the_controller_is_away_unless_one_has_begun(
    tmp_path, srun, answer, num_starts
):
    """The script with commands in place of Slurm's, after a start whose rank left a record."""
    ping = f"echo 'Slurmctld(primary) at host is {answer}'"
    commands = {"srun": f"echo >> starts; {srun}", "scontrol": ping, "sleep": ""}
    write_commands(tmp_path, commands)
    (tmp_path / "ranks" / "1").mkdir(parents=True)
    submission = replace(SUBMISSION, attempt=tmp_path, directory=tmp_path, settings=Config())
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    subprocess.run(["bash", "-c", render(submission)], cwd=tmp_path, env=environment, check=False)

    assert len((tmp_path / "starts").read_text()) == num_starts
    assert json.loads((tmp_path / "exit.json").read_text())["cause"] == "failed"


def write_commands(folder, commands):
    for name, lines in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)


def test_a_job_that_was_cancelled_before_it_started_records_so_and_starts_no_rank(tmp_path):
    write_commands(tmp_path, {"srun": "touch ranks-began"})
    (tmp_path / "cancel.json").write_text("{}")
    submission = replace(SUBMISSION, attempt=tmp_path, directory=tmp_path, settings=Config())
    script = render(submission)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    ended = [
        subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        for _ in range(2)
    ]

    assert [one.returncode for one in ended] == [1, 1], ended[0].stderr
    assert ended[0].stdout == "It was cancelled before it started: nothing is run.\n"
    assert json.loads((tmp_path / "exit.json").read_text())["cause"] == "cancelled"
    assert not (tmp_path / "ranks-began").exists()


def test_a_job_after_others_names_them_and_ends_when_one_of_them_fails():
    text = render(replace(SUBMISSION, upstream=("17", "4_2")))
    after_end = render(replace(SUBMISSION, upstream=("17",), after_end=("18", "19")))

    assert "#SBATCH --dependency=afterok:17:4_2\n#SBATCH --kill-on-invalid-dep=yes\n" in text
    assert "#SBATCH --dependency=afterok:17,afterany:18:19\n" in after_end


@pytest.mark.parametrize("option", ["--dependency=singleton", "--depend=after:3"])
def test_an_operators_dependency_may_not_take_the_place_of_a_jobs_own(option):
    settings = Config(**SETTINGS | {"options": [option]})

    with pytest.raises(UsageError, match=r"slurm.options has '--depend.*--ahead"):
        render(replace(SUBMISSION, settings=settings, upstream=("17",)))
    assert f"#SBATCH {option}\n" in render(replace(SUBMISSION, settings=settings))
