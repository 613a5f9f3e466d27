"""A pipeline that takes a checkpoint by an alias is planned with what it names then."""

from dataclasses import replace

import pytest

from redco_flow.errors import ConfigError
from redco_flow.orchestrate.pins.aliases import AliasPins
from redco_flow.orchestrate.run.plan import Plan, make_plan
from redco_flow.orchestrate.sweep.planned_jobs import work_keys
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.aliases import AliasEvent, AliasName, AliasStore
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult, publish_result
from redco_flow.tracking.run_directory import RunDirectory

PIPELINE = """\
name: demo
stages:
  reread:
    kind: orchestrate_kinds.reread
    checkpoint: "@production"
"""
OTHER = PIPELINE.replace("@production", "@other/staging")


@pytest.fixture
def checkpoint(runs, tmp_path):
    """Publish a checkpoint with this content."""

    def publish(content):
        path = tmp_path / "checkpoint.json"
        path.write_text(f'{{"total": {content}}}')
        return ArtifactStore(runs.workspace).publish("checkpoint", path)

    return publish


@pytest.fixture
def name(runs):
    """Have an alias name a checkpoint."""

    def name(artifact, model="demo", alias="production"):
        store, called = AliasStore(runs.workspace), AliasName(model, alias)
        event = AliasEvent("promoted", artifact.id, "2026-01-05T03:00:00.000+00:00", "ann")
        store.move(called, event, after=store.find(called))

    return name


def pinned(runs, text=PIPELINE):
    return AliasPins().pinned(runs.load(text), runs.workspace)


def fingerprint_of(runs, text=PIPELINE):
    return make_plan(pinned(runs, text)[0], runs.workspace).stages["reread"].fingerprint


def test_the_fingerprint_follows_the_checkpoint_and_never_the_alias(runs, checkpoint, name):
    one, other = checkpoint(1), checkpoint(2)
    name(one)
    name(one, "other", "staging")
    first = fingerprint_of(runs)

    assert fingerprint_of(runs, OTHER) == first

    name(other)
    assert fingerprint_of(runs) != first

    name(one)
    assert fingerprint_of(runs) == first


def test_the_plan_says_which_alias_gave_the_checkpoint(runs, checkpoint, name):
    one = checkpoint(1)
    name(one)

    _, [pin] = pinned(runs)

    assert (pin.stage, pin.slot, pin.alias) == ("reread", "checkpoint", "@demo/production")
    assert pin.checkpoint == one.id
    assert str(pin).startswith(
        f"alias: reread.checkpoint: @demo/production is checkpoint {one.id[:12]}"
    )
    assert Plan.from_json(Plan({}, aliases=(pin,)).to_json()).aliases == (pin,)


def test_a_run_that_is_loaded_again_has_the_checkpoint_it_was_planned_with(
    runs, checkpoint, name, tmp_path
):
    one, other = checkpoint(1), checkpoint(2)
    name(one)
    resolved, _ = pinned(runs)
    path = tmp_path / "resolved.yaml"
    path.write_text(write_yaml(resolved.document))

    name(other)
    again = load_pipeline(path)

    [ref] = again.stages["reread"].inputs["checkpoint"]
    assert (ref.artifact, ref.text()) == (one.id, f"@demo/production@{one.id}")
    assert make_plan(again, runs.workspace).stages["reread"].action == "run"
    assert again.document == resolved.document


def test_a_checkpoint_is_named_by_its_id_or_the_beginning_of_it(runs, checkpoint, name, tmp_path):
    one = checkpoint(1)
    name(one)
    text = PIPELINE.replace("@production", one.id[:12])

    resolved, pins = pinned(runs, text)

    assert pins == ()
    assert resolved.document["stages"]["reread"]["checkpoint"] == one.id
    assert fingerprint_of(runs, text) == fingerprint_of(runs)
    again = load_pipeline(write_document(runs, resolved))
    assert again.stages["reread"].inputs == resolved.stages["reread"].inputs
    with pytest.raises(
        ConfigError, match=r"pipeline\.yaml:5:\d+: 'checkpoint' of stage 'reread': "
    ):
        pinned(runs, PIPELINE.replace("@production", "0123456789ab"))


