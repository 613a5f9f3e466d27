"""What a plan says would be submitted."""

import pytest
from orchestrate_runs import DIAMOND, TWO_STAGES

from redco_flow.errors import DoesNotFit, UsageError
from redco_flow.orchestrate.run.launcher import with_launcher
from redco_flow.orchestrate.run.rendering import rendered_submissions
from redco_flow.orchestrate.run.start import resume_run
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.spec.profile import profile_model


def test_every_stage_that_may_run_is_rendered_and_nothing_is_written(runs):
    resolved = runs.load(TWO_STAGES)
    plan = runs.plan(TWO_STAGES)
    profile = profile_model()(executor="slurm", workspace=str(runs.workspace.root))

    rendered = dict(rendered_submissions(resolved, profile, runs.workspace, plan, {}))

    assert list(rendered) == ["preprocess", "train"]
    assert "#SBATCH --job-name=two-stages-RUN-train-1-" in rendered["train"]
    assert not list(runs.workspace.runs.glob("*"))


def test_the_job_that_drives_the_run_is_rendered_without_the_options_of_stages(runs):
    given = {"options": ["--exclusive"], "launcher": {"options": ["--nice=5"]}}
    profile = profile_model()(
        executor="slurm", launcher="slurm", slurm=given, workspace=str(runs.workspace.root)
    )
    loaded = (runs.load(TWO_STAGES), profile, runs.workspace, runs.plan(TWO_STAGES))

    launcher, stage, _ = dict(rendered_submissions(*loaded, {})).values()

    assert "--exclusive" in stage
    assert "--exclusive" not in launcher
    assert "#SBATCH --nice=5\n" in launcher
    assert "#SBATCH --job-name=two-stages-RUN-launcher-1-" in launcher


GROUPED = """
name: grouped
stages:
  preprocess: {kind: orchestrate_kinds.numbers, group: small}
  train: {kind: orchestrate_kinds.total, group: small}
  compare: {kind: orchestrate_kinds.score, metrics: [train], group: small}
"""
OUTSIDE = GROUPED + "  other: {kind: orchestrate_kinds.total, dataset: preprocess}\n"


def test_a_group_is_one_script_with_its_largest_stages_resources_and_a_step_for_each(runs):
    wanted = ["preprocess.resources={cpus_per_host: 2, walltime_minutes: 5}"]
    wanted += ["train.resources={cpus_per_host: 4, gpus_per_host: 2, walltime_minutes: 30}"]
    wanted += ["compare.resources={cpus_per_host: 1, walltime_minutes: 5}"]
    resolved, plan = runs.load(GROUPED, wanted), runs.plan(GROUPED, wanted)
    profile = profile_model()(executor="slurm", workspace=str(runs.workspace.root))

    rendered = dict(rendered_submissions(resolved, profile, runs.workspace, plan, {}))

    script = rendered["preprocess"]
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --cpus-per-task=4", "#SBATCH --gpus-per-node=2", "#SBATCH --time=40"} <= set(
        options
    )
    steps = [line.strip() for line in script.splitlines() if "--gpus-per-host" in line]
    assert [step.removesuffix(" \\") for step in steps] == [
        f"--gpus-per-host {count}" for count in (0, 2, 0)
    ]
    assert script.count("--seconds-to-warning $((2280 - SECONDS))") == 3
    assert "--seconds-to-end $((2280 - SECONDS < 1800 ? 2280 - SECONDS : 1800))" in script
    assert rendered["train"] == "stage 'train' runs in the job of stage 'preprocess'"
    capped = profile.model_copy(
        update={"slurm": profile.slurm.model_copy(update={"walltime_minutes": 35})}
    )
    rendered = dict(rendered_submissions(resolved, capped, runs.workspace, plan, {}))
    assert "#SBATCH --time=35\n" in rendered["preprocess"]


