"""What a plan says would be submitted."""

from orchestrate_runs import TWO_STAGES

from redco_flow.orchestrate.rendering import rendered_submissions
from redco_flow.spec.profile import Profile


def test_every_stage_that_may_run_is_rendered_and_nothing_is_written(planning):
    resolved = planning.load(TWO_STAGES)
    plan = planning.plan(TWO_STAGES)
    profile = Profile(executor="slurm", workspace=str(planning.workspace.root))

    rendered = dict(rendered_submissions(resolved, profile, planning.workspace, plan, {}))

    assert list(rendered) == ["preprocess", "train"]
    assert "#SBATCH --job-name=two-stages-RUN-train-1-" in rendered["train"]
    assert not list(planning.workspace.runs.glob("*"))


def test_where_nothing_is_submitted_nothing_is_rendered(planning):
    resolved, plan = planning.load(TWO_STAGES), planning.plan(TWO_STAGES)

    rendered = dict(rendered_submissions(resolved, Profile(), planning.workspace, plan, {}))

    assert rendered == {"preprocess": "", "train": ""}
