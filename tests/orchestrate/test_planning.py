"""The plan: what is reused, what runs, and why. No server, no process."""

import json
import shutil

import pytest
from orchestrate_runs import DIAMOND, TUNED, TWO_STAGES

from redco_flow.errors import UsageError
from redco_flow.orchestrate.run.ingredients import Sources, identity_of, stage_ingredients
from redco_flow.orchestrate.run.plan import Plan, input_ids, upstream_of
from redco_flow.orchestrate.sweep.planned_jobs import work_keys
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult, differences, fingerprint, publish_result

LOGS = """\
name: logs
recipe: text_to_text
data: {tokenizer: {train: {vocab_size: 300}}}
stages: {preprocess: {}}
"""
FOLDERS = """\
name: folders
recipe: image_classification
data: {{dataset: {0}/images}}
stages:
  preprocess: {{}}
  one: {{kind: script, path: {0}/look.py, inputs: {{images: {0}/images}}}}
  several: {{kind: script, path: {0}/look.py, inputs: {{a: {0}/images/cats, b: {0}/images/dogs}}}}
"""
CHATS = """\
name: chats
recipe: chat
data: {{dataset: {0}/chats, chat_template: chatml, tokenizer: {{train: {{vocab_size: 300}}}}}}
stages: {{preprocess: {{}}}}
"""
PUBLISHED = """\
name: published
recipe: language_modeling
model: &model {{name_or_path: {1}}}
data: {{train: {0}/rows.jsonl}}
stages:
  preprocess: {{max_source_length: 16}}
  train: {{dataset: preprocess}}
  predict: {{pretrained: *model, dataset: preprocess}}
"""
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32}
OUTPUTS = {
    "orchestrate_kinds.numbers": {"dataset": "dataset"},
    "orchestrate_kinds.total": {"metrics": "metrics", "checkpoint": "checkpoint"},
    "orchestrate_kinds.score": {"predictions": "predictions"},
}


@pytest.fixture
def publish(runs, tmp_path):
    """Publish a result for every stage of a pipeline, as if it had run."""

    def publish(text, overrides=()):
        resolved = runs.load(text, overrides)
        made = {}
        for name, stage in resolved.stages.items():
            ingredients = stage_ingredients(stage, input_ids(stage, made), runs.workspace)
            file = tmp_path / "content"
            file.write_text(f"{name} {overrides}")
            store = ArtifactStore(runs.workspace)
            made[name] = {
                output: store.publish(kind, file).id for output, kind in OUTPUTS[stage.kind].items()
            }
            result = StageResult(
                fingerprint=fingerprint(ingredients),
                pipeline=resolved.name,
                stage=name,
                kind=stage.kind,
                ingredients=ingredients,
                outputs=made[name],
                run="earlier-run",
            )
            publish_result(runs.workspace, result)
        return made

    return publish


def actions(plan):
    return {name: stage.action for name, stage in plan.stages.items()}


def test_a_first_plan_runs_the_sources_and_lets_the_others_wait(runs):
    plan = runs.plan(TWO_STAGES)

    assert actions(plan) == {"preprocess": "run", "train": "wait"}
    assert plan.stages["preprocess"].reason == "first run"
    assert plan.stages["train"].reason == "upstream preprocess runs"
    assert plan.stages["train"].fingerprint is None


def test_an_unchanged_pipeline_reuses_every_stage(runs, publish):
    publish(DIAMOND)

    plan = runs.plan(DIAMOND)

    assert set(actions(plan).values()) == {"reuse"}
    assert plan.stages["compare"].reason == "unchanged since earlier-run"


def test_changing_one_setting_reuses_upstream_and_names_the_key_with_its_line(runs, publish):
    publish(TWO_STAGES)
    changed = TWO_STAGES.replace("total}", "total, learning_rate: 2e-4}")

    plan = runs.plan(changed)

    assert actions(plan) == {"preprocess": "reuse", "train": "run"}
    reason = plan.stages["train"].reason
    assert reason.startswith("learning_rate: 0.0001 → 0.0002 (")
    assert reason.endswith("pipeline.yaml:5)")


