"""A train stage plans its training from settings and recipe, before any parameter exists."""

import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stage_kinds import preprocess

from redco_flow.engine.data.batches import TrainBatches
from redco_flow.recipes.find import find_recipe
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.data import read_training_data
from redco_flow.stages.train.plan import plan_training, start_trainer
from redco_flow.text.tokenizer import TextTokenizer

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "remat": "full",
}
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
NUM_PARAMETERS = 8_030_261_248  # as its model card says, in numbers
EXAMPLE = {"row_id": "0", "source_ids": [5, 6], "target_ids": [7, 8, 3]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["a few words, and some more words"] * 9, 280, "bpe"), folder)
    return TextTokenizer.load(folder)


def recipe_of(tokenizer, values, dtype="float32", length=8, family="llama"):
    ends = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.eos_id}
    model = {"family": family, "config": {**values, **ends}, "dtype": dtype}
    build = find_recipe("language_modeling").build
    return build(model, tokenizer, source_length=length, target_length=length)


def config_of(**settings):
    own = {"recipe": "language_modeling", "global_batch_size": 8, "weight_decay": 0.1}
    return Config.from_json({**own, **settings})


def peak_gib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@pytest.mark.slow
def test_a_training_too_large_for_this_machine_is_planned_in_seconds_without_an_array(tokenizer):
    """LLaMA-3-8B with AdamW over 8 devices: 12 bytes of state for each of its parameters.

    The seconds are of CPU time, which a busy machine does not change much.
    """
    recipe = recipe_of(tokenizer, LLAMA_3_8B, "bfloat16")
    batch = {name: np.zeros((1, 2048), np.int32) for name in recipe.collate_fn([EXAMPLE])}
    before, peak = {id(array) for array in jax.live_arrays()}, peak_gib()
    started = time.process_time()

    plan = plan_training(config_of(fsdp=8), recipe, batch, total_steps=100)
    plan.lower()

    assert time.process_time() - started < 60
    assert not [array.shape for array in jax.live_arrays() if id(array) not in before]
    assert peak_gib() - peak < 2
    assert plan.model_rules.total_bytes == 4 * NUM_PARAMETERS
    # With gradients 16 bytes, an eighth of them on each device; norms are copied.
    assert plan.bytes_per_device == pytest.approx(2 * NUM_PARAMETERS, rel=1e-3)
    assert plan.remat == "full"


DEEP = TINY | {"num_hidden_layers": 4, "max_position_embeddings": 256}


def plan_within(tokenizer, gib, remat="auto", settings=(), **values):
    recipe = recipe_of(tokenizer, {**DEEP, "remat": remat, **values}, length=128)
    batch = recipe.collate_fn([EXAMPLE])
    assert recipe.model["config"]["remat"] == remat
    config, devices = config_of(**dict(settings)), jax.devices()[:1]
    return plan_training(config, recipe, batch, 3, devices=devices, device_memory_gib=gib)


def test_what_devices_do_not_tell_computes_nothing_again_and_compiles_nothing(tokenizer, caplog):
    with caplog.at_level("INFO"):
        plan = plan_within(tokenizer, None)

    assert plan.remat == "none"
    assert "remat auto: none (the devices do not report their memory)" in caplog.text


@pytest.mark.slow
def test_the_least_recomputation_that_fits_is_chosen_and_told_with_what_the_others_take(
    tokenizer, caplog
):
    needed = plan_within(tokenizer, None, "minimal").memory().total
    enough = 1.01 * needed / 0.95 / 2**30  # of which a step may take 95 %

    with caplog.at_level("INFO"):
        chosen = plan_within(tokenizer, enough)
        least = plan_within(tokenizer, 0.0001)

    assert chosen.remat == "minimal"
    assert chosen.memory().total == needed
    assert f"GiB, minimal takes {needed / 2**30:.3g} GiB)" in caplog.text
    assert least.remat == "full, layer_input offload, num_mlp_chunks 8"
    assert "no choice of remat makes a train step fit" in caplog.text


@pytest.mark.slow
def test_feed_forward_layers_are_cut_into_chunks_where_a_step_does_not_fit_otherwise(
    tokenizer, caplog
):
    def plan(gib, num_chunks):
        wide = {"intermediate_size": 2048}
        return plan_within(tokenizer, gib, "full", {"num_mlp_chunks": num_chunks}, **wide)

    at_once, in_chunks = (plan(None, number).memory().total for number in (1, 8))
    enough = 1.01 * in_chunks / 0.95 / 2**30

    with caplog.at_level("INFO"):
        chosen = plan(enough, "auto")

    assert in_chunks < 0.95 * at_once
    assert chosen.memory().total == in_chunks
    assert chosen.remat == "full"
    assert "num_mlp_chunks auto: 8 (of a device's" in caplog.text


