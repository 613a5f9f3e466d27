"""The JSON Schema agrees with loading on what is right and what is wrong."""

from __future__ import annotations

import json

import jsonschema
import pytest

from redco_flow.spec.profile import profile_model
from redco_flow.spec.schema import json_schema, schema_of
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.spec.yaml import read_yaml


@pytest.fixture
def check():
    """Check a text against the schema of pipelines with the kinds of these tests."""
    kinds = [
        find_stage_kind(f"my_kinds.{name}")
        for name in ("preprocess", "train", "predict", "evaluate", "compare")
    ]
    schema = schema_of(kinds)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    return lambda text: validator.is_valid(read_yaml(text, "f.yaml").values)


def test_the_schema_of_the_built_in_kinds_is_a_json_schema():
    schema = json_schema()

    jsonschema.Draft202012Validator.check_schema(json.loads(json.dumps(schema)))
    assert {"name", "model", "data", "stages"} <= set(schema["properties"])


def test_a_pipeline_that_loads_is_valid(check, chain):
    assert check(chain)
    assert check(chain.replace("4e-5", "'${env:RATE}'"))
    assert check(chain.replace("my_kinds.train", "someone.elses_kind"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("source_key", "sauce_key"),
        ("name: chain", "name: a b"),
        ("  evaluate:", "  evaluate me:"),
        ("t5-base}", "t5-base, dtype: fp8}"),
        ("stages:", "stage:"),
        ("    kind: my_kinds.train\n", ""),
    ],
)
def test_a_pipeline_with_a_mistake_is_not_valid(check, chain, old, new):
    assert not check(chain.replace(old, new, 1))


def test_every_key_of_a_pipeline_and_of_a_profile_is_described():
    """Editors show it, and the reference of the documentation is made of it."""
    silent = []

    for name, schema in (
        ("pipeline", json_schema()),
        ("profile", profile_model().model_json_schema()),
    ):
        for title, section in ((name, schema), *schema["$defs"].items()):
            keys = section.get("properties", {}).items()
            silent += [f"{title}.{key}" for key, body in keys if not body.get("description")]

    assert silent == []