def test_a_setting_by_flag_has_the_same_fingerprint_as_by_file(runs):
    """Engine case 7: the fingerprint is the same."""
    by_file = runs.plan(TWO_STAGES.replace("numbers}", "numbers, count: 7}"))
    by_flag = runs.plan(TWO_STAGES, ["preprocess.count=7"])

    assert by_flag.stages["preprocess"].fingerprint == by_file.stages["preprocess"].fingerprint


def test_a_reason_names_the_command_line_where_the_setting_came_from_there(runs, publish):
    publish(TWO_STAGES)

    plan = runs.plan(TWO_STAGES, ["learning_rate=3e-4"])

    assert plan.stages["train"].reason == "learning_rate: 0.0001 → 0.0003 (command line)"


def test_where_and_how_fast_a_stage_runs_is_no_reason_to_run_it_again(runs, publish):
    publish(TWO_STAGES)

    plan = runs.plan(TWO_STAGES, ["train.resources.walltime_minutes=5", "train.gate=/x"])

    assert set(actions(plan).values()) == {"reuse"}


def test_a_changed_data_file_runs_its_stage_and_is_named(runs, publish, tmp_path):
    """Engine case 32: the stage fails with an error."""
    data = tmp_path / "numbers.json"
    data.write_text("[1, 2]")
    publish(TWO_STAGES, [f"preprocess.file={data}"])
    data.write_text("[1, 2, 3]")

    plan = runs.plan(TWO_STAGES, [f"preprocess.file={data}"])

    assert plan.stages["preprocess"].reason == "data numbers.json changed"


def test_the_same_data_in_another_folder_is_the_same_data(runs, publish, tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "numbers.json").write_text("[1, 2]")
    publish(TWO_STAGES, [f"preprocess.file={tmp_path}/here/numbers.json"])

    plan = runs.plan(TWO_STAGES, [f"preprocess.file={tmp_path}/there/numbers.json"])

    assert plan.stages["preprocess"].action == "reuse"


@pytest.fixture
def save_model(tmp_path):
    """Write a model's directory and rows beside it."""

    def save_model(name):
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(GPT2))
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "tokenizer.json").write_text("{}")
        return tmp_path / name

    return save_model