def test_a_number_of_chunks_is_taken_as_it_is_and_auto_is_1_where_no_memory_is_told(tokenizer):
    plans = [plan_within(tokenizer, None, "full", {"num_mlp_chunks": n}) for n in ("auto", 1, 4)]

    auto, at_once, in_chunks = (str(plan.lower().as_text()) for plan in plans)
    assert auto == at_once != in_chunks


def test_a_mixture_of_experts_is_planned_without_chunks_and_refuses_a_number(tokenizer, caplog):
    mixture = {"num_local_experts": 2, "num_experts_per_tok": 1}
    recipe = recipe_of(tokenizer, {**TINY, **mixture}, family="mixtral")
    batch = recipe.collate_fn([EXAMPLE])
    auto, refused = config_of(num_mlp_chunks="auto"), {"num_mlp_chunks": 2}

    with caplog.at_level("INFO"):
        plan_training(auto, recipe, batch, 3, devices=jax.devices()[:1], device_memory_gib=0.0001)

    assert "no choice of num_mlp_chunks makes a train step fit" in caplog.text
    assert "8 takes" not in caplog.text
    with pytest.raises(ValueError, match="a mixture of experts takes all tokens at once"):
        config_of(model={"family": "mixtral"}, **refused)


def test_what_factors_with_dropout_read_is_not_cut_into_chunks(tokenizer, caplog):
    recipe = recipe_of(tokenizer, TINY | {"tie_word_embeddings": False})
    batch = recipe.collate_fn([EXAMPLE])
    limits = {"devices": jax.devices()[:1], "device_memory_gib": 0.0001}
    lora = {"targets": "wo|lm_head", "rank": 2, "dropout": 0.1}

    with caplog.at_level("INFO"):
        plan = plan_training(
            config_of(lora=lora, num_mlp_chunks="auto"), recipe, batch, 3, **limits
        )

    assert "num_mlp_chunks auto: no feed-forward chunks, for lora.dropout" in caplog.text
    assert "num_loss_chunks auto: 1, for lora.dropout" in caplog.text
    assert "8 takes" not in caplog.text
    assert plan.lora.dropout == 0.1


def test_what_is_frozen_and_the_momentum_take_half_the_memory_where_that_is_asked_for(tokenizer):
    recipe = recipe_of(tokenizer, TINY)
    batch = recipe.collate_fn([EXAMPLE])
    lora = {"lora": {"targets": "attention", "rank": 2}}

    plan = plan_training(config_of(**lora, frozen_dtype="bfloat16"), recipe, batch, 3)
    whole = plan_training(config_of(**lora), recipe, batch, 3)
    narrow = plan_training(config_of(mu_dtype="bfloat16"), recipe, batch, 3)
    wide = plan_training(config_of(), recipe, batch, 3)
    moving = plan_training(config_of(optimizer="sgd"), recipe, batch, 3)
    still = plan_training(config_of(optimizer="sgd", momentum=0.0), recipe, batch, 3)

    base = {x.dtype for x in jax.tree.leaves(plan.state["params"]["base"])}
    factors = {x.dtype for x in jax.tree.leaves(plan.state["params"]["lora"])}
    assert (base, factors) == ({jnp.dtype("bfloat16")}, {jnp.dtype("float32")})
    assert whole.bytes_per_device - plan.bytes_per_device == plan.model_rules.total_bytes
    assert wide.bytes_per_device - narrow.bytes_per_device == wide.model_rules.total_bytes / 2
    assert moving.bytes_per_device - still.bytes_per_device == wide.model_rules.total_bytes


