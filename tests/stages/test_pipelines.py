"""The pipelines that come with the project: each loads, and its stages take from each other."""

from pathlib import Path

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline

PIPELINES = sorted((Path(__file__).parents[2] / "pipelines").glob("*.yaml"))


@pytest.fixture
def data_overrides(tmp_path):
    """What some pipelines want on the command line."""
    overrides = []
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("mr,ref\na,b\n")
        overrides.append(f"data.{split}={tmp_path / split}.csv")
    return overrides


@pytest.mark.parametrize(
    "path",
    [p for p in PIPELINES if "kind:" not in p.read_text("utf-8")],
    ids=lambda path: path.stem,
)
def test_every_pipeline_loads_and_runs_from_raw_data_to_scores(path, data_overrides):
    overrides = [] if "dataset:" in path.read_text(encoding="utf-8") else data_overrides

    pipeline = load_pipeline(path, overrides)

    assert list(pipeline.stages) == ["preprocess", "train", "predict", "evaluate"]
    checkpoint = pipeline.stages["predict"].inputs["checkpoint"][0]
    assert checkpoint.output.startswith("checkpoint/best/")
    assert checkpoint.output.rpartition("/")[2] in pipeline.stages["train"].config.keep.best


def test_preferences_are_learnt_on_top_of_finetuning_and_compared_with_it():
    pipeline = load_pipeline(next(path for path in PIPELINES if path.stem == "preference"))

    inputs = {name: stage.inputs for name, stage in pipeline.stages.items()}
    begun = inputs["prefer"]["start_from"]
    assert begun == inputs["reference"]["checkpoint"]
    assert begun[0].text() == "finetune/last"
    assert inputs["prefer"]["reference_scores"] == inputs["predict"]["reference_scores"]


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_pipeline_begins_with_its_command(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]

    assert first.startswith(f"# redco-flow run pipelines/{path.name}")


def test_the_drill_ends_with_the_digests_of_what_it_trained():
    pipeline = load_pipeline(next(path for path in PIPELINES if path.stem == "drill"))

    assert list(pipeline.stages) == ["preprocess", "train", "digests"]
    assert pipeline.stages["digests"].inputs["checkpoint"][0].output == "checkpoint/last"


def test_a_pipeline_without_its_data_says_how_to_give_them():
    path = next(path for path in PIPELINES if path.stem == "e2e_nlg")

    with pytest.raises(ConfigError, match=r"give data\.train=PATH"):
        load_pipeline(path)
