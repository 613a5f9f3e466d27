"""The stage kind promote: what it writes down, and what the launcher makes of it."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from redco_flow.runtime.context import FinishedStage, InputArtifact
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.stages.promote.run import run
from redco_flow.tracking.aliases import AliasStore
from redco_flow.tracking.promotion import roll_back
from redco_flow.tracking.results import StageResult
from tests.cli.promoting import Shop, right

PROMOTE = find_stage_kind("promote")


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


def config(**settings):
    return PROMOTE.config_type.from_json(settings)


def finished(shop, checkpoint, fingerprint="a" * 64):
    """The stage's result for a checkpoint, in a run of the pipeline demo."""
    ingredients = {"inputs": {"checkpoint": [checkpoint.id], "metrics": []}}
    result = StageResult(fingerprint, "demo", "promote", "promote", ingredients, {})
    return FinishedStage(shop.workspace, "demo", "demo-abc123", result)


def current(shop, text="@demo/production"):
    return AliasStore(shop.workspace).get(text)


def test_the_stage_writes_down_what_is_asked_for(bench):
    one, other = (InputArtifact(digit * 64, "checkpoint", bench.root, {}) for digit in "ab")
    context = bench.context("promote", {"checkpoint": [one], "metrics": [other]})

    made = run(context, config(alias="best", conditions=["bleu > best"]))

    record = json.loads(made.outputs["promotion"].path.read_text())
    assert (record["checkpoint"], record["metrics"]) == ("a" * 64, ["b" * 64])
    assert (record["alias"], record["conditions"]) == ("best", ["bleu > best"])


def test_the_launcher_promotes_the_checkpoint_once_for_all_runs_with_the_result(shop):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    PROMOTE.conclude(config(), finished(shop, first))
    asked = finished(shop, second, "b" * 64)

    said = PROMOTE.conclude(config(reason="weekly"), asked)
    again = PROMOTE.conclude(config(), replace(asked, run="demo-later1"))

    assert said == again == f"@demo/production names checkpoint {second.short_id}"
    assert len(current(shop).history) == 2
    assert (current(shop).current.reason, current(shop).current.decision) == ("weekly", "b" * 64)


def test_what_a_person_rolled_back_is_not_promoted_again_by_the_same_result(shop):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    PROMOTE.conclude(config(), finished(shop, first))
    PROMOTE.conclude(config(), finished(shop, second, "b" * 64))
    roll_back(shop.workspace, current(shop))

    said = PROMOTE.conclude(config(), finished(shop, second, "b" * 64))

    assert said == f"was promoted before; @demo/production names {first.short_id} since"
    assert current(shop).checkpoint == first.id


def test_a_checkpoint_that_is_not_better_is_no_failure_and_the_reason_is_told(shop):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    shop.evaluation(first, right(100))
    shop.evaluation(second, right(80))
    better = config(conditions=["exact_match > production"])
    PROMOTE.conclude(better, finished(shop, first))

    said = PROMOTE.conclude(better, finished(shop, second, "b" * 64))

    assert said.startswith("not promoted: exact_match 40 is no better than @demo/production's 50")
    assert current(shop).checkpoint == first.id


def test_another_pipelines_alias_is_named_with_it(shop):
    PROMOTE.conclude(config(alias="@other/production"), finished(shop, shop.checkpoint("first")))

    assert current(shop, "@other/production").current.by


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"alias": "a b"}, "is not a name"),
        ({"conditions": ["rougeL"]}, "is no condition"),
        ({"min_gain": -1}, "greater than or equal to 0"),
        ({"confidence": 1}, "less than 1"),
    ],
)
def test_what_cannot_be_meant_is_told_when_the_pipeline_is_read(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        config(**settings)