def test_a_model_is_identified_by_its_files_wherever_its_directory_is(runs, save_model, tmp_path):
    def stages(folder):
        pipeline = runs.load(PUBLISHED.format(tmp_path, tmp_path / folder))
        resolved = pipeline.stages.items()
        made = {name: stage_ingredients(one, {}, runs.workspace) for name, one in resolved}
        identities = [identity_of(pipeline, runs.workspace, Sources())]
        identities += work_keys(pipeline, runs.workspace).values()
        return made, {name: fingerprint(one) for name, one in made.items()} | {"": identities}

    save_model("here")
    recorded, here = stages("here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    _, there = stages("there")
    (tmp_path / "there" / "model.safetensors").write_bytes(b"others")
    _, changed = stages("there")

    assert there == here
    assert recorded["train"]["settings"]["model"]["name_or_path"] == f"{tmp_path}/here"
    [found] = differences(recorded["train"], stages("there")[0]["train"])
    assert found.key == "data.model.safetensors"
    assert changed["preprocess"] == here["preprocess"]  # it reads the tokenizer alone
    assert all(changed[name] != here[name] for name in ("train", "predict"))


@pytest.mark.parametrize(
    ("digested", "is_one"),
    [
        ([], False),
        (["config.json"], False),
        (["model.safetensors", "config.json"], False),
        (["config.json", "model.safetensors", "tokenizer.json"], True),
    ],
)
def test_a_model_s_path_counts_until_all_its_files_are_digested(runs, save_model, digested, is_one):
    """The same model in two places: what is not digested might differ."""
    given = [f"train.digested={json.dumps(digested)}"]
    texts = [TUNED.format(save_model(name)) for name in ("one", "two")]
    found = {runs.plan(text, given).stages["train"].fingerprint for text in texts}

    assert len(found) == (1 if is_one else 2)


def test_what_changed_beside_a_model_s_directory_is_told_as_it_is(runs, save_model):
    [here, there] = map(save_model, ("here", "there"))
    given = [f"train.digested={json.dumps([path.name for path in here.iterdir()])}"]
    stages = [runs.load(TUNED.format(one), given).stages["train"] for one in (here, there)]
    now, moved = (stage_ingredients(one, {}, runs.workspace) for one in stages)
    of_hub = {**now, "settings": {**now["settings"], "model": {"name_or_path": "gpt2"}}}
    old, of_hub = ({**one} for one in (now, of_hub))
    del old["directories"], of_hub["directories"]

    def reason_after(ingredients):
        result = StageResult(
            fingerprint(ingredients), "tuned", "train", "orchestrate_kinds.tuned", ingredients, {}
        )
        publish_result(runs.workspace, result)
        return runs.plan(TUNED.format(here), given).stages["train"].reason

    assert not list(differences(moved, now))
    [difference] = differences(old, moved)
    assert str(difference) == f"settings.model.name_or_path: {here} → {there}"
    assert (
        reason_after(old) == "an earlier version of redco-flow identified its result in another way"
    )
    assert reason_after(of_hub).startswith("model.name_or_path: gpt2 → /")


def test_the_place_of_a_file_in_a_folder_of_data_is_part_of_the_fingerprint(runs, tmp_path):
    (tmp_path / "look.py").write_text("")
    for name in ("cats/1.png", "cats/2.png", "dogs/1.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_text(name)

    def fingerprints():
        stages = runs.load(FOLDERS.format(tmp_path)).stages.values()
        return [fingerprint(stage_ingredients(one, {}, runs.workspace)) for one in stages]

    before = fingerprints()
    moved = (tmp_path / "images/cats/2.png").rename(tmp_path / "images/dogs/2.png")
    after = fingerprints()
    moved.rename(tmp_path / "images/cats/2.png")

    assert all(old != new for old, new in zip(before, after, strict=True))
    assert fingerprints() == before


def test_a_folder_that_has_the_name_of_a_chat_template_is_no_folder_of_data(
    runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.jsonl").write_text("{}")
    stage = runs.load(CHATS.format(tmp_path)).stages["preprocess"]

    before = stage_ingredients(stage, {}, runs.workspace)
    (tmp_path / "chatml").mkdir()

    assert stage_ingredients(stage, {}, runs.workspace) == before


def test_plans_that_share_what_was_looked_at_differ_by_their_data_files(runs, tmp_path):
    sources = Sources()
    given = []
    for name, content in (("one", "[1, 2]"), ("two", "[1, 2, 3]")):
        (tmp_path / f"{name}.json").write_text(content)
        given.append([f"preprocess.file={tmp_path}/{name}.json"])

    shared = [runs.plan(TWO_STAGES, one, sources=sources) for one in given]

    assert shared == [runs.plan(TWO_STAGES, one) for one in given]
    assert shared[0].stages["preprocess"].fingerprint != shared[1].stages["preprocess"].fingerprint


def test_a_stage_whose_artifact_was_deleted_runs_again(runs, publish):
    """Fault 40: the artifact is made again; no path to the deleted one is used."""
    made = publish(TWO_STAGES)
    artifact = ArtifactStore(runs.workspace).get(made["train"]["checkpoint"])
    for file in artifact.path.iterdir():
        file.unlink()

    plan = runs.plan(TWO_STAGES)

    assert actions(plan) == {"preprocess": "reuse", "train": "run"}
    assert plan.stages["train"].reason == "artifact missing"


@pytest.mark.parametrize("output", ["checkpoint", "metrics"])
def test_a_stage_whose_artifact_has_a_flipped_bit_runs_again(runs, publish, output):
    """Faults 22 and 41: the flip is detected in any file; the flip is detected before a stage reads
    the artifact; it is made again, and nothing made from it is reused.
    """
    made = publish(TWO_STAGES)
    artifact = ArtifactStore(runs.workspace).get(made["train"][output])
    [file] = artifact.path.iterdir()
    file.chmod(0o644)
    file.write_bytes(file.read_bytes().swapcase())

    plan = runs.plan(TWO_STAGES)

    assert actions(plan) == {"preprocess": "reuse", "train": "run"}
    assert plan.stages["train"].reason.startswith(f"damaged: {file}: its bytes are not what was")


def test_a_forced_stage_runs_and_what_needs_it_waits(runs, publish):
    publish(TWO_STAGES)

    plan = runs.plan(TWO_STAGES, force=["preprocess"])

    assert actions(plan) == {"preprocess": "run", "train": "wait"}
    assert plan.stages["preprocess"].reason == "forced"


def test_until_leaves_out_what_the_stage_does_not_need(runs):
    plan = runs.plan(DIAMOND, until_stage="train-small")

    assert actions(plan) == {
        "preprocess": "run",
        "train-small": "wait",
        "train-large": "skip",
        "compare": "skip",
    }


def test_from_leaves_the_earlier_stages_alone(runs, publish):
    publish(DIAMOND)

    plan = runs.plan(DIAMOND, ["train-small.learning_rate=5e-4"], from_stage="train-small")

    assert actions(plan) == {
        "preprocess": "reuse",
        "train-small": "run",
        "train-large": "reuse",
        "compare": "wait",
    }


def test_from_is_refused_while_an_earlier_result_is_missing(runs):
    with pytest.raises(UsageError, match=r"needs the result of stage 'preprocess'.*first run"):
        runs.plan(TWO_STAGES, from_stage="train")
    with pytest.raises(UsageError, match="leave no stage: 'preprocess' does not need"):
        runs.plan(TWO_STAGES, from_stage="train", until_stage="preprocess")


def test_an_unknown_stage_is_refused_with_the_known_ones(runs):
    with pytest.raises(UsageError, match=r"--force trian.*preprocess, train"):
        runs.plan(TWO_STAGES, force=["trian"])


def test_a_plan_survives_its_file(runs):
    plan = runs.plan(DIAMOND)

    assert Plan.from_json(plan.to_json()) == plan


def test_a_stage_that_takes_two_artifacts_of_one_stage_needs_it_once(runs):
    resolved = runs.load(DIAMOND)

    assert upstream_of(resolved.stages["compare"]) == ("train-small", "train-large")


def test_planning_imports_neither_prefect_nor_jax():
    import subprocess
    import sys

    code = (
        "import sys, redco_flow.orchestrate.run.plan, redco_flow.orchestrate.run.start, "
        "redco_flow.orchestrate.run.cancel, redco_flow.orchestrate.prefect.server; "
        "print([m for m in ('prefect', 'jax', 'submitit', 'datasets') if m in sys.modules])"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "[]"


def test_an_identity_follows_the_files_that_match_a_pattern_and_what_stands_in_them(runs, tmp_path):
    """What a schedule's firing asks: is there anything new?"""

    def identity(train="logs/*.jsonl"):
        resolved = runs.load(LOGS, [f"data.train={tmp_path}/{train}"])
        return identity_of(resolved, runs.workspace, Sources())

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_text('{"source": "a", "target": "b"}\n')
    first = identity()
    (tmp_path / "logs" / "b.jsonl").write_text('{"source": "c", "target": "d"}\n')
    with_a_file_more = identity()
    (tmp_path / "logs" / "b.jsonl").write_text('{"source": "c", "target": "e"}\n')
    with_other_content = identity()

    assert len({first, with_a_file_more, with_other_content}) == 3
    assert with_other_content == identity() == identity("lo*/*.jsonl")
