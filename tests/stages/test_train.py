"""train and predict with a real tiny T5: what comes out, and what is refused before a step."""

import logging
import re
from datetime import datetime

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from stage_kinds import predict, preprocess, train

from redco_flow.cli.main import run_command
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.errors import DataError, EngineError
from redco_flow.errors import ArtifactError
from redco_flow.launch.call import JobStaging
from redco_flow.metrics import rouge
from redco_flow.records import digest_file, digest_json, write_json
from redco_flow.runtime.context import Stopped
from redco_flow.runtime.staging import staged
from redco_flow.spec.load import settings_of
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.hugging_face import ExportRequest, write
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.artifacts.tokenizer import WrongTokenizer
from redco_flow.stages.data.guard import DataChanged
from redco_flow.stages.train.plan import plan_training
from redco_flow.stages.train.scores import CannotTrain, modes_of_best
from redco_flow.tracking.attempt import Cause, ExitRecord
from redco_flow.tracking.goodput import read_goodput
from redco_flow.tracking.journal import Journal
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ROWS = [(f"{a} {b}", f"{b} {a}") for a in WORDS for b in WORDS]
TINY = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.1}
SETTINGS = {
    "model": {"config": TINY},
    "num_epochs": 2,
    "global_batch_size": 16,
    "learning_rate": 0.01,
    "keep": {"last": 1, "best": ["rouge1", "eval_loss", "own_metrics.length"]},
    "eval": {"num_examples": 8},
    "log_every_steps": 1,
}
PROFILED = SETTINGS | {"profile": {"start_step": 2, "num_steps": 1}}
# For tests that look at no generated text: no score is computed of one.
LOSS_ONLY = SETTINGS | {"keep": {"last": 1, "best": ["eval_loss"]}}
DATA = {"validation_fraction": 0.2, "test_fraction": 0.2}


def make_dataset(bench, write_rows, name="data", vocab_size=290, rows=ROWS, **data):
    path = write_rows(bench.root / f"{name}.jsonl", rows)
    tokenizer = {"train": {"vocab_size": vocab_size, "type": "bpe"}}
    settings = {
        "data": {"train": str(path), "tokenizer": tokenizer, **DATA, **data},
        "max_source_length": 8,
        "max_target_length": 8,
    }
    return bench.run(preprocess, settings)["dataset"]


@pytest.fixture(scope="module")
def dataset(shared_bench, write_rows):
    return make_dataset(shared_bench, write_rows)


@pytest.fixture(scope="module")
def trained(shared_bench, dataset):
    """One training for the whole file: its checkpoints, its records and its attempt's directory."""
    inputs = {"dataset": [dataset]}
    context = shared_bench.context("train", inputs, work="trained")
    outputs = train.run(context, train.Config.from_json(PROFILED))
    context.flush()
    return shared_bench.publish(outputs, inputs), shared_bench.records(), context.attempt_dir


@pytest.fixture(scope="module")
def resumed(shared_bench, dataset, stop_at_look):
    """The same, stopped after four steps and resumed: checkpoints, run and the attempts' times.

    It reads from a disk of the node and saves through it; the resumed attempt finds it empty.
    """
    disk = shared_bench.root / "disk"
    disk.mkdir()
    staging = JobStaging(str(disk), inputs=True, checkpoints=True)
    inputs = {"dataset": [dataset]}
    run = RunDirectory.create(Workspace(shared_bench.root / "workspace"), "demo")
    config = train.Config.from_json(PROFILED)
    journal = Journal(run.journal_path)
    times, outputs, stops = [], [], []

    for look in (4, 1000):
        context = shared_bench.context("train", inputs, work="resumed")
        context.attempt_dir = attempt = run.new_attempt("train")
        context.stop = stop_at_look(look)
        write_json(attempt.call_path, {"stage": "train", "fingerprint": context.fingerprint})
        event = journal.append("job_submitting", stage="train", attempt=attempt.number)
        cause = Cause.COMPLETED
        try:
            with staged(context, staging):
                outputs.append(train.run(context, config))
        except Stopped as error:
            cause = Cause.CANCELLED
            stops.append(str(error))
            write_json(attempt.error_path, {"type": "Stopped", "message": str(error)})
        ended = ExitRecord(exit_code=0, cause=cause, message="", ended_at=utc_now())
        write_json(attempt.exit_path, ended.to_json())
        times += [event["time"], ended.ended_at]
        assert list(disk.iterdir()) == []

    (made,), (stopped,) = outputs, stops
    assert "after 4 steps" in stopped
    return shared_bench.publish(made, inputs), run, times


