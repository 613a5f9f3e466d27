"""Profiles: their fields, their mistakes, and what they lay under a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from redco_flow.errors import ConfigError, UsageError
from redco_flow.spec.load import Origin, load_profile
from redco_flow.spec.profile import Profile, RetryBudgets, profile_model

PROJECT = Path(__file__).resolve().parents[2]


def test_the_local_profile_says_the_defaults(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    profile = load_profile("local")

    assert profile.model_dump(exclude={"local", "slurm", "hosts", "xmanager"}) == {
        "name": "local",
        "executor": "local",
        "workspace": "redco-workspace",
        "num_cpu_devices": 1,
        "missing_gpus": "error",
        "environment": {},
        "staging": None,
        "stall_timeout_minutes": 30.0,
        "grace_seconds": 30.0,
        "max_parallel_stages": 2,
        "prefect_api_url": None,
        "start_prefect_server": False,
        "launcher": "local",
        "devices": {},
        "ssh": None,
        "retries": {
            "preempted": None,
            "node_failure": 3,
            "timeout": 10,
            "stalled": 0,
            "lost": 0,
            "failed": 0,
            "out_of_memory": 0,
        },
        "defaults": {},
    }


def test_budgets_of_retries_are_counted_apart_and_none_has_no_end():
    budgets = RetryBudgets(failed=1)

    assert budgets.allows("failed", 1)
    assert not budgets.allows("failed", 2)
    assert not budgets.allows("out_of_memory", 1)
    assert budgets.allows("preempted", 1000)
    assert not budgets.allows("cancelled", 0)


@pytest.mark.parametrize(
    "path", sorted(PROJECT.glob("cluster_profiles/*.yaml")), ids=lambda p: p.stem
)
def test_every_profile_of_the_project_loads(path):
    assert load_profile(path, environ={}).name == path.stem


@pytest.mark.parametrize(
    "path", sorted(PROJECT.glob("cluster_profiles/*.yaml")), ids=lambda p: p.stem
)
def test_every_profile_of_the_project_has_the_workspace_that_the_environment_names(path):
    variable = {"REDCO_FLOW_WORKSPACE": "/scratch/me"}

    assert load_profile(path, environ=variable).workspace == "/scratch/me"
    assert load_profile(path, environ={}).workspace == "redco-workspace"


def test_an_override_with_profile_goes_to_the_profile_and_no_other(write, load, chain):
    path = write("workspace: here\n", "mine.yaml")
    overrides = ["profile.num_cpu_devices=4", "learning_rate=1e-4", "profile.environment.A=1"]

    profile = load_profile(path, overrides)
    pipeline = load(chain, *overrides, profile=profile)

    assert (profile.name, profile.num_cpu_devices, profile.workspace) == ("mine", 4, "here")
    assert profile.environment == {"A": "1"}
    assert pipeline.stages["train"].config.learning_rate == 1e-4


def test_a_profile_takes_environment_variables(write):
    path = write("workspace: ${env:SCRATCH,/tmp}/work\nenvironment: {OMP_NUM_THREADS: 4}\n")

    assert load_profile(path, environ={"SCRATCH": "/big"}).workspace == "/big/work"
    assert load_profile(path, environ={}).workspace == "/tmp/work"
    assert load_profile(path, environ={}).environment == {"OMP_NUM_THREADS": "4"}


def test_mistakes_in_a_profile_are_told_at_once(write):
    path = write(
        "executer: local\nnum_cpu_devices: 0\nenvironment:\n  HF_TOKEN: abc\n  A B: c\n"
        "devices:\n  h100: {hbm_tb_s: 3.35, memory_gib: 80 GiB, reported: '('}\n"
        "staging: {directory: scratch, input: true}\n",
        "p.yaml",
    )

    with pytest.raises(ConfigError) as caught:
        load_profile(path, ["profile.grace=3", "profile.stall_timeout_minutes=no"])

    found = sorted(str(problem).replace(str(path), "p.yaml") for problem in caught.value.problems)
    expected = [
        "command line: 'stall_timeout_minutes' must be a number, not 'no'",
        "command line: profile.grace: there is no setting 'grace'; did you mean 'grace_seconds'?",
        "p.yaml:1:1: the profile has no key 'executer'; did you mean 'executor'?",
        "p.yaml:2:1: 'num_cpu_devices' must be greater than 0, not 0",
        "p.yaml:4:3: 'environment.HF_TOKEN' looks like a secret, which is never stored;",
        "p.yaml:5:3: 'environment.A B': 'A B' is no name (must match ^[A-Za-z_][A-Za-z0-9_]*$)",
        "p.yaml:7:10: 'devices.h100' has no key 'hbm_tb_s'; did you mean 'hbm_gb_s'?",
        "p.yaml:7:26: 'devices.h100.memory_gib' must be a number, not '80 GiB'",
        "p.yaml:7:46: 'devices.h100.reported': '(' is not a regex: missing )",
        "p.yaml:8:11: 'staging.directory' must be a path that begins with / or with a variable of "
        "the job, as $SLURM_TMPDIR",
        "p.yaml:8:31: 'staging' has no key 'input'; did you mean 'inputs'?",
    ]
    assert len(found) == len(expected)
    assert all(one.startswith(two) for one, two in zip(found, expected, strict=True)), found


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("executor: slurm\nlauncher: slrm", 2, "'launcher' must be local or slurm"),
        ("launcher: slurm", 1, "'launcher': slurm is for profiles with that executor"),
        (
            "executor: slurm\nstart_prefect_server: true\nlauncher: slurm",
            3,
            "slurm and start_prefect_server exclude each other",
        ),
        (
            "executor: slurm\nslurm:\n  launcher: {partiton: cpu}",
            3,
            "'slurm.launcher' has no key 'partiton'; did you mean 'partition'?",
        ),
        (
            "executor: slurm\nslurm:\n  partition: gpu\n  launcher: {walltime_minutes: 2}",
            4,
            "'slurm.launcher': walltime_minutes is 2, but the job is warned 120 s",
        ),
        (
            "executor: slurm\nslurm:\n  launcher:\n    options: [-J x]",
            4,
            "a job is recognised by its own name",
        ),
    ],
)
def test_a_launcher_that_cannot_be_had_is_a_mistake_with_its_line(write, text, line, said):
    with pytest.raises(ConfigError) as caught:
        load_profile(write(text, "p.yaml"))

    (problem,) = caught.value.problems
    assert problem.line == line
    assert said in problem.message


@pytest.mark.parametrize("directory", ["/lscratch/$SLURM_JOB_ID", "$TMPDIR", "/mnt/nvme 1"])
def test_a_directory_of_the_nodes_may_be_named_by_variables_of_the_job(write, directory):
    profile = load_profile(write(f"staging: {{directory: {directory}}}\n"), environ={})

    assert profile.staging.directory == directory
    assert (profile.staging.inputs, profile.staging.checkpoints) == (True, False)
    with pytest.raises(ConfigError, match=r"'tmpdir'\. A variable of the job is written without"):
        load_profile(write("staging: {directory: '${tmpdir}'}\n"), environ={})


def test_a_shell_variable_is_a_mistake_where_no_shell_reads_it(write):
    text = "workspace: /scratch/$USER/ws\nenvironment: {HF_HOME: '$SCRATCH/hf', FLAGS: '$${x}'}\n"
    text += "slurm:\n  setup: ['export A=$HOME']\n  container: [apptainer, exec, $SCRATCH/i.sif]\n"
    text += "  srun_options: ['--container-mounts=$TMPDIR:/scratch']\n  python: $ORIGIN/python\n"
    with pytest.raises(ConfigError) as caught:
        load_profile(write(text, "p.yaml"))

    assert [problem.line for problem in caught.value.problems] == [1, 2, 5]
    assert "'workspace': $USER is not replaced" in caught.value.problems[0].message
    assert "written ${env:SCRATCH}" in caught.value.problems[1].message


def test_a_profile_that_is_not_there_is_a_usage_error_with_the_nearest_name():
    with pytest.raises(UsageError, match="did you mean 'local'"):
        load_profile("locla")


def test_a_profile_s_defaults_lie_under_the_file(write, load, chain):
    path = write(
        """\
        defaults:
          data: {source_key: below, target_key: below}
          stages:
            preprocess: {num_workers: 8}
            unused: {kind: my_kinds.train}
        """,
        "cluster.yaml",
    )

    pipeline = load(chain, profile=load_profile(path))

    assert list(pipeline.stages) == ["preprocess", "train", "predict", "evaluate"]
    assert pipeline.stages["preprocess"].config.num_workers == 8
    assert pipeline.stages["preprocess"].config.data.source_key == "document"
    assert pipeline.stages["preprocess"].config.data.target_key == "below"
    assert pipeline.origins["data.target_key"] == Origin(str(path), 2, 29)
    assert pipeline.origins["stages.preprocess.num_workers"] == Origin(str(path), 4, 18)


def test_a_mistake_in_a_profile_s_defaults_is_told_in_the_profile(write, problems, chain):
    path = write("defaults:\n  data: {sauce_key: x}\n", "cluster.yaml")

    (problem,) = problems(chain, profile=load_profile(path))

    assert (problem.source, problem.line, problem.column) == (str(path), 2, 10)


def test_references_in_defaults_are_the_pipeline_s(write, load, chain):
    path = write("defaults: {description: 'the ${name}'}\n", "cluster.yaml")

    assert load(chain, profile=load_profile(path)).description == "the chain"


def test_the_profile_alone_never_changes_settings(write, load, chain):
    path = write("workspace: elsewhere\nnum_cpu_devices: 8\nenvironment: {A: b}\n", "cluster.yaml")

    with_profile = load(chain, profile=load_profile(path)).stages
    without = load(chain).stages

    assert {n: s.settings for n, s in with_profile.items()} == {
        n: s.settings for n, s in without.items()
    }


def test_a_profile_extends_another_key_by_key(write):
    write("executor: slurm\nslurm: {partition: gpu, account: lab}\ngrace_seconds: 5\n", "site.yaml")
    write("extends: site\nslurm: {partition: big}\nenvironment: {A: '1'}\n", "big.yaml")
    path = write("extends: big.yaml\nslurm: {qos: high}\n", "mine.yaml")

    profile = load_profile(path, ["profile.grace_seconds=7"])

    assert (profile.name, profile.executor, profile.grace_seconds) == ("mine", "slurm", 7)
    assert (profile.slurm.partition, profile.slurm.account, profile.slurm.qos) == (
        *("big", "lab", "high"),
    )
    assert profile.environment == {"A": "1"}


def test_a_profile_may_extend_the_one_of_the_same_name_that_comes_with_the_project(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster_profiles").mkdir()
    (tmp_path / "cluster_profiles" / "slurm.yaml").write_text("extends: slurm\nworkspace: mine\n")

    profile = load_profile("slurm")

    assert (profile.name, profile.executor, profile.workspace) == ("slurm", "slurm", "mine")


def test_a_mistake_in_an_extended_profile_is_told_where_it_stands(write):
    write("grace: 3\n", "site.yaml")
    path = write("extends: site\nexecuter: slurm\n", "mine.yaml")

    with pytest.raises(ConfigError) as caught:
        load_profile(path)

    said = str(caught.value)
    assert "site.yaml:1:1: the profile has no key 'grace'" in said
    assert "mine.yaml:2:1: the profile has no key 'executer'" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: [slurm]", "mine.yaml:1:1: extends must be one profile's name or path, not list"),
        ("extends: slrum", "did you mean 'slurm'?"),
        ("extends: back", "mine.yaml, which extends"),
    ],
    ids=["a list", "unknown", "a circle"],
)
def test_what_cannot_be_extended_is_refused(write, text, said):
    write("extends: mine\n", "back.yaml")

    with pytest.raises(ConfigError) as caught:
        load_profile(write(text + "\n", "mine.yaml"))

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ("lokal", "there is no executor 'lokal'; did you mean 'local'?"),
        ("local.x", "executor 'local.x': there is no module local.x"),
        ("own_launch.gone", "executor 'own_launch.gone': there is no module own_launch.gone"),
        ("own_launch.typo", r"typo.py:2: ModuleNotFoundError: No module named 'nosuch'"),
        ("own_launch.half", "half.py lacks reattach"),
    ],
)
def test_an_executor_that_cannot_be_had_is_a_mistake_with_its_line(
    tmp_path, monkeypatch, executor, message
):
    package = tmp_path / "own_launch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "typo.py").write_text("\nimport nosuch\n")
    (package / "half.py").write_text("def make(profile, environment): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    profile = tmp_path / "mine.yaml"
    profile.write_text(f"extends: local\n\nexecutor: {executor}\n")

    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(profile)

    assert str(caught.value).startswith(f"{profile}:3:")


def test_an_executor_of_ones_own_is_taken(tmp_path, monkeypatch):
    package = tmp_path / "own_runner"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "def make(profile, environment): ...\ndef reattach(record): ...\n"
    (package / "fine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    assert load_profile("local", ["profile.executor=own_runner.fine"]).executor == "own_runner.fine"


def test_a_key_of_sbatch_is_answered_with_the_section_s_own(write):
    path = write("executor: slurm\nslurm: {time: 60}\n")

    with pytest.raises(ConfigError) as raised:
        load_profile(path)

    assert str(raised.value).endswith(
        "'slurm' has no key 'time': it is Slurm's name; here it is `walltime_minutes`."
    )


def test_a_typo_in_an_executor_s_section_is_refused(write):
    """It was left out without a word, as of a record that another version wrote."""
    path = write("executor: slurm\nslurm:\n  partion: gpu\n")

    with pytest.raises(ConfigError) as raised:
        load_profile(path)

    (problem,) = raised.value.problems
    assert (problem.line, problem.column) == (3, 3)
    assert problem.message.startswith("'slurm' has no key 'partion'; did you mean 'partition'?")


def test_a_record_of_another_version_is_read_without_the_keys_that_are_gone():
    record = profile_model()(executor="slurm").model_dump(mode="json")
    refused = ["--partition=b", "--output=x.log", "--array=0-3"]
    record["slurm"] |= {"gone": 1, "partition": "a", "options": refused}

    assert Profile.from_record(record).slurm.options == refused
