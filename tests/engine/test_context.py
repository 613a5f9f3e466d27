"""Sequences split over the mesh axis `context`: whole train steps, against one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow import Deployer, Predictor, Trainer
from redco_flow.engine.data.packing import collate_packed
from redco_flow.engine.errors import ShardingError
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import generate
from tests.drawn_params import draw_params
from tests.engine.traffic import read_collectives

LENGTH, TARGET, VOCAB = 12, 10, 64
_TOKENS = {"bos_token_id": 2, "eos_token_id": 1}
_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **_TOKENS,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 8, "dropout_rate": 0.0,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32,
    "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2, **_TOKENS,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"llama": _LLAMA, "t5": _T5, "gpt2": _GPT2}


class Case(NamedTuple):
    """A model, its loss, and examples with rows of several lengths."""

    module: Any
    config: Any
    loss_fn: Callable[..., Any]
    collate_fn: Callable[..., dict[str, np.ndarray]]
    examples: list[Any]


def model_of(family: str, **computed: Any) -> tuple[Any, Any]:
    module = find_model(family)
    values = {"model_type": family, **FAMILIES[family]}
    return module, module.Config.from_hugging_face(values, **computed)


def row(rng: np.random.Generator, length: int, full: int) -> np.ndarray:
    found = np.zeros(full, np.int32)
    found[:length] = rng.integers(3, VOCAB, length)
    return found


def case_of(family: str, length: int = LENGTH, **computed: Any) -> Case:
    """Trained on the next token."""
    module, config = model_of(family, **computed)

    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        keys = rngs if is_training else None
        ids = batch["ids"]
        mask = (ids != 0).astype(jnp.int32)
        logits = module.apply(config, params, ids, mask, rngs=keys)
        labels = jnp.where(mask == 0, -100, ids)
        return cross_entropy(logits[:, :-1], labels[:, 1:])

    rng = np.random.default_rng(0)
    examples = [row(rng, n, length) for n in rng.integers(2, length + 1, 8)]
    return Case(module, config, loss_fn, lambda rows: {"ids": np.stack(rows)}, examples)


def pair_case_of(family: str) -> Case:
    module, config = model_of(family)

    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        source, target = batch["source"], batch["target"]
        mask = (source != 0).astype(jnp.int32)
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        logits = module.apply(config, params, source, mask, shifted)
        return cross_entropy(logits, jnp.where(target == 0, -100, target))

    def collate(rows: Any) -> dict[str, np.ndarray]:
        return {name: np.stack([row[name] for row in rows]) for name in ("source", "target")}

    rng = np.random.default_rng(0)
    lengths = rng.integers(2, TARGET + 1, (8, 2))
    examples = [
        {"source": row(rng, one, LENGTH), "target": row(rng, other, TARGET)}
        for one, other in lengths
    ]
    return Case(module, config, loss_fn, collate, examples)


def packed_case() -> Case:
    """Documents of a packed row begin and end where they will, shards' edges or not."""
    module, config = model_of("gpt2")

    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        logits = module.apply(
            config, params, batch["input_ids"],
            position_ids=batch["position_ids"], segment_ids=batch["segment_ids"],
            rngs=rngs if is_training else None,
        )  # fmt: skip
        return cross_entropy(logits, batch["labels"])

    def document(rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
        ids = rng.integers(3, VOCAB, length)
        return {"input_ids": ids, "labels": np.append(ids[1:], -100)}

    rng = np.random.default_rng(0)
    examples = [[document(rng, n) for n in lengths] for lengths in [(3, 5, 2), (7, 4), (1, 11)] * 3]
    collate = partial(collate_packed, padding={"input_ids": 0, "labels": -100}, row_length=LENGTH)
    return Case(module, config, loss_fn, collate, examples[:8])


CASES: dict[str, Callable[[], Case]] = {
    "t5": partial(pair_case_of, "t5"),
    "packed": packed_case,
}


def deployer_of(data: int, fsdp: int, context: int, model: int, **options: Any) -> Deployer:
    devices = jax.devices()[: data * fsdp * context * model]
    return Deployer(
        model, num_context_shards=context, num_fsdp_shards=fsdp, devices=devices, **options
    )


def rules_of(case: Case, deployer: Deployer) -> Any:
    params = case.module.abstract_params(case.config)
    batch = case.collate_fn(case.examples[:2])
    return deployer.get_sharding_rules(params, case.loss_fn, batch, None, False)


def trainer_of(case: Case, deployer: Deployer, **options: Any) -> Trainer:
    """One whose first step subtracts the gradient."""
    return Trainer(
        deployer,
        collate_fn=case.collate_fn,
        loss_fn=case.loss_fn,
        params=draw_params(case.module, case.config, stddev=0.1),
        sharding_rules=rules_of(case, deployer),
        seed=7,
        **{"optimizer": optax.sgd(1.0), "global_batch_size": 8, **options},
    )


def first_step(case: Case, deployer: Deployer) -> dict[str, Any]:
    trainer = trainer_of(case, deployer)
    before = jax.device_get(trainer.state["params"])
    with trainer.read_batches(case.examples, 0, 1) as batches:
        (batch,) = trainer.device_batches(batches)
        metrics = jax.device_get(trainer.advance(batch))
    after = jax.device_get(trainer.state["params"])
    gradients = jax.tree.map(np.subtract, before, after)
    return {"metrics": metrics, "gradients": gradients}


def assert_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5), found["metrics"], expected["metrics"]
    )
    # Parameters of size one hold a gradient to 1e-7.
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected["gradients"]))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * largest),
        found["gradients"],
        expected["gradients"],
    )