def params_of(artifact):
    """The parameters as arrays by path, read from the artifact alone."""
    checkpoint = CheckpointArtifact(artifact.path)
    params = checkpoint.load_params(checkpoint.build_recipe(), Deployer())
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)
    }


@pytest.mark.slow
def test_training_gives_the_last_and_each_best_checkpoint_with_all_that_predicting_needs(trained):
    checkpoints = trained[0]

    assert set(checkpoints) == {
        "checkpoint/last",
        "checkpoint/best/rouge1",
        "checkpoint/best/eval_loss",
        "checkpoint/best/own_metrics.length",
    }
    for artifact in checkpoints.values():
        names = {path.name for path in artifact.path.iterdir()}
        assert names == {"checkpoint", "tokenizer", "recipe.json"}


@pytest.mark.slow
def test_no_checkpoint_is_saved_of_a_training_whose_dataset_was_damaged_meanwhile(
    bench, write_rows
):
    """Fault 41: a later attempt goes on from what was trained on whole bytes."""
    dataset = make_dataset(bench, write_rows)
    context = bench.context("train", {"dataset": [dataset]}, work="train")
    file = next(dataset.path.glob("train*.arrow"))
    num_saves = 0

    def damage_before_the_second_save():
        nonlocal num_saves
        num_saves += 1
        if num_saves == 2:
            file.chmod(0o644)
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        if not bench.store.is_intact(dataset.id):
            raise ArtifactError("the dataset is damaged")

    context.verify_inputs = damage_before_the_second_save
    with pytest.raises(ArtifactError, match="the dataset is damaged"):
        train.run(context, train.Config.from_json(LOSS_ONLY))

    steps_per_epoch = 3  # 40 examples of 64, by 16
    steps = [int(path.name) for path in (context.work_dir / "checkpoints").glob("[0-9]*")]
    assert steps == [steps_per_epoch]


@pytest.mark.slow
def test_a_damaged_best_checkpoint_is_trained_again_to_the_same_parameters(bench, dataset):
    """Faults 22 and 41: the artifact's files are those of the work directory, by other names."""
    no_change = {"optimizer": "sgd", "learning_rate": 1e-30}  # so the first is the best
    settings = LOSS_ONLY | no_change
    before = bench.run(train, settings, {"dataset": [dataset]}, work="trained")
    best = before["checkpoint/best/eval_loss"]
    assert CheckpointArtifact(best.path).record.step == 3  # of 6
    largest = max(best.path.glob("checkpoint/**/d/*"), key=lambda path: path.stat().st_size)
    largest.chmod(0o644)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)

    with pytest.raises(EngineError, match=r"damaged.*It was removed with all after"):
        bench.run(train, settings, {"dataset": [dataset]}, work="trained")
    again = bench.run(train, settings, {"dataset": [dataset]}, work="trained")

    assert {name: one.id for name, one in again.items()} == {n: a.id for n, a in before.items()}
    trained = CheckpointArtifact(again["checkpoint/best/eval_loss"].path)
    assert trained.record.step == 3
    expected, found = params_of(before["checkpoint/last"]), params_of(again["checkpoint/last"])
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert all(bench.store.verify(one.id) == [] for one in again.values())


def test_the_best_checkpoint_is_the_one_whose_recorded_score_is_best(trained):
    checkpoints, records, _ = trained
    evaluations = [record for record in records if record["kind"] == "evaluation"]

    best = min(evaluations, key=lambda record: record["metrics"]["eval_loss"])

    record = CheckpointArtifact(checkpoints["checkpoint/best/eval_loss"].path).record
    assert (record.step, record.metrics) == (best["step"], best["metrics"])
    assert record.step == CheckpointArtifact(checkpoints["checkpoint/last"].path).record.step


def test_a_metric_of_ones_own_chooses_a_checkpoint(trained):
    checkpoints, records, _ = trained
    evaluations = [record for record in records if record["kind"] == "evaluation"]

    shortest = min(evaluations, key=lambda record: record["metrics"]["words"])

    record = CheckpointArtifact(checkpoints["checkpoint/best/own_metrics.length"].path).record
    assert record.metrics["words"] == shortest["metrics"]["words"]
    assert record.step == shortest["step"]