def test_a_checkpoint_is_named_by_its_run_the_newest_of_several(runs, checkpoint):
    best, last = checkpoint(1), checkpoint(2)
    run = RunDirectory.create(runs.workspace, "first", argv=[])
    outputs = {"checkpoint/best/bleu": best.id, "checkpoint/last": last.id}
    result = StageResult(
        fingerprint="f" * 64, pipeline="first", stage="train", run=run.id, kind="train",
        ingredients={"inputs": {}}, outputs=outputs, inputs_verified=True,
    )  # fmt: skip
    publish_result(runs.workspace, result)
    entry = {"state": "completed", "fingerprint": result.fingerprint, "artifacts": outputs}
    used = {"inputs": {"checkpoint": [best.id]}}
    predicted = replace(
        result, fingerprint="e" * 64, stage="predict", kind="predict", ingredients=used, outputs={}
    )
    publish_result(runs.workspace, predicted)
    last_entry = {"state": "completed", "fingerprint": predicted.fingerprint, "artifacts": {}}
    run.write_state({"state": "completed", "stages": {"train": entry, "predict": last_entry}})

    for text in (run.id, f"{run.id}/train", f"{run.id}/train/best/bleu"):
        resolved, [pin] = pinned(runs, PIPELINE.replace("@production", text))

        wanted = best if "best" in text else last
        assert resolved.document["stages"]["reread"]["checkpoint"] == wanted.id
        assert str(pin) == f"run: reread.checkpoint: {text} is checkpoint {wanted.id[:12]}"
    with pytest.raises(ConfigError, match=r"pipeline\.yaml:5:\d+: 'checkpoint' .*no run"):
        pinned(runs, PIPELINE.replace("@production", "first-abcdef"))
    misspelt = PIPELINE.replace("@production", "first-warmup").replace("reread:", "first-warmupp:")
    with pytest.raises(ConfigError, match=r"no run .*; did you mean 'first-warmupp'"):
        pinned(runs, misspelt)


def test_a_sweeps_points_share_what_one_checkpoint_makes(runs, checkpoint, name):
    name(checkpoint(1))
    name(checkpoint(1), "other", "staging")
    keys = [work_keys(pinned(runs, text)[0], runs.workspace) for text in (PIPELINE, OTHER)]
    name(checkpoint(2))

    assert keys[0] == keys[1]
    assert work_keys(pinned(runs)[0], runs.workspace) != keys[0]


def test_an_alias_that_names_nothing_is_told_with_its_line(runs):
    with pytest.raises(
        ConfigError, match=r"pipeline\.yaml:5:\d+: 'checkpoint' of stage 'reread': "
    ):
        pinned(runs)


def test_an_alias_of_a_checkpoint_that_is_gone_is_told_before_anything_runs(runs, checkpoint, name):
    one = checkpoint(1)
    name(one)
    (one.path / "checkpoint.json").unlink()

    with pytest.raises(ConfigError, match=r"which is damaged, or gone from .* rollback"):
        pinned(runs)


def test_a_script_takes_a_checkpoint_by_its_alias(runs, checkpoint, name, tmp_path):
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

    resolved, [pin] = pinned(runs, text)

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
def test_an_alias_names_a_checkpoint_alone(runs, line, problem):
    text = f"name: demo\nstages:\n  predict:\n    {line}\n"

    with pytest.raises(ConfigError, match=problem):
        runs.load(text)


WEEKLY = """\
name: weekly
stages:
  numbers: {kind: orchestrate_kinds.numbers, count: 3}
  train: {kind: orchestrate_kinds.begun, start_from: "@production"}
"""


def test_an_alias_of_an_optional_input_that_names_nothing_yet_is_left_out_and_told(runs):
    pipeline, [pin] = pinned(runs, WEEKLY)
    without = runs.load(WEEKLY.replace(', start_from: "@production"', ""))

    assert str(pin) == "train.start_from: @production names nothing yet; it is left out"
    assert pipeline.stages["train"].inputs == without.stages["train"].inputs
    assert "start_from" not in pipeline.document["stages"]["train"]
    again = load_pipeline(write_document(runs, pipeline))
    assert again.stages["train"].inputs == pipeline.stages["train"].inputs


def test_last_is_the_checkpoint_that_the_stage_published_last(runs, checkpoint):
    weekly = WEEKLY.replace("@production", "@last")
    _, [nothing] = pinned(runs, weekly)
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
    publish_result(runs.workspace, result)

    pipeline, [pin] = pinned(runs, weekly)

    assert nothing.checkpoint == ""
    assert (pin.alias, pin.checkpoint) == ("@last", one.id)
    [ref] = pipeline.stages["train"].inputs["start_from"]
    assert ref.artifact == one.id
    assert f"@last@{one.id}" in write_yaml(pipeline.document)
    again = load_pipeline(write_document(runs, pipeline))
    assert AliasPins().pinned(again, runs.workspace)[0].stages == pipeline.stages


def test_last_is_refused_where_an_input_is_needed(runs):
    with pytest.raises(ConfigError, match="@last is for `start_from`"):
        runs.load(PIPELINE.replace("@production", "@last"))


def write_document(runs, pipeline):
    path = runs.workspace.root / "resolved.yaml"
    path.write_text(write_yaml(pipeline.document))
    return path