# (data, fsdp, context, model)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        # Two stacks, shifted labels and token means.
        ("t5", (2, 1, 2, 2), {}),
        # Layers that are gathered and split attend by the ring too, with dropout.
        ("packed", (1, 2, 2, 2), {"fsdp_over_context": True}),
    ],
)
@pytest.mark.covers("one device", family="name", mesh="mesh")
def test_context_shards_go_with_every_other_axis(name, mesh, options):
    """Engine cases 12, 33, 34, 36 and 42: dropout, and packed rows."""
    case = CASES[name]()

    found = first_step(case, deployer_of(*mesh, **options))

    assert_same_step(found, first_step(case, deployer_of(1, 1, 1, 1)))


def test_parameters_and_optimizer_state_are_whole_over_context_shards():
    case = case_of("llama")
    deployer = deployer_of(1, 1, 4, 2)

    rules, without = rules_of(case, deployer), rules_of(case, deployer_of(1, 1, 1, 2))

    params = case.module.abstract_params(case.config)
    assert rules.specs(params) == without.specs(params)
    assert rules.bytes_per_device == without.bytes_per_device
    with pytest.raises(ShardingError, match="names axis 'context'; allowed: None, 'data'"):
        deployer.get_sharding_rules(params, overrides=[("embedding", ("context",))])


def step_collectives(case: Case, num_shards: int, length: int) -> list[Any]:
    deployer = deployer_of(1, 1, num_shards, 1)
    params = case.module.abstract_params(case.config)
    batch = {"ids": jax.ShapeDtypeStruct((4, length), jnp.int32)}
    lowered = TrainingPlan(
        deployer,
        loss_fn=case.loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=rules_of(case, deployer),
        global_batch_size=4,
    ).lower(batch)
    return read_collectives(lowered.compile().as_text())


@pytest.mark.slow
def test_a_step_sends_keys_and_values_round_the_ring_and_gradients_once():
    """Per layer keys and values once forward and, with their gradients, twice backward.

    Besides, what the layers give comes back into the text's order, and its gradient out of it.
    """
    module, config = model_of("llama")
    length, num_shards, attention = 64, 4, config.core.attention

    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        return cross_entropy(module.apply(config, params, batch["ids"]), batch["ids"])

    case = case_of("llama")._replace(loss_fn=loss_fn)
    share = (num_shards - 1) / num_shards
    both = 2 * 4 * length * attention.num_kv_heads * attention.head_dim * 4

    collectives = step_collectives(case, num_shards, length)

    travelled = sum(one.wire_bytes for one in collectives if one.kind == "collective-permute")
    hidden = 4 * length // num_shards * config.core.width * 4
    assert travelled == config.core.num_layers * 3 * share * both + 2 * hidden
    # What is summed over the shards is every parameter's gradient, and a few scalars.
    assert {one.kind for one in collectives} == {"collective-permute", "all-reduce"}
    reduced = sum(one.num_bytes * one.count for one in collectives if one.kind == "all-reduce")
    sizes = jax.tree.leaves(jax.tree.map(lambda x: x.size, module.abstract_params(config)))
    assert 4 * sum(sizes) <= reduced <= 4 * sum(sizes) + 100