@pytest.mark.parametrize(
    ("best", "metrics", "needed"),
    [
        ("own_metrics.pair.spaces", [], ["own_metrics.pair"]),
        ("spaces", ["own_metrics.pair"], ["own_metrics.pair"]),
        ("own_metrics.length", ["bleu"], ["bleu", "own_metrics.length"]),
    ],
)
def test_a_score_of_ones_own_metric_is_named_by_its_key_or_its_module(best, metrics, needed):
    given = SETTINGS | {"keep": {"best": [best]}, "eval": {"metrics": metrics}}

    config = train.Config.from_json(given)

    assert train.metrics_needed(config) == needed
    assert train.output_names(config) == ["checkpoint/last", f"checkpoint/best/{best}"]
    assert modes_of_best(config) in ({"spaces": "min"}, {"words": "min"})


def test_every_metrics_record_carries_the_digests_of_checkpoint_data_and_config(
    trained, dataset, shared_bench
):
    """Engine case 54: each record names its checkpoint, data and configuration."""
    checkpoints, records, _ = trained
    last = checkpoints["checkpoint/last"].path

    evaluations = [record for record in records if record["kind"] == "evaluation"]

    assert {record["data"] for record in records} == {dataset.id}
    config = digest_json(train.Config.from_json(PROFILED).model_dump(mode="json"))
    assert {record["config"] for record in records} == {config}
    assert CheckpointArtifact(last).record.config == config
    assert len({record["checkpoint"] for record in evaluations}) == len(evaluations) == 2
    assert evaluations[-1]["checkpoint"] == digest_file(last / "checkpoint" / "commit.json")


def test_log_records_have_the_rate_that_was_used_and_the_loss_falls(trained):
    _, records, _ = trained

    logged = [record for record in records if record["kind"] == "training"]

    total = logged[-1]["total_steps"]
    # Linear from the peak at step 0 to 0 at the end, by optimizer step; logged is the last used.
    for record in logged:
        expected = 0.01 * (1 - (record["step"] - 1) / total)
        assert record["learning_rate"] == pytest.approx(expected, rel=1e-5)
    assert logged[-1]["loss"] < logged[0]["loss"]


def test_a_training_tells_its_devices_tflops_and_leaves_the_profile_that_is_asked_for(trained):
    """CPUs: no MFU, for what they could do is not known."""
    _, records, attempt = trained

    logged = [record for record in records if record["kind"] == "training"]

    speeds = [record["tflops_per_device"] for record in logged[1:]]
    assert len(speeds) == 5
    assert min(speeds) > 0
    progress = attempt.read_progress()
    assert progress["tflops_per_device"] == speeds[-1]
    assert progress["mfu"] is None
    assert list(attempt.profile_path.rglob("*.xplane.pb"))


@pytest.mark.slow
def test_the_time_of_a_stopped_and_resumed_training_adds_up(resumed):
    _, run, times = resumed

    parts = read_goodput(run, "train")

    first, last = (datetime.fromisoformat(times[place]).timestamp() for place in (0, -1))
    assert parts.total == pytest.approx(last - first, abs=0.01)
    assert min(parts.steps, parts.starting, parts.evaluation, parts.checkpoints, parts.ending) > 0
    assert parts.repeated == 0


def test_predictions_of_the_checkpoint_equal_those_in_memory(bench, dataset, trained, shared_bench):
    """Engine cases 28 and 52: in input order, and those that the trainer's scores came from."""
    checkpoints, records, _ = trained
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/last"]]}
    settings = {"split": "validation", "num_examples": 8, "batch_size": 8}

    predictions = bench.run(predict, settings, inputs)["predictions"]

    lines, summary = read_predictions(predictions.path)
    rows = DatasetArtifact(dataset.path).split("validation")[:8]
    assert [line.row_id for line in lines] == [row["row_id"] for row in rows]
    assert [line.source for line in lines] == [row["source"] for row in rows]
    assert (summary.checkpoint, summary.data) == (checkpoints["checkpoint/last"].id, dataset.id)
    scores = rouge.compute([line.prediction for line in lines], [r.references for r in lines])
    in_memory = [record for record in records if record["kind"] == "evaluation"][-1]["metrics"]
    assert {key: in_memory[key] for key in scores} == scores