def test_each_step_of_a_group_has_the_jobs_memory_where_that_is_divided_by_cpus(runs):
    sizes = {"preprocess": (4, 8), "train": (2, 8), "compare": (1, 2)}
    wanted = [
        f"{stage}.resources={{cpus_per_host: {cpus}, memory_gib: {memory}}}"
        for stage, (cpus, memory) in sizes.items()
    ]
    resolved, plan = runs.load(GROUPED, wanted), runs.plan(GROUPED, wanted)
    settings = {"executor": "slurm", "workspace": str(runs.workspace.root)}
    profile = profile_model()(**settings, slurm={"memory_option": "mem-per-cpu"})

    rendered = dict(rendered_submissions(resolved, profile, runs.workspace, plan, {}))

    assert "#SBATCH --mem-per-cpu=2048M" in rendered["preprocess"]
    assert rendered["preprocess"].count("--mem=0") == 3


def test_ahead_no_stage_waits_for_the_middle_of_a_group(runs):
    runs.profile["executor"] = "slurm"

    with pytest.raises(UsageError, match=r"'other' takes from 'preprocess', after which 'compare'"):
        runs.write(OUTSIDE, ahead=True)
    runs.write(OUTSIDE)


def test_where_nothing_is_submitted_nothing_is_rendered(runs):
    resolved, plan = runs.load(TWO_STAGES), runs.plan(TWO_STAGES)

    rendered = dict(rendered_submissions(resolved, profile_model()(), runs.workspace, plan, {}))

    assert rendered == {"preprocess": "", "train": ""}


def test_of_a_run_ahead_each_stage_depends_on_its_upstream(runs):
    resolved, plan = runs.load(DIAMOND), runs.plan(DIAMOND)
    profile = profile_model()(executor="slurm", workspace=str(runs.workspace.root))

    rendered = dict(rendered_submissions(resolved, profile, runs.workspace, plan, {}, ahead=True))

    assert "--dependency" not in rendered["preprocess"]
    assert "--dependency=afterok:JOB_OF_preprocess\n" in rendered["train-small"]
    assert "--dependency=afterok:JOB_OF_train-small:JOB_OF_train-large\n" in rendered["compare"]


def test_a_profile_without_a_queue_cannot_run_ahead_and_the_error_says_what_to_do(runs):
    with pytest.raises(UsageError, match=r"'local'.*cannot have jobs wait.*leave --ahead out"):
        runs.write(TWO_STAGES, ahead=True)
    assert not list(runs.workspace.runs.glob("*"))


def test_ahead_is_refused_where_a_stage_runs_where_there_is_no_queue(runs):
    runs.profile["executor"] = "slurm"
    here = TWO_STAGES.replace("numbers}", "numbers, runs_on: {executor: local}}")

    with pytest.raises(UsageError, match=r"'local'.*cannot have jobs wait.*leave --ahead out"):
        runs.write(here, ahead=True)


def test_a_job_cannot_become_the_launcher_of_a_run_with_a_stage_of_this_machine(runs):
    runs.profile["executor"] = "slurm"
    here = TWO_STAGES.replace("numbers}", "numbers, runs_on: {executor: local}}")

    with pytest.raises(UsageError, match=r"--launcher slurm: stage 'preprocess': .*executor local"):
        with_launcher(runs.write(here), "slurm")


def test_a_job_cannot_become_the_launcher_of_a_run_with_a_flow_of_the_users_and_no_server(
    runs, tmp_path, monkeypatch
):
    """It is looked for where the run was started, as the job does."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    runs.profile["executor"] = "slurm"
    run = runs.write(TWO_STAGES)
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "pipeline.py").write_text("")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    with pytest.raises(DoesNotFit, match=r"flows/pipeline.py: a flow of your own needs"):
        resume_run(run, "slurm")
    assert LaunchRecord.read(run).launcher == "local"


def test_a_stage_is_not_forced_ahead(runs):
    runs.profile["executor"] = "slurm"

    with pytest.raises(UsageError, match=r"--force train and --ahead do not go together"):
        runs.write(TWO_STAGES, ahead=True, force=["train"])
