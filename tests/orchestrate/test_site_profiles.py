"""The templates of public Slurm sites submit the options that each site documents."""

import re

import pytest

from redco_flow.errors import ConfigError
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.rendering import rendered_submissions
from redco_flow.spec.find import available, find_file
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import load_profile

# Options of a job on a whole node; the addresses of the pages are at the head of each template.
OPTIONS = {
    "daint": "--partition=normal --ntasks-per-node=4 --gpus-per-task=1 --cpus-per-task=72 "
    "--time=1440",
    "delta": "--partition=gpuA100x4 --gpus-per-node=4 --cpus-per-task=64 --mem=212992M --time=2880",
    "leonardo": "--partition=boost_usr_prod --qos=normal --gres=gpu:4 --cpus-per-task=32 "
    "--time=1440",
    "narval": "--gpus-per-node=a100:4 --cpus-per-task=48 --mem=509952M --time=10080",
    "perlmutter": "--qos=regular --constraint=gpu --gpus-per-node=4 --cpus-per-task=128",
    "roihu": "--partition=gpumedium --gres=gpu:gh200:4 --cpus-per-task=288 --time=2160",
}
# How a site starts an image, from the commented keys of its template.
CONTAINERS = {
    "daint": "--environment=NAME python3",
    "narval": "apptainer run --nv -B /project -B /scratch /path/to/image.sif python3",
    "roihu": "apptainer exec --nv -B /scratch:/scratch /path/to/image.sif python3",
}


@pytest.fixture
def train_job(runs):
    """The text of the job of the quickstart's training with a profile."""

    def rendered(profile):
        resolved = load_pipeline(find_file("pipelines", "quickstart"), (), profile)
        plan = make_plan(resolved, runs.workspace)
        return dict(rendered_submissions(resolved, profile, runs.workspace, plan, {}))["train"]

    return rendered


@pytest.fixture
def environ(tmp_path):
    return {"SBATCH_ACCOUNT": "lab", "REDCO_FLOW_WORKSPACE": str(tmp_path / "workspace")}


def test_every_template_is_listed_and_tested():
    listed = {name for name in available("cluster_profiles") if name.startswith("sites/")}

    assert listed == {f"sites/{name}" for name in OPTIONS}


@pytest.mark.parametrize("site", OPTIONS)
def test_a_job_has_the_options_that_its_site_documents(train_job, environ, site):
    job = train_job(load_profile(f"sites/{site}", environ=environ))

    options = set(re.findall(r"(?m)^#SBATCH (\S+)", job))
    assert {"--account=lab", "--nodes=1", *OPTIONS[site].split()} <= options


@pytest.mark.parametrize("site", CONTAINERS)
def test_the_commented_container_of_a_template_starts_the_interpreter_of_the_image(
    train_job, environ, tmp_path, site
):
    text = find_file("cluster_profiles", f"sites/{site}").read_text()
    path = tmp_path / "own.yaml"
    path.write_text(re.sub(r"(?m)^  # (modules|container|srun_options|python): ", r"  \1: ", text))

    job = train_job(load_profile(path, environ=environ))

    assert CONTAINERS[site] in re.sub(r"\s*\\\n\s*", " ", job)


@pytest.mark.parametrize("site", OPTIONS)
def test_without_an_account_or_a_workspace_nothing_starts_and_both_are_named(site):
    with pytest.raises(ConfigError) as caught:
        load_profile(f"sites/{site}", environ={})

    said = str(caught.value)
    assert said.count(f"{site}.yaml:") == 2
    assert "'slurm.account': environment variable SBATCH_ACCOUNT is not set" in said
    assert "'workspace': environment variable REDCO_FLOW_WORKSPACE is not set" in said