@pytest.mark.slow
def test_predictions_do_not_depend_on_the_batch_size_or_the_model_shards(bench, dataset, trained):
    """Engine cases 26, 27 and 28: 13 examples in batches of 8 and of 16, on 8 and 4 x 2."""
    checkpoints = trained[0]
    inputs = {"dataset": [dataset], "checkpoint": [checkpoints["checkpoint/last"]]}
    ways = [{"batch_size": 8}, {"batch_size": 16, "num_model_shards": 2}]

    found = [
        bench.run(predict, {"split": "train", "num_examples": 13, "num_beams": 2, **way}, inputs)
        for way in ways
    ]

    lines = [read_predictions(artifacts["predictions"].path)[0] for artifacts in found]
    assert len(lines[0]) == 13
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_a_stopped_training_goes_on_and_ends_bitwise_as_the_uninterrupted_one(trained, resumed):
    """Engine cases 30 and 46, through the stage."""
    expected, found = trained[0], resumed[0]

    assert {name: one.id for name, one in found.items()} == {
        name: one.id for name, one in expected.items()
    }
    before, after = (params_of(c["checkpoint/last"]) for c in (expected, found))
    assert before.keys() == after.keys()
    for path, values in before.items():
        np.testing.assert_array_equal(values, after[path], err_msg=path)


@pytest.mark.slow
def test_running_a_finished_training_again_trains_nothing_and_gives_the_same(
    shared_bench, dataset, trained
):
    checkpoints = trained[0]

    again = shared_bench.run(train, PROFILED, {"dataset": [dataset]}, work="trained")

    assert {name: a.id for name, a in again.items()} == {n: a.id for n, a in checkpoints.items()}
    records = shared_bench.records()
    assert [record["kind"] for record in records] == ["evaluation", "start"]
    assert records[0]["is_resumed"] is True


@pytest.mark.slow
def test_a_checkpoint_that_cannot_converse_says_why(shared_bench, trained, capsys):
    checkpoint = trained[0]["checkpoint/last"]
    workspace = str(shared_bench.root / "workspace")

    code = run_command(["chat", checkpoint.id, "-w", workspace, "--message", "Hello?"])

    assert code == 1
    assert "recipe 'text_to_text', which does not converse" in capsys.readouterr().err


def test_an_override_that_no_parameter_has_is_an_error_before_the_first_step(bench, dataset):
    settings = {**SETTINGS, "sharding_overrides": {"no_such_parameter": ["model"]}}

    with pytest.raises(EngineError, match="no_such_parameter"):
        bench.run(train, settings, {"dataset": [dataset]})

    assert not bench.metrics_path.exists()


