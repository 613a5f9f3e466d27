"""Loading a pipeline: what it becomes, and every mistake at once with its place."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redco_flow.errors import ConfigError
from redco_flow.records import canonical_json, digest_json
from redco_flow.spec.load import InputRef, Origin, load_pipeline
from redco_flow.spec.yaml import write_yaml

CHAIN = (Path(__file__).parent / "kinds" / "chain.yaml").read_text(encoding="utf-8")


def told(problems) -> list[str]:
    """Return "line:column: message" of problems in a file."""
    return [f"{p.line}:{p.column}: {p.message}" for p in problems]


def test_a_chain_is_resolved_from_its_kinds_inputs_and_outputs(load, chain):
    pipeline = load(chain)

    assert list(pipeline.stages) == ["preprocess", "train", "predict", "evaluate"]
    assert pipeline.stages["predict"].inputs == {
        "dataset": (InputRef("preprocess", "dataset"),),
        "checkpoint": (InputRef("train", "checkpoint/best/rouge2"),),
    }
    assert pipeline.stages["train"].config.model.name_or_path == "google-t5/t5-base"
    assert pipeline.stages["train"].resources.gpus_per_host == 4


def test_settings_are_json_without_resources_placement_and_references(load, chain):
    stages = load(chain).stages

    assert stages["train"].settings == {
        "recipe": "my_kinds.recipe",
        "model": {
            "name_or_path": "google-t5/t5-base",
            "revision": None,
            "family": None,
            "config": {},
            "dtype": "float32",
            "from_scratch": False,
        },
        "learning_rate": 4e-5,
        "num_epochs": 1,
        "global_batch_size": 64,
        "schedule": {"type": "linear", "warmup_ratio": 0.0},
        "keep": {"last": 1, "best": ["rouge2"]},
        "shuffle": True,
    }
    for stage in stages.values():
        canonical_json(stage.settings)


@pytest.mark.parametrize(
    "override",
    [
        "stages.train.resources.num_hosts=4",
        "num_workers=8",
        "num_model_shards=8",
        "train.resources.walltime_minutes=3",
        "stages.predict.resources={gpus_per_host: 8}",
    ],
)
def test_where_and_how_fast_it_runs_never_enters_settings(load, chain, override):
    before = {name: stage.settings for name, stage in load(chain).stages.items()}
    after = {name: stage.settings for name, stage in load(chain, override).stages.items()}

    assert after == before


def test_a_data_file_enters_settings_by_its_name_only(load, chain, tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.csv").write_text("a,b\n")

    found = [
        load(chain, f"data.train={tmp_path / folder / 'train.csv'}").stages["preprocess"]
        for folder in ("here", "there")
    ]

    assert found[0].settings == found[1].settings
    assert found[0].settings["data"]["train"] == "train.csv"
    assert found[1].config.data.train == str(tmp_path / "there" / "train.csv")


def test_a_relative_data_file_means_the_current_directory(load, chain, tmp_path, monkeypatch):
    (tmp_path / "train.csv").write_text("a,b\n")
    monkeypatch.chdir(tmp_path)

    pipeline = load(chain, "data.train=train.csv")

    assert pipeline.document["data"]["train"] == str(tmp_path / "train.csv")


def test_a_data_file_that_is_not_there_is_told_with_its_line(problems, chain):
    text = chain.replace("source_key: document", "train: absent.csv")

    (problem,) = problems(text)

    assert (problem.line, problem.column) == (6, 3)
    assert "'data.train': there is no file" in problem.message


@pytest.mark.parametrize("written", ["1e-4", "0.0001", "1.0E-4"])
def test_a_learning_rate_is_a_float_however_it_is_written(load, chain, written):
    """Engine case 1: the value is a number, however it is written."""
    config = load(chain.replace("4e-5", written)).stages["train"].config

    assert config.learning_rate == 1e-4
    assert isinstance(config.learning_rate, float)


def test_a_duplicate_key_is_a_mistake_beside_all_others(problems, chain):
    """Engine case 2: the error names its line."""
    text = chain + "    metrics: [bleu]\n    metric: rouge\n"

    assert told(problems(text)) == [
        "23:5: duplicate key 'metrics'; the first is in line 22",
        "24:5: stage 'evaluate' has no key 'metric'; did you mean 'metrics'? "
        "Known keys: group, kind, metrics, predictions, resources, runs_on.",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("learning_rate:", "lerning_rate:", "13:5: stage 'train' has no key 'lerning_rate'; did "
         "you mean 'learning_rate'? Similar keys: learning_rate; all 14 are in the "),
        ("{last: 1,", "{lasst: 1,", "15:12: 'stages.train.keep' has no key 'lasst'; did you mean "
         "'last'? Known keys: best, last."),
        ("source_key:", "sauce_key:", "6:3: 'data' has no key 'sauce_key'; did you mean "
         "'source_key'? Similar keys: source_key, "),
        ("model:", "modell:", "3:1: the pipeline has no key 'modell'; did you mean 'model'? Known "
         "keys: data, description, model, name, notify, recipe, schedule, settings, stages, tags."),
        ("gpus_per_host", "gpus", "16:17: 'stages.train.resources' has no key 'gpus'; did you "
         "mean 'gpus_per_host'? Known keys: cpus_per_host,"),
        ("max_source_length: 128", "data: {sauce_key: x}", "10:12: 'stages.preprocess.data' has no "
         "key 'sauce_key'; did you mean 'source_key'?"),
        ("learning_rate:", "lora_r:", "13:5: stage 'train' has no key 'lora_r': it is Axolotl's "
         "name; here it is `lora.rank`."),
    ],
)  # fmt: skip
def test_an_unknown_key_is_told_with_its_place_and_the_nearest_name(
    problems, chain, old, new, expected
):
    """Engine case 3: the error names its position and the nearest known name. Fault 27: all
    mistakes are reported at once, each with its line; nothing is submitted.
    """
    found = told(problems(chain.replace(old, new, 1)))

    assert any(message.startswith(expected) for message in found), found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("64", "0", "14:5: 'stages.train.global_batch_size' must be greater than 0, not 0"),
        ("64", "-8", "14:5: 'stages.train.global_batch_size' must be greater than 0, not -8"),
        ("64", "64.0", "14:5: 'stages.train.global_batch_size' must be a whole number, not 64.0; "
         "write 64"),
        ("64", "'64'", "14:5: 'stages.train.global_batch_size' must be a whole number, not '64'"),
        ("64", "1_024", "14:5: 'stages.train.global_batch_size' must be a whole number, not "
         "'1_024'; write 1024"),
        ("64", "true", "14:5: 'stages.train.global_batch_size' must be a whole number, not true"),
        ("64", "", "14:5: 'stages.train.global_batch_size' must be a whole number, not null"),
        ("4e-5", "fast", "13:5: 'stages.train.learning_rate' must be a number, not 'fast'"),
        ("[rouge]", "rouge", "22:5: 'stages.evaluate.metrics' must be a list, not 'rouge'"),
        ("[rouge]", "[rouge, 2]", "22:22: 'stages.evaluate.metrics[1]' must be text, not 2; put it "
         "in quotes"),
        ("t5-base}", "t5-base, dtype: fp8}", "3:42: 'model.dtype' must be one of 'float32' or "
         "'bfloat16', not 'fp8'"),
        ("{gpus_per_host: 4}", "4", "16:5: 'stages.train.resources' must be a mapping of keys to "
         "values, not 4"),
        ("    learning_rate: 4e-5\n", "", "11:3: stage 'train' needs the key 'learning_rate'"),
        ("name: chain", "", "2:1: the pipeline needs the key 'name'"),
        ("recipe: my_kinds.recipe", "", "8:3: stage 'preprocess' needs the key 'recipe'; give it "
         "at the top level or in the stage"),
        ("recipe: my_kinds.recipe", "tags: 5", "2:1: 'tags' must be a list, not 5"),
    ],
)  # fmt: skip
def test_a_wrong_type_or_value_is_told_at_its_key(problems, chain, old, new, expected):
    """Engine case 4: the error comes before any job."""
    found = told(problems(chain.replace(old, new, 1)))

    assert expected in found, found


@pytest.mark.parametrize("written", ["no", "on", "1:30", "12:30:00", "010"])
def test_a_text_stays_that_text_and_a_boolean_is_true_or_false(load, problems, chain, written):
    """Engine case 5: the value is that text, or is refused."""
    text = chain.replace("max_source_length: 128", f"note: {written}")
    assert load(text).stages["preprocess"].config.note == written

    (problem,) = problems(chain.replace("4e-5", f"4e-5\n    shuffle: {written}"))
    assert f"'stages.train.shuffle' must be true or false, not '{written}'" in problem.message

    (problem,) = problems(chain.replace("64", written, 1))
    assert f"must be a whole number, not '{written}'" in problem.message


@pytest.mark.parametrize(
    ("override", "old", "new"),
    [
        ("learning_rate=1e-4", "4e-5", "0.0001"),
        ("stages.train.learning_rate=1", "4e-5", "1.0"),
        ("train.schedule.type=cosine", "4e-5", "4e-5\n    schedule: {type: cosine}"),
        ("keep={last: 2, best: [rouge2, rougeL]}", "{last: 1, best: [rouge2]}",
         "{best: [rouge2, rougeL], last: 2}"),
        ("data.source_key=text", "document", "'text'"),
        ("source_prefix=summarize: ", "source_key: document",
         "source_key: document\n  source_prefix: 'summarize: '"),
        ("note=no", "max_source_length: 128", "max_source_length: 128\n    note: 'no'"),
        ("model.config={d_model: 64}", "t5-base}", "t5-base, config: {d_model: 64}}"),
        ("config.d_model=64", "t5-base}", "t5-base, config: {d_model: 64}}"),
    ],
)  # fmt: skip
def test_a_setting_has_one_fingerprint_by_file_and_by_command_line(load, chain, override, old, new):
    """Engine case 7: the fingerprint is the same."""
    by_flag = {n: digest_json(s.settings) for n, s in load(chain, override).stages.items()}
    by_file = {n: digest_json(s.settings) for n, s in load(chain.replace(old, new)).stages.items()}
    neither = {n: digest_json(s.settings) for n, s in load(chain).stages.items()}

    assert by_flag == by_file
    assert by_flag != neither


def test_every_leaf_knows_where_it_comes_from(load, chain, tmp_path):
    pipeline = load(chain, "num_epochs=3")
    file = str(tmp_path / "pipeline.yaml")

    assert pipeline.origins["stages.train.learning_rate"] == Origin(file, 13, 5)
    assert pipeline.origins["stages.train.keep.best"] == Origin(file, 15, 21)
    assert pipeline.origins["stages.train.num_epochs"] == Origin("command line", 0, 0)
    assert pipeline.origins["stages.train.schedule.type"] == Origin("default", 0, 0)
    assert pipeline.origins["data.source_key"] == Origin(file, 6, 3)
    assert pipeline.origins["stages.preprocess.data.source_key"] == Origin(file, 6, 3)
    assert pipeline.origins["stages.predict.checkpoint"] == Origin(file, 19, 5)
    assert pipeline.stage_origins("train")["model.name_or_path"] == Origin(file, 3, 9)


def test_every_leaf_of_config_and_document_has_an_origin(load, chain):
    from redco_flow.spec.document import leaves
    from redco_flow.spec.names import dotted

    pipeline = load(chain)

    assert {dotted(leaf) for leaf in leaves(pipeline.document)} <= set(pipeline.origins)
    for name, stage in pipeline.stages.items():
        keys = {dotted(leaf) for leaf in leaves(stage.config.model_dump(mode="json"))}
        assert keys <= set(pipeline.stage_origins(name))


def test_a_stage_lays_its_own_values_over_a_section(load, chain):
    text = chain.replace("learning_rate: 4e-5", "learning_rate: 4e-5\n    model: {dtype: bfloat16}")

    pipeline = load(text)

    assert pipeline.stages["train"].config.model.name_or_path == "google-t5/t5-base"
    assert pipeline.stages["train"].config.model.dtype == "bfloat16"
    assert pipeline.document["stages"]["train"]["model"] == {"dtype": "bfloat16"}
    assert pipeline.document["model"]["dtype"] == "float32"


def test_the_resolved_document_loads_to_the_same_pipeline(load, write, chain):
    text = chain.replace("max_source_length: 128", "note: '$${x} 1e-4'\n    max_source_length: 128")
    first = load(text, "num_epochs=3", "model.config={eps: 1e-6}")

    second = load_pipeline(write(write_yaml(first.document), "resolved.yaml"))

    assert second.document == first.document
    assert second.stages["preprocess"].config.note == "${x} 1e-4"
    assert {n: s.settings for n, s in second.stages.items()} == {
        n: s.settings for n, s in first.stages.items()
    }
    assert list(second.stages) == list(first.stages)


def test_the_document_is_json_and_says_every_default(load, chain):
    document = load(chain).document

    assert json.loads(json.dumps(document)) == document
    assert document["stages"]["train"]["shuffle"] is True
    assert document["stages"]["predict"]["checkpoint"] == "train/best/rouge2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1:1: the pipeline needs the key 'name'"),
        ("- a", "1:1: a pipeline must be a mapping of keys to values: name, data, stages, …"),
        ("name: x\nstages: {}", "2:1: 'stages' must not be empty"),
        ("name: x\nstages:\n  a: 3", "3:3: 'stages.a' must be a mapping of keys to values, not 3"),
        ("name: x\nstages:\n  a: {kind: 3}", "3:7: 'stages.a.kind' must be text, not 3"),
        (
            "name: x\nstages:\n  trane: {}",
            "3:3: stage 'trane' has no 'kind', and there is no stage",
        ),
        ("name: x\nstages:\n  a: {kind: os.path}", "3:7: stage 'a': stage kind 'os.path'"),
        ("name: x\nstages:\n  a: {kind: no.such}", "3:7: stage 'a': there is no stage kind"),
        ("name: x\nstages:\n  a: {kind: '$(touch X)'}", "3:7: stage 'a': there is no stage kind"),
    ],
)
def test_what_is_no_pipeline_says_what_is_missing(problems, text, message):
    found = told(problems(text))

    assert any(line.startswith(message) for line in found), found


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/b", ".hidden", "a b", "-x", "x" * 65, "ä", "$(touch X)"]
)
def test_a_name_that_could_leave_the_workspace_is_refused(problems, chain, name):
    """Fault 29: the path is refused. Fault 30: they are passed on as text and never interpreted;
    control characters are refused.
    """
    (by_name,) = problems(chain.replace("name: chain", f"name: '{name}'"))
    assert (by_name.line, by_name.column) == (1, 1)
    assert "'name' must be a name (1 to 64 letters, digits" in by_name.message

    (by_stage,) = problems(chain.replace("  evaluate:", f"  '{name}':"))
    assert (by_stage.line, by_stage.column) == (20, 3)
    assert "is no name (1 to 64 letters, digits" in by_stage.message


@pytest.mark.parametrize("path", ["../../x", "/tmp/x", "a/../../b", "~/x"])
def test_a_path_that_is_written_may_not_leave_the_workspace(problems, chain, path):
    """Fault 29: the path is refused."""
    (problem,) = problems(chain.replace("max_source_length: 128", f"preview: {path}"))

    assert (problem.line, problem.column) == (10, 5)
    assert "'stages.preprocess.preview' must be a relative path" in problem.message


def test_a_link_that_leads_out_of_the_workspace_is_refused(load, problems, chain, tmp_path):
    """Fault 29: the path is refused."""
    from redco_flow.spec.profile import profile_model

    workspace = tmp_path / "workspace"
    (workspace / "inner").mkdir(parents=True)
    (workspace / "out").symlink_to(tmp_path)
    profile = profile_model()(workspace=str(workspace))

    load(chain, "preview=inner/x", profile=profile)
    (problem,) = problems(chain, "preview=out/x", profile=profile)

    assert "symbolic link that leads out of the workspace" in problem.message


def test_shell_text_in_any_value_is_never_run(load, problems, chain, tmp_path, monkeypatch):
    """Fault 30, shell words, quotes, line breaks in names and values: they are passed on as text
    and never interpreted; control characters are refused.
    """
    monkeypatch.chdir(tmp_path)
    evil = "$(touch X) `touch X`; touch X # 'q' \"q\" 😀"

    pipeline = load(chain + f"# {evil}\n", f"note={evil}", f"description={evil}")
    problems(chain, f"name={evil}", f"recipe={evil}", f"preprocess.kind={evil}", evil)

    assert pipeline.stages["preprocess"].config.note == evil
    assert pipeline.description == evil
    assert not (tmp_path / "X").exists()


def test_all_mistakes_are_told_at_once_with_their_lines(problems):
    """Fault 27: all mistakes are reported at once, each with its line; nothing is submitted."""
    text = """\
    name: broken
    recipe: my_kinds.recipe
    stages:
      first:
        kind: my_kinds.predict
        checkpoint: nowhere/best
      second:
        kind: my_kinds.evaluate
        predictions: third
        metrics: [rouge]
      third:
        kind: my_kinds.predict
        num_beems: 4
      second:
        kind: my_kinds.compare
    extra: 1
    """

    found = told(problems(text))

    assert [message.split(": ")[0] for message in found] == sorted(
        (message.split(": ")[0] for message in found),
        key=lambda place: tuple(map(int, place.split(":"))),
    )
    expected = [
        "4:3: stage 'first' needs 'dataset' (dataset), and no other stage produces that",
        "6:5: 'checkpoint' of stage 'first': there is no stage 'nowhere/best'",
        "11:3: stage 'third' needs 'checkpoint' (checkpoint), and no other stage produces that",
        "11:3: stage 'third' needs 'dataset' (dataset), and no other stage produces that",
        "13:5: stage 'third' has no key 'num_beems'; did you mean 'num_beams'?",
        "14:3: duplicate key 'second'; the first is in line 7",
        "16:1: the pipeline has no key 'extra'",
    ]
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected)), found


def test_a_mistake_in_a_section_is_told_once_though_several_stages_take_it(problems, chain):
    (problem,) = problems(chain.replace("t5-base}", "t5-base, dtype: 3}"))

    assert str(problem).endswith("'model.dtype' must be one of 'float32' or 'bfloat16', not 3")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("text_two_text", "'recipe': there is no recipe 'text_two_text'"),
        ("my_kinds.recipee", "'recipe': there is no recipe 'my_kinds.recipee'"),
        ("../evil", "'recipe': there is no recipe '../evil'"),
        ("my_kinds.recipe.inner", "'recipe': recipe 'my_kinds.recipe.inner': importing"),
    ],
)
def test_a_recipe_that_is_no_module_is_told_with_its_line(problems, chain, recipe, message):
    (problem,) = problems(chain.replace("my_kinds.recipe", recipe, 1))

    assert (problem.line, problem.column) == (2, 1)
    assert problem.message.startswith(message)


@pytest.mark.parametrize(
    "recipe", ["classificaton", "Classification", "text_classification", "python:nope", "recipe"]
)
@pytest.mark.parametrize("data", ["train: absent.csv", "train: there.csv"])
def test_data_is_not_read_for_a_recipe_that_does_not_exist(
    problems, tmp_path, monkeypatch, recipe, data
):
    """The second look into the data used to ask the recipe, which ended in a traceback."""
    (tmp_path / "there.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)

    found = problems(
        f"name: x\nrecipe: {recipe}\ndata: {{{data}, source_key: a, target_key: c}}\n"
        "stages: {preprocess: {}}\n",
        looks_into_data=True,
    )

    assert found[0].line == 2
    assert f"'recipe': there is no recipe '{recipe}'" in found[0].message
    assert [problem.line for problem in found[1:]] == [3] * ("absent" in data)


def test_a_wrong_path_is_told_at_its_own_line_with_the_nearest_name(
    problems, tmp_path, monkeypatch
):
    (tmp_path / "tickets.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)

    (problem,) = problems(
        "name: x\nrecipe: classification\ndata:\n  source_key: a\n  dataset: ticket.csv\n"
        "stages: {preprocess: {}}\n"
    )

    assert (problem.line, problem.column) == (5, 3)
    assert problem.message == (
        f"'data.dataset': there is no file or directory 'ticket.csv' (searched in '{tmp_path}'); "
        "did you mean 'tickets.csv'?"
    )


@pytest.mark.parametrize(
    "key", ["evaluate.metrics", "train.eval.metrics", "train.keep.best", "predict.stop", "tags"]
)
def test_one_word_alone_needs_no_brackets(key):
    quickstart = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"

    alone, listed = (
        load_pipeline(quickstart, [f"{key}={value}"], environ={}).document
        for value in ("bleu", "[bleu]")
    )

    assert alone == listed


def test_a_recipe_of_one_stage_is_told_at_that_stage(problems, chain):
    (problem,) = problems(chain.replace("4e-5", "4e-5\n    recipe: nowhere.recipe"))

    assert (problem.line, problem.column) == (14, 5)
    assert "'stages.train.recipe': there is no recipe 'nowhere.recipe'" in problem.message


TOKEN = "hf_" + "aB3d" * 8


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("source_key: document", f"hub_token: {TOKEN}"),
        ("source_key: document", "api_key: some plain words"),
        ("source_key: document", f"source_prefix: {TOKEN}"),
        ("t5-base}", f"t5-base, config: {{x: {TOKEN}}}}}"),
        ("[rouge]", f"[rouge, {TOKEN}]"),
        ("name: chain", f"name: {TOKEN}"),
        ("64", TOKEN),
        ("name: chain", f"{TOKEN}: chain"),
        ("  evaluate:", f"  {TOKEN}:"),
        ("my_kinds.train", TOKEN),
        ("best/rouge2", TOKEN),
        ("my_kinds.recipe", TOKEN),
        ("document", "${env:HF_TOKEN}"),
        ("document", "${env:HARMLESS}"),
    ],
)
def test_a_secret_is_refused_and_its_value_never_shown(problems, chain, old, new):
    """Fault 31: no log, record, job script, process list, error or page shows the secret."""
    found = problems(
        chain.replace(old, new, 1), environ={"HF_TOKEN": "plain words", "HARMLESS": TOKEN}
    )

    text = "\n".join(map(str, found))
    assert "secret" in text
    assert TOKEN not in text
    assert "plain words" not in text


@pytest.mark.parametrize(
    "override",
    [
        f"source_prefix={TOKEN}",
        f"nothing={TOKEN}",
        f"api_key={TOKEN}",
        TOKEN,
        f"{TOKEN}=1",
        f"keep={{last: {TOKEN}}}",
        f"tags=['{TOKEN}",
        f"learning_rate={TOKEN}",
    ],
)
def test_a_secret_in_an_override_is_never_shown(problems, chain, override):
    """Fault 31: no log, record, job script, process list, error or page shows the secret."""
    assert TOKEN not in "\n".join(map(str, problems(chain, override)))


def test_the_name_of_a_secret_s_variable_is_no_secret(load, chain):
    """Fault 31: no log, record, job script, process list, error or page shows the secret."""
    text = chain.replace("t5-base}", "t5-base, config: {hub_token_env: HF_TOKEN}}")

    assert load(text).document["model"]["config"] == {"hub_token_env": "HF_TOKEN"}


def test_loading_imports_no_framework_and_no_recipe(write, chain):
    """Login nodes load pipelines; the recipe here cannot even be imported."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from redco_flow.spec.load import load_pipeline\n"
        "load_pipeline(sys.argv[1])\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'transformers', 'datasets', 'prefect'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    kinds = str(Path(__file__).parent / "kinds")

    done = subprocess.run(
        [sys.executable, "-c", code, str(write(chain)), kinds],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.strip() == "[]"


def test_loading_takes_less_than_150_milliseconds(write, chain):
    path = write(chain)
    load_pipeline(path)  # imports the kinds

    seconds = []
    for _ in range(5):
        start = time.process_time()
        load_pipeline(path, ["learning_rate=1e-4"])
        seconds.append(time.process_time() - start)

    assert min(seconds) < 0.15


_VALUES = st.sampled_from(
    [
        "null",
        "1",
        "-1",
        "1e-4",
        "x",
        "[]",
        "{}",
        "[train]",
        "{a:",
        "1}",
        "train",
        "best/rouge2",
        "evaluate/x",
        "my_kinds.train",
        "${name}",
        "'${stages.train.outputs.checkpoint}'",
        "'${model}'",
        "'${stages}'",
        "${env:X,1}",
        "${",
        "&a",
        "*a",
        "'x'",
        '"\\0"',
    ]
) | st.text("ab.=~{}[]'\"$:,/ \x00", max_size=8)
_EDITS = st.tuples(
    st.sampled_from(["value", "key", "drop", "double", "indent"]),
    st.integers(0, len(CHAIN.splitlines()) - 1),
    _VALUES,
)
_OVERRIDES = st.sampled_from(
    [
        "train={kind: my_kinds.train}",
        "~stages.train",
        "stages=1",
        "model=1",
        "stages.a=null",
        "name=${name}",
        "~name",
        "evaluate.kind=my_kinds.compare",
        "stages.new={kind: my_kinds.compare, scores: [new]}",
    ]
)


def _edited(lines: list[str], operation: str, index: int, text: str) -> list[str]:
    line = lines[index % len(lines)]
    key, _, value = line.partition(":")
    new = {
        "value": [f"{key}: {text}"],
        "key": [f"{' ' * (len(key) - len(key.lstrip()))}{text}:{value}"],
        "drop": [],
        "double": [line, line],
        "indent": [f" {line}"],
    }[operation]
    position = index % len(lines)
    return [*lines[:position], *new, *lines[position + 1 :]] or ["name: x"]


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(_EDITS, max_size=3),
    st.lists(
        _OVERRIDES | st.builds("{}={}".format, st.sampled_from(["name", "train.keep"]), _VALUES),
        max_size=2,
    ),
)
def test_any_file_and_overrides_give_a_pipeline_or_a_configuration_error(
    tmp_path, chain, edits, overrides
):
    lines = chain.splitlines()
    for edit in edits:
        lines = _edited(lines, *edit)
    path = tmp_path / "fuzz.yaml"
    path.write_text("\n".join(lines))

    try:
        pipeline = load_pipeline(path, overrides, environ={})
    except ConfigError as error:
        str(error).encode()
    else:
        path.write_text(write_yaml(pipeline.document))
        assert load_pipeline(path, environ={}).document == pipeline.document
