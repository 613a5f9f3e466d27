"""`runs_on`: a stage with another profile, or with other keys of the run's."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import load_profile

PIPELINE = """\
name: sums
stages:
  preprocess:
    kind: script
    path: job.py
    runs_on: {slurm: {partition: cpu}, environment: {B: "2"}}
  train: {kind: script, path: job.py}
  evaluate: {kind: script, path: job.py, runs_on: local}
"""
SITE = """\
executor: slurm
workspace: elsewhere
environment: {A: "1"}
slurm: {partition: gpu, account: lab}
"""


@pytest.fixture
def site(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write("", "job.py")
    return load_profile(write(SITE, "site.yaml"))


def test_a_stage_gets_keys_of_its_own_over_the_runs_profile_or_another_profile(load, site):
    pipeline = load(PIPELINE, profile=site)

    train = pipeline.profile_of("train", site)
    preprocess = pipeline.profile_of("preprocess", site)
    evaluate = pipeline.profile_of("evaluate", site)
    assert train is site
    assert (preprocess.section.partition, preprocess.section.account) == ("cpu", "lab")
    assert preprocess.environment == {"A": "1", "B": "2"}
    assert (evaluate.executor, evaluate.environment) == ("local", {})
    assert {preprocess.workspace, evaluate.workspace} == {"elsewhere"}


def test_the_command_line_changes_it_and_no_fingerprint_has_it(load, site):
    given = "stages.train.runs_on.slurm.partition=a100"
    pipeline = load(PIPELINE, given, profile=site)

    assert pipeline.profile_of("train", site).section.partition == "a100"
    assert pipeline.stages["train"].settings == load(PIPELINE).stages["preprocess"].settings


def test_a_stage_of_another_executor_is_refused_where_a_job_drives_the_run(write, load, site):
    driven_by_a_job = load_profile(write(f"{SITE}launcher: slurm\n", "driven.yaml"))
    keys = PIPELINE.replace("job.py, runs_on: local", "job.py, runs_on: {executor: local}")

    for text in (PIPELINE, keys):
        with pytest.raises(ConfigError) as raised:
            load(text, profile=driven_by_a_job)
        (problem,) = raised.value.problems
        assert problem.line == 8
        assert "'stages.evaluate.runs_on': the stage has executor local" in problem.message
    accepted = load(PIPELINE, "evaluate.runs_on={}", profile=driven_by_a_job)
    assert accepted.profile_of("preprocess", driven_by_a_job).launcher == "slurm"


def test_mistakes_are_found_at_once_with_their_places(write, site):
    wrong = """\
    name: sums
    stages:
      one: {kind: script, path: job.py, runs_on: nowhere}
      two:
        kind: script
        path: job.py
        runs_on: {slurm: {partitoin: cpu}}
      three:
        kind: script
        path: job.py
        runs_on: {workspace: other}
      four: {kind: script, path: job.py, runs_on: {executor: slrum}}
    """
    with pytest.raises(ConfigError) as raised:
        load_pipeline(write(wrong), profile=site)

    one, two, three, four = sorted(raised.value.problems, key=lambda one: one.line)
    assert one.line == 3
    assert "'stages.one.runs_on': " in one.message
    assert "nowhere" in one.message
    assert two.line == 7
    assert "'stages.two.runs_on.slurm' has no key 'partitoin'; did you mean" in two.message
    assert (three.line, "set profile.workspace" in three.message) == (11, True)
    assert (four.line, "'stages.four.runs_on.executor'" in four.message) == (12, True)