def test_each_rule_is_logged_with_its_reason_and_the_users_own_come_first(dataset, trained, caplog):
    """Losses over a mesh: `tests/stages/test_labelled_texts.py` and `test_preference.py` there."""
    settings = {**LOSS_ONLY, "num_model_shards": 2}
    settings["sharding_overrides"] = {"^embedding$": [None, "model"]}
    recipe = CheckpointArtifact(trained[0]["checkpoint/last"].path).build_recipe()
    batch = recipe.collate_fn(DatasetArtifact(dataset.path).split("train")[:16])

    with caplog.at_level(logging.INFO, logger="redco_flow"):
        plan_training(train.Config.from_json(settings), recipe, batch, total_steps=3)

    logged = [message.split(maxsplit=1) for message in caplog.messages if "  " in message]
    reasons = {path: rest for path, *rest in logged if rest}
    assert re.search(r"\(-, model\) +given: '\^embedding\$'", *reasons["embedding"])
    assert re.search(r"column-parallel over 2 heads", *reasons["encoder/layers/attention/qkv"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "frozen",
    [{"freeze": "embedding"}, {"lora": {"rank": 1, "alpha": 1, "targets": "attention"}}],
    ids=["freeze", "lora"],
)
def test_auto_counts_neither_gradients_nor_optimizer_state_of_what_is_frozen(
    dataset, trained, frozen, caplog
):
    """Adam's would make it four times the parameters' bytes."""
    checkpoints = trained[0]
    sizes = {path: x.nbytes for path, x in params_of(checkpoints["checkpoint/last"]).items()}
    total = sum(sizes.values())

    recipe = CheckpointArtifact(checkpoints["checkpoint/last"].path).build_recipe()
    batch = recipe.collate_fn(DatasetArtifact(dataset.path).split("train")[:16])
    config = train.Config.from_json({**LOSS_ONLY, "fsdp": "auto", **frozen})

    with caplog.at_level(logging.INFO, logger="redco_flow"):
        plan_training(config, recipe, batch, total_steps=3)

    (told,) = re.findall(r"1 shards; .* take ([\d,]+) bytes per device", caplog.text)
    if "freeze" in frozen:
        total += 3 * sum(size for path, size in sizes.items() if "embedding" not in path)
    # The step, the seed and counters; or factors of rank 1, four times their bytes.
    assert total < int(told.replace(",", "")) < (1.001 if "freeze" in frozen else 1.5) * total


@pytest.mark.slow
def test_factors_learn_over_a_base_of_4_bits(bench, dataset, pretrained):
    """Over meshes: `tests/engine/test_lora.py`; resumed: `test_preference.py` here."""
    settings = {
        **SETTINGS,
        "model": {"name_or_path": str(pretrained)},
        "lora": {
            "rank": 2,
            "alpha": 4,
            "targets": "all-linear",
            "base_dtype": "nf4",
            "dropout": 0.1,
        },
        "keep": {"last": 1},
        "log_every_steps": 3,
    }

    last = bench.run(train, settings, {"dataset": [dataset]})["checkpoint/last"]

    losses = [record["loss"] for record in bench.records() if record["kind"] == "training"]
    assert losses[-1] < losses[0]
    assert {values.dtype for values in params_of(last).values()} == {np.dtype(np.float32)}


@pytest.mark.slow
def test_factors_train_over_fsdp_and_what_comes_out_is_a_model(bench, dataset, pretrained):
    """Only the attention's kernels differ from the base."""
    frozen_dtype = "bfloat16"
    settings = {
        **SETTINGS,
        "model": {"name_or_path": str(pretrained)},
        "lora": {"rank": 2, "alpha": 4, "targets": "attention"},
        "frozen_dtype": frozen_dtype,
        "mu_dtype": frozen_dtype,
        "fsdp": 2,
        "num_model_shards": 2,
        "keep": {"last": 1},
    }

    last = bench.run(train, settings, {"dataset": [dataset]})["checkpoint/last"]

    base = {
        name: values.astype(frozen_dtype).astype("float32")
        for name, values in load_file(pretrained / "model.safetensors").items()
    }
    recipe = CheckpointArtifact(last.path).build_recipe()
    recipe.save_pretrained(
        CheckpointArtifact(last.path).load_params(recipe, Deployer()), bench.root / "merged"
    )
    merged = load_file(bench.root / "merged" / "model.safetensors")
    differing = {name for name in base if (base[name] != merged[name]).any()}
    assert differing
    assert all("Attention" in name for name in differing)
    (bench.root / "adapter").mkdir()
    write(ExportRequest(str(last.path), str(bench.root / "adapter"), "adapter"))
    factors = load_file(bench.root / "adapter" / "adapter_model.safetensors")
    assert {f"base_model.model.{name[:-7]}.lora_A.weight" for name in differing} < factors.keys()
    for name in differing:
        a, b = (factors[f"base_model.model.{name[:-7]}.lora_{x}.weight"] for x in "AB")
        np.testing.assert_allclose(merged[name] - base[name], 4 / 2 * b @ a, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def pretrained(shared_bench, trained, dataset):
    """A Hugging Face directory: the trained model and its tokenizer."""
    checkpoint = CheckpointArtifact(trained[0]["checkpoint/last"].path)
    recipe = checkpoint.build_recipe()
    folder = shared_bench.root / "pretrained"
    recipe.save_pretrained(checkpoint.load_params(recipe, Deployer()), folder)
    for file in (checkpoint.path / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_dataset_of_another_tokenizer_is_refused_before_the_first_step(
    bench, write_rows, pretrained
):
    """Fault 26: the stage is refused before the first step."""
    other = make_dataset(bench, write_rows, "other", vocab_size=280)
    settings = {**SETTINGS, "model": {"name_or_path": str(pretrained)}}

    with pytest.raises(WrongTokenizer, match="encoded with another tokenizer"):
        bench.run(train, settings, {"dataset": [other]})

    assert not bench.metrics_path.exists()


def test_predicting_on_a_dataset_of_another_tokenizer_is_refused(bench, write_rows, trained):
    """Fault 26: the stage is refused before the first step."""
    other = make_dataset(bench, write_rows, "other", vocab_size=280)
    inputs = {"dataset": [other], "checkpoint": [trained[0]["checkpoint/last"]]}

    with pytest.raises(WrongTokenizer, match="trained with tokenizer"):
        bench.run(predict, {}, inputs)


def test_a_model_file_that_changed_since_the_plan_is_a_fingerprint_error(
    bench, dataset, pretrained
):
    """Engine case 32: the stage fails with an error."""
    settings = {**SETTINGS, "model": {"name_or_path": str(pretrained)}}
    files = train.data_files(train.Config.from_json(settings))
    digests = {path.name: digest_file(path) for path in files} | {"model.safetensors": "0" * 64}

    with pytest.raises(DataChanged, match=r"model\.safetensors: changed since this run was"):
        bench.run(
            train,
            settings,
            {"dataset": [dataset]},
            provenance={"ingredients": {"data": digests}},
        )


@pytest.mark.slow
def test_a_token_outside_the_models_vocabulary_is_an_error_that_names_the_row(
    bench, dataset, tmp_path
):
    """Engine case 44: a damaged dataset, past the tokenizer's check."""
    import shutil

    from redco_flow.runtime.context import InputArtifact
    from redco_flow.stages.artifacts.arrow_split import SplitWriter
    from redco_flow.stages.artifacts.dataset import COLUMNS

    damaged = tmp_path / "damaged"
    shutil.copytree(dataset.path, damaged)
    rows = DatasetArtifact(dataset.path).split("train")[:]
    rows[3]["target_ids"] = np.array([5000, 1])
    (damaged / "train-00000.arrow").unlink()
    with SplitWriter(damaged / "train-00000.arrow", COLUMNS) as writer:
        writer.write({name: [row[name] for row in rows] for name in COLUMNS})
    artifact = InputArtifact("d" * 64, "dataset", damaged, {})

    with pytest.raises(DataError, match=r"target_ids holds token id 5000.*vocabulary of"):
        bench.run(train, SETTINGS, {"dataset": [artifact]})


def test_best_checkpoints_without_validation_rows_are_an_error_before_the_first_step(
    bench, write_rows
):
    dataset = make_dataset(bench, write_rows, validation_fraction=0.0)

    with pytest.raises(CannotTrain, match="need validation rows"):
        bench.run(train, SETTINGS, {"dataset": [dataset]})


def test_a_dataset_of_another_recipe_is_an_error(bench, dataset):
    with pytest.raises(CannotTrain, match="use one recipe for both"):
        bench.run(train, {**SETTINGS, "recipe": "my_package.mine"}, {"dataset": [dataset]})


def test_where_and_how_fast_is_no_part_of_the_trainings_fingerprint():
    placement = {
        "num_model_shards": 4,
        "num_context_shards": 2,
        "fsdp": "auto",
        "sharding_overrides": {"embedding": ["fsdp"]},
        "per_device_batch_size": 2,
        "log_every_steps": 7,
        "profile": {"start_step": 3},
    }

    plain, other = (train.Config.from_json({**SETTINGS, **more}) for more in ({}, placement))

    assert settings_of(plain) == settings_of(other)
    assert "num_model_shards" not in settings_of(plain)


@pytest.mark.parametrize(
    ("none", "some"),
    [
        ({"z_loss": 0.0}, {"z_loss": 1e-4}),
        ({"label_smoothing": 0.0}, {"label_smoothing": 0.1}),
        ({"betas": None, "epsilon": None}, {"betas": [0.9, 0.99], "epsilon": 1e-6}),
        ({"early_stopping": None}, {"early_stopping": {"metric": "rouge1", "patience": 2}}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_setting_that_came_later_is_part_of_the_fingerprint_only_where_it_is_set(none, some):
    """Trainings of before there was one are reused."""
    plain, unset, is_set = (
        settings_of(train.Config.from_json({**SETTINGS, **more})) for more in ({}, none, some)
    )

    assert plain == unset
    assert is_set == plain | some
    assert not set(some) & set(plain)


def test_a_score_that_ends_a_training_early_is_computed():
    config = train.Config.from_json({"early_stopping": {"metric": "rouge2", "patience": 2}})

    assert train.metrics_needed(config) == ["rouge"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": {"best": ["ruge2"]}}, "no metric gives a score 'ruge2'; did you mean 'rouge2'"),
        ({"keep": {"best": ["own_metrics.pair"]}}, "gives 2 scores .letters, spaces.: say which"),
        ({"keep": {"best": ["own_metrics.pair.lettres"]}}, "no score 'lettres'; its scores: lett"),
        ({"keep": {"best": ["own_metrics.gone.x"]}}, "there is no module own_metrics.gone.x"),
        ({"keep": {"best": ["rouge2", "rouge2"]}}, "names a score twice"),
        ({"eval": {"metrics": ["blue"]}}, "there is no metric 'blue'"),
        ({"eval": {"every_epochs": 1, "every_steps": 5}}, "not both"),
        ({"schedule": {"warmup_steps": 1, "warmup_ratio": 0.1}}, "not both"),
        ({"global_batch_size": 0}, "greater than 0"),
        ({"fsdp": 0}, "greater than 0"),
        ({"profile": {"num_steps": 3}}, "field required|start_step"),
        ({"on_nonfinite": "ignore"}, "'stop' or 'skip'"),
        ({"freeze": "("}, "is not a regex"),
        ({"frozen_dtype": "bfloat16"}, "needs 'lora' or 'freeze'"),
        ({"mu_dtype": "bfloat16", "optimizer": "adafactor"}, "keeps no momentum"),
        ({"sharding_overrides": {"(": ["model"]}}, "is not a regex"),
        ({"sharding_overrides": {"q": ["modle"]}}, "'model' or 'fsdp'"),
        ({"sharding_overrides": {"q": ["model", "model"]}}, "names one axis twice"),
        ({"lora": {"targets": "("}}, "is not a regex"),
        ({"lora": {"targets": "wi"}, "freeze": "wi"}, "lora freezes all of the model"),
        ({"learning_rate": -1.0}, "greater than 0"),
        ({"z_loss": -1e-4}, "greater than or equal to 0"),
        ({"num_epochs": 2, "max_steps": 10}, "'num_epochs' or 'max_steps', not both"),
        ({"schedule": {"type": "constant", "min_lr_ratio": 0.1}}, "of no use to type constant"),
        ({"momentum": 0.0}, "'momentum' is of sgd, and not of adamw"),
        ({"betas": [0.9]}, "'betas' are two numbers, and there are 1"),
        ({"betas": [0.9, 0.99], "optimizer": "sgd"}, "adamw and lion, and not of sgd"),
        ({"epsilon": 1e-6, "optimizer": "lion"}, "of adamw, and not of lion"),
        ({"early_stopping": {"metric": "perplexity"}}, "measures no perplexity"),
        ({"early_stopping": {"metric": "ruge2"}}, "did you mean 'rouge2'"),
        ({"model": {"config": {"d_modle": 4}}}, "did you mean 'd_model'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_setting_is_an_error_when_the_pipeline_is_read(settings, message):
    """Engine case 4: the error comes before any job."""
    with pytest.raises(ValueError, match=message):
        train.Config.from_json(settings)


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        ({"family": "llama"}, ["q_proj", "o_proj"], None),
        ({"family": "llama"}, "q_porj", "'q_porj' matches no kernel: did you mean q_proj"),
        ({"family": "gpt2"}, ["c_attn", "q_proj"], "'q_proj' matches no kernel"),
        ({"name_or_path": "org/not-in-the-cache", "family": "gpt2"}, "q_proj", None),
    ],
    ids=str,
)
def test_targets_that_match_no_kernel_are_refused_by_a_plan(model, targets, message):
    settings = {"recipe": "language_modeling", "model": model, "lora": {"targets": targets}}

    problems = list(train.input_problems(train.Config.from_json(settings), ["dataset"]))

    assert len(problems) == (message is not None)
    for path, said in problems:
        assert path == ("lora", "targets")
        assert said.startswith(message)


def test_each_best_score_is_an_output_of_its_own():
    config = train.Config.from_json(SETTINGS)

    assert train.output_names(config) == [
        "checkpoint/last",
        "checkpoint/best/rouge1",
        "checkpoint/best/eval_loss",
        "checkpoint/best/own_metrics.length",
    ]