@pytest.mark.slow
def test_generating_over_context_shards_is_refused_and_works_without_them():
    case = case_of("llama")
    deployer = deployer_of(1, 2, 2, 2)
    params = draw_params(case.module, case.config, stddev=0.1)

    def continued(params: Any, batch: Any, rngs: Any) -> Any:
        mask = (batch["ids"] != 0).astype(jnp.int32)
        options = {"max_new_tokens": 4}
        return generate(case.module, case.config, params, batch["ids"], mask, **options).tokens

    def predictor_of(deployer: Deployer) -> Predictor:
        return Predictor(
            deployer, collate_fn=case.collate_fn, pred_fn=continued,
            sharding_rules=rules_of(case, deployer), batch_size=4,
        )  # fmt: skip

    expected = predictor_of(deployer_of(1, 1, 1, 1)).predict(case.examples, params)

    found = predictor_of(deployer.without_context_shards()).predict(case.examples, params)

    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=r"2 context shards.*without_context_shards\(\)"):
        predictor_of(deployer).predict(case.examples, params)


@pytest.mark.parametrize(("memory_gib", "num_fsdp_shards"), [(1.0, 1), (1e-6, 4)])
def test_fsdp_shards_are_chosen_among_the_data_parallel_devices(memory_gib, num_fsdp_shards):
    case = case_of("llama")
    deployer = Deployer(num_context_shards=2, num_fsdp_shards="auto", device_memory_gib=memory_gib)
    params, batch = case.module.abstract_params(case.config), case.collate_fn(case.examples[:2])

    deployer.get_sharding_rules(
        params, case.loss_fn, batch, None, False, optimizer=optax.adamw(1e-3)
    )

    assert deployer.num_fsdp_shards == num_fsdp_shards
    assert deployer.num_context_shards == 2
    assert deployer.num_data_shards == 4


def test_parameters_lie_the_same_way_without_context_shards():
    deployer = deployer_of(1, 2, 2, 2)
    array = np.arange(16.0).reshape(4, 4)

    placed = (
        jax.device_put(array, one.named_sharding("fsdp", "model"))
        for one in (deployer, deployer.without_context_shards())
    )

    assert deployer.without_context_shards().num_data_shards == 4
    before, after = ({s.device: s.index for s in one.addressable_shards} for one in placed)
    assert before == after


def test_context_shards_that_do_not_divide_what_the_model_leaves_are_refused():
    """Engine case 9: the error says which number must divide which."""
    with pytest.raises(ValueError, match=r"num_context_shards=3 .* 4 groups .* allowed: 1, 2, 4"):
        Deployer(2, num_context_shards=3)


def test_context_shards_hold_the_same_rows():
    deployer = deployer_of(2, 1, 2, 2)

    rows = deployer.put_rows(np.arange(4))

    assert rows.sharding.spec == P(("data", "fsdp"))
    assert [len(shard.data) for shard in rows.addressable_shards] == [2] * 8


@pytest.mark.parametrize("name", ["packed", "t5"])
def test_the_models_here_split_sequences(name):
    case = CASES[name]()

    rules = rules_of(case, deployer_of(1, 1, 2, 2))

    assert rules.bytes_per_device < rules.total_bytes


def test_a_function_that_splits_no_sequence_is_refused_over_context_shards():
    """Else every context shard would do the same work, unnoticed."""
    params = {"table": np.zeros((VOCAB, 8), np.float32)}

    def scores(params: Any, ids: Any) -> Any:
        return params["table"][ids] @ params["table"].T

    ids = np.zeros((2, LENGTH), np.int32)

    with pytest.raises(ShardingError, match=r"splits no sequence.*attend_sequence"):
        deployer_of(1, 1, 4, 1).get_sharding_rules(params, scores, ids)


def test_a_function_may_name_the_context_axis_itself():
    params = {"table": np.zeros((VOCAB, 8), np.float32)}

    @jax.checkpoint
    def layer(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.tanh(x), P(None, "context"))

    def hidden(params: Any, ids: Any) -> Any:
        return layer(params["table"][ids])

    rules = deployer_of(1, 1, 4, 1).get_sharding_rules(
        params, hidden, np.zeros((2, LENGTH), np.int32)
    )

    assert rules.bytes_per_device == rules.total_bytes
