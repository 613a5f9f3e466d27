"""Every pipeline of the project loads, and agrees with the schema."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from redco_flow.spec.load import load_pipeline, load_profile
from redco_flow.spec.schema import json_schema
from redco_flow.spec.yaml import parse_file, write_yaml

PROJECT = Path(__file__).resolve().parents[2]
PIPELINES = sorted(PROJECT.glob("pipelines/*.yaml"))


@pytest.fixture(scope="module")
def agrees():
    """The schema's validator: to make the schema takes longer than to apply it."""
    schema = json_schema()
    checked_by = jsonschema.validators.validator_for(schema)
    checked_by.check_schema(schema)
    return checked_by(schema)


@pytest.fixture
def data_overrides(tmp_path):
    """Files for the splits that a pipeline wants from the command line."""
    overrides = []
    for split in ("train", "validation", "test"):
        path = tmp_path / f"{split}.csv"
        path.write_text("source,target\na,b\n")
        overrides.append(f"data.{split}={path}")
    return overrides


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_a_pipeline_of_the_project_loads_and_its_resolved_form_is_the_same(
    path, data_overrides, tmp_path
):
    names_its_data = "dataset:" in path.read_text()
    overrides = [] if names_its_data else data_overrides

    pipeline = load_pipeline(path, overrides, load_profile("local"), environ={})

    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(write_yaml(pipeline.document))

    again = load_pipeline(resolved, environ={})
    assert again.document == pipeline.document
    assert {n: s.settings for n, s in again.stages.items()} == {
        n: s.settings for n, s in pipeline.stages.items()
    }


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_a_pipeline_of_the_project_agrees_with_the_schema(path, agrees):
    document, problems = parse_file(path)

    assert problems == []
    agrees.validate(document.values)


@pytest.mark.parametrize(
    ("section", "is_valid"),
    [({"metrics": ["a", "b"]}, True), ({"metrics": [1]}, False), ({"metrics": {"a": 1}}, False)],
)
def test_inputs_that_are_lists_are_lists_of_references(agrees, section, is_valid):
    assert agrees.is_valid({"name": "lists", "stages": {"compare": section}}) == is_valid


def test_the_readme_s_sweep_key_seed_is_every_seed_of_the_quickstart():
    pipeline = load_pipeline(PROJECT / "pipelines" / "quickstart.yaml", ["seed=2"], environ={})

    assert [pipeline.stages[name].config.seed for name in ("train", "predict")] == [2, 2]
    assert pipeline.notes == ("'seed' sets stages.predict.seed, stages.train.seed",)