def test_trained_parameters_take_half_the_memory_where_that_is_asked_for(tokenizer):
    """Gradients are added up, and both moments kept, in float32."""
    recipe = recipe_of(tokenizer, TINY)
    batch = recipe.collate_fn([EXAMPLE])

    narrow = plan_training(config_of(param_dtype="bfloat16"), recipe, batch, 3)
    wide = plan_training(config_of(), recipe, batch, 3)
    factors = {"lora": {"targets": "attention", "rank": 2}}
    of_factors = plan_training(config_of(**factors, param_dtype="bfloat16"), recipe, batch, 3)

    dtypes = {x.dtype for x in jax.tree.leaves(narrow.state["params"])}
    moments = {x.dtype for x in jax.tree.leaves(narrow.state["opt_state"]) if x.ndim}
    assert (dtypes, moments) == ({jnp.dtype("bfloat16")}, {jnp.dtype("float32")})
    assert wide.bytes_per_device - narrow.bytes_per_device == wide.model_rules.total_bytes / 2
    kept = {name: x.dtype for name, tree in of_factors.state["params"].items()
            for x in jax.tree.leaves(tree)}  # fmt: skip
    assert kept == {"base": jnp.dtype("float32"), "lora": jnp.dtype("bfloat16")}


KINDS = {
    "narrow parameters": {"param_dtype": "bfloat16", "fsdp": 2},
    "narrow": {
        "lora": {"targets": "attention", "rank": 2},
        "frozen_dtype": "bfloat16",
        "mu_dtype": "bfloat16",
    },
    "some parameters": {"freeze": "embedding", "optimizer": "adafactor"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_the_stages_trainer_executes_what_was_planned_for_given_devices(tokenizer, settings):
    recipe = recipe_of(tokenizer, TINY)
    batch = recipe.collate_fn([EXAMPLE])
    config = config_of(num_model_shards=2, max_skipped=3, **settings)
    devices = jax.devices()[4:]
    before = {id(array) for array in jax.live_arrays()}

    plan = plan_training(config, recipe, batch, total_steps=3, devices=devices)
    planned = plan.lower().as_text()

    assert not [array.shape for array in jax.live_arrays() if id(array) not in before]
    assert set(plan.mesh.devices.flat) == set(devices)
    trainer = start_trainer(plan, config, recipe, recipe.collate_fn)
    assert trainer.max_skipped == 3
    with trainer.read_batches([EXAMPLE] * 8, 0, 1) as batches:
        (found,) = trainer.device_batches(batches)
    assert plan.train_step.lower(trainer._state, found).as_text() == planned
    trainer.advance(found)
    shardings = jax.tree.map(lambda x: x.sharding, (trainer._state, plan.state))
    assert shardings[0] == shardings[1]


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["padded", "bucketed", "packed"])
def test_the_step_is_planned_for_the_widest_batch_that_is_trained_on(bench, write_rows, batching):
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    rows = [(" ".join(words[:n]), " ".join(words[-n:])) for n in range(1, 9)] * 5
    tokenizer = {"train": {"vocab_size": 280, "type": "bpe"}}
    data = {"train": str(write_rows(bench.root / "rows.jsonl", rows)), "tokenizer": tokenizer}
    found = bench.run(preprocess, {"recipe": "language_modeling", "data": data})["dataset"]
    dataset = DatasetArtifact(found.path)
    recipe = recipe_of(dataset.tokenizer, TINY | {"max_position_embeddings": 512}, length=64)

    trained = read_training_data(
        dataset, recipe, config_of(batching={"type": batching, "num_buckets": 3}), None
    )

    batches = TrainBatches(
        trained.examples,
        trained.collate_fn,
        global_batch_size=4,
        seed=0,
        bucketing=trained.bucketing,
        start_step=0,
        stop_step=10,
    )
    with iter(batches) as read:
        widths = [{name: x.shape[1:] for name, x in batch.arrays.items()} for batch in read]
    widest = {name: x.shape[1:] for name, x in trained.widest_batch().items()}
    assert max(widths, key=lambda found: found["input_ids"]) == widest
    assert (len({found["input_ids"] for found in widths}) > 1) == (batching == "bucketed")


def test_steps_that_are_not_finite_are_counted_only_where_they_are_to_be_skipped(tokenizer):
    """How many may be, and which are saved: `tests/engine/test_nonfinite.py`."""
    recipe = recipe_of(tokenizer, TINY)

    def state(**settings):
        return plan_training(config_of(**settings), recipe, recipe.collate_fn([EXAMPLE]), 3).state

    assert "skipped" in state(on_nonfinite="skip")
    assert "skipped" not in state()


def test_a_model_in_float32_is_multiplied_in_float32(tokenizer):
    def precision(dtype):
        recipe = recipe_of(tokenizer, TINY, dtype)
        plan = plan_training(config_of(), recipe, recipe.collate_fn([EXAMPLE]), total_steps=3)
        return plan.deployer.matmul_precision

    assert precision("float32") == "highest"
    assert precision("bfloat16") is None
