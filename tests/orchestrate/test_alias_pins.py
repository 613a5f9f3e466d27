"""A pipeline that takes a checkpoint by an alias is planned with what it names then."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.orchestrate.pins.aliases import AliasPins
from redco_flow.orchestrate.run.plan import Plan, make_plan
from redco_flow.orchestrate.sweep.process import work_keys
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.aliases import AliasEvent, AliasName, AliasStore
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult, publish_result

PIPELINE = """\
name: demo
stages:
  reread:
    kind: orchestrate_kinds.reread
    checkpoint: "@production"
"""
OTHER = PIPELINE.replace("@production", "@other/staging")


@pytest.fixture
def checkpoint(planning, tmp_path):
    """Publish a checkpoint with this content."""

    def publish(content):
        path = tmp_path / "checkpoint.json"
        path.write_text(f'{{"total": {content}}}')
        return ArtifactStore(planning.workspace).publish("checkpoint", path)

    return publish


@pytest.fixture
def name(planning):
    """Have an alias name a checkpoint."""

    def name(artifact, model="demo", alias="production"):
        store, called = AliasStore(planning.workspace), AliasName(model, alias)
        event = AliasEvent("promoted", artifact.id, "2026-01-05T03:00:00.000+00:00", "ann")
        store.move(called, event, after=store.find(called))

    return name


def pinned(planning, text=PIPELINE):
    return AliasPins().pinned(planning.load(text), planning.workspace)


def fingerprint_of(planning, text=PIPELINE):
    return make_plan(pinned(planning, text)[0], planning.workspace).stages["reread"].fingerprint


def test_the_fingerprint_follows_the_checkpoint_and_never_the_alias(planning, checkpoint, name):
    one, other = checkpoint(1), checkpoint(2)
    name(one)
    name(one, "other", "staging")
    first = fingerprint_of(planning)

    assert fingerprint_of(planning, OTHER) == first

    name(other)
    assert fingerprint_of(planning) != first

    name(one)
    assert fingerprint_of(planning) == first


def test_the_plan_says_which_alias_gave_the_checkpoint(planning, checkpoint, name):
    one = checkpoint(1)
    name(one)

    _, [pin] = pinned(planning)

    assert (pin.stage, pin.slot, pin.alias) == ("reread", "checkpoint", "@demo/production")
    assert pin.checkpoint == one.id
    assert str(pin).startswith(
        f"alias: reread.checkpoint: @demo/production is checkpoint {one.id[:12]}"
    )
    assert Plan.from_json(Plan({}, aliases=(pin,)).to_json()).aliases == (pin,)


def test_a_run_that_is_loaded_again_has_the_checkpoint_it_was_planned_with(
    planning, checkpoint, name, tmp_path
):
    one, other = checkpoint(1), checkpoint(2)
    name(one)
    resolved, _ = pinned(planning)
    path = tmp_path / "resolved.yaml"
    path.write_text(write_yaml(resolved.document))

    name(other)
    again = load_pipeline(path)

    [ref] = again.stages["reread"].inputs["checkpoint"]
    assert (ref.artifact, ref.text()) == (one.id, f"@demo/production@{one.id}")
    assert make_plan(again, planning.workspace).stages["reread"].action == "run"
    assert again.document == resolved.document


def test_a_sweeps_points_share_what_one_checkpoint_makes(planning, checkpoint, name):
    name(checkpoint(1))
    name(checkpoint(1), "other", "staging")
    keys = [work_keys(pinned(planning, text)[0], planning.workspace) for text in (PIPELINE, OTHER)]
    name(checkpoint(2))

    assert keys[0] == keys[1]
    assert work_keys(pinned(planning)[0], planning.workspace) != keys[0]


def test_an_alias_that_names_nothing_is_told_with_its_line(planning):
    with pytest.raises(
        ConfigError, match=r"pipeline\.yaml:5:\d+: 'checkpoint' of stage 'reread': "
    ):
        pinned(planning)


def test_an_alias_of_a_checkpoint_that_is_gone_is_told_before_anything_runs(
    planning, checkpoint, name
):
    one = checkpoint(1)
    name(one)
    (one.path / "checkpoint.json").unlink()

    with pytest.raises(ConfigError, match=r"which is damaged, or gone from .* rollback"):
        pinned(planning)


def test_a_script_takes_a_checkpoint_by_its_alias(planning, checkpoint, name, tmp_path):
    one = checkpoint(1)
    name(one)
    (tmp_path / "script.py").write_text("")
    text = f"""\
name: demo
stages:
  read:
    kind: script
    path: {tmp_path}/script.py
    inputs: {{model: "@production"}}
"""

    resolved, [pin] = pinned(planning, text)

    assert pin.checkpoint == one.id
    assert resolved.document["stages"]["read"]["inputs"]["model"] == f"@demo/production@{one.id}"
    assert resolved.stages["read"].inputs["model"][0].artifact == one.id


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("dataset: '@production'", "takes dataset, and '@production' is an alias"),
        ("checkpoint: '@a/b/c'", "'@a/b/c' is no alias; write @ALIAS or @PIPELINE/ALIAS"),
    ],
)
def test_an_alias_names_a_checkpoint_alone(planning, line, problem):
    text = f"name: demo\nstages:\n  predict:\n    {line}\n"

    with pytest.raises(ConfigError, match=problem):
        planning.load(text)


WEEKLY = """\
name: weekly
stages:
  numbers: {kind: orchestrate_kinds.numbers, count: 3}
  train: {kind: orchestrate_kinds.begun, start_from: "@production"}
"""


def test_an_alias_of_an_optional_input_that_names_nothing_yet_is_left_out_and_told(planning):
    pipeline, [pin] = pinned(planning, WEEKLY)
    without = planning.load(WEEKLY.replace(', start_from: "@production"', ""))

    assert str(pin) == "train.start_from: @production names nothing yet; it is left out"
    assert pipeline.stages["train"].inputs == without.stages["train"].inputs
    assert "start_from" not in pipeline.document["stages"]["train"]
    again = load_pipeline(write_document(planning, pipeline))
    assert again.stages["train"].inputs == pipeline.stages["train"].inputs


def test_last_is_the_checkpoint_that_the_stage_published_last(planning, checkpoint):
    weekly = WEEKLY.replace("@production", "@last")
    _, [nothing] = pinned(planning, weekly)
    one = checkpoint(1)
    result = StageResult(
        fingerprint="f" * 64,
        pipeline="weekly",
        stage="train",
        kind="orchestrate_kinds.begun",
        ingredients={},
        outputs={"checkpoint/last": one.id},
        run="weekly-abc123",
        attempt=1,
    )
    publish_result(planning.workspace, result)

    pipeline, [pin] = pinned(planning, weekly)

    assert nothing.checkpoint == ""
    assert (pin.alias, pin.checkpoint) == ("@last", one.id)
    [ref] = pipeline.stages["train"].inputs["start_from"]
    assert ref.artifact == one.id
    assert f"@last@{one.id}" in write_yaml(pipeline.document)
    again = load_pipeline(write_document(planning, pipeline))
    assert AliasPins().pinned(again, planning.workspace)[0].stages == pipeline.stages


def test_last_is_refused_where_an_input_is_needed(planning):
    with pytest.raises(ConfigError, match="@last is for `start_from`"):
        planning.load(PIPELINE.replace("@production", "@last"))


def write_document(planning, pipeline):
    path = planning.workspace.root / "resolved.yaml"
    path.write_text(write_yaml(pipeline.document))
    return path
