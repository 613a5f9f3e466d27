"""Several examples in one row: the same loss, and rows that can be found by number."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redco_flow import Deployer, Trainer
from redco_flow.engine.data.batches import EvalBatches, TrainBatches
from redco_flow.engine.data.packing import PackedExamples, collate_packed, first_fit
from redco_flow.engine.errors import DataError
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model
from tests.drawn_params import draw_like

ROW, VOCAB = 12, 40
PADDING = {"input_ids": 0, "labels": -100}
collate = partial(collate_packed, padding=PADDING, row_length=ROW)


def documents(count=20):
    """Ids, and labels shifted within each document."""
    rng = np.random.default_rng(0)
    found = []
    for length in rng.integers(2, 9, count):
        ids = rng.integers(1, VOCAB, length)
        found.append({"input_ids": ids, "labels": np.append(ids[1:], -100)})
    return found


def packed(examples):
    return PackedExamples(examples, [len(e["input_ids"]) for e in examples], ROW)


def by_scanning(lengths, row_length):
    rows = []
    for index, length in enumerate(lengths):
        for row in rows:
            if sum(lengths[i] for i in row) + length <= row_length:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


@given(st.lists(st.integers(1, 10), max_size=40))
def test_each_example_goes_into_the_first_row_with_room(lengths):
    assert first_fit(lengths, 10) == by_scanning(lengths, 10)


@pytest.mark.parametrize("length", [0, 13])
def test_an_example_that_fits_no_row_is_named(length):
    with pytest.raises(DataError, match=f"example 1 has {length} tokens; .* takes 1 to 12"):
        first_fit([3, length], ROW)


def test_segments_are_numbered_and_positions_restart():
    rows = [
        [{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, {"input_ids": [8], "labels": [-100]}]
    ]

    found = collate_packed(rows, PADDING, 6)

    assert {name: array.tolist() for name, array in found.items()} == {
        "input_ids": [[5, 6, 7, 8, 0, 0]],
        "labels": [[6, 7, -100, -100, -100, -100]],
        "segment_ids": [[1, 1, 1, 2, 0, 0]],
        "position_ids": [[0, 1, 2, 0, 0, 0]],
    }


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(DataError, match=r"differ in length: {'input_ids': 2, 'labels': 1}"):
        collate([[{"input_ids": [1, 2], "labels": [1]}]])


def test_the_processes_read_every_example_once_per_epoch_in_one_order():
    examples = documents()
    rows = packed(examples)

    tokens = []
    for process in range(2):
        options = {"global_batch_size": 4, "seed": 1, "stop_step": -(-len(rows) // 4)}
        batches = iter(
            TrainBatches(rows, collate, process_index=process, num_processes=2, **options)
        )
        with batches:
            for batch in batches:
                counted = (batch.arrays["segment_ids"] > 0) & (batch.mask[:, None] > 0)
                tokens += batch.arrays["input_ids"][counted].tolist()

    assert sorted(tokens) == sorted(np.concatenate([e["input_ids"] for e in examples]).tolist())


def tiny_gpt2():
    module = find_model("gpt2")
    values = {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": ROW, "n_embd": 16, "n_layer": 1,
        "n_head": 2, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }  # fmt: skip
    config = module.Config.from_hugging_face(values)
    return partial(module.apply, config), module.abstract_params(config)


def loss_of(apply):
    def loss(params, batch, rngs, is_training):
        packed = {name: batch[name] for name in ("position_ids", "segment_ids")}
        return cross_entropy(apply(params, batch["input_ids"], **packed), batch["labels"])

    return loss


def trainer_of(apply, params):
    return Trainer(
        Deployer(devices=jax.devices()[:2]),
        collate_fn=collate,
        loss_fn=loss_of(apply),
        params=params,
        optimizer=optax.adamw(1e-2),
        global_batch_size=4,
        seed=2,
    )


@pytest.mark.slow
def test_the_loss_of_packed_documents_is_the_unpacked_one_token_for_token():
    """Engine case 34: the loss is that of each document alone."""
    apply, shapes = tiny_gpt2()
    params, examples = draw_like(shapes, stddev=0.3), documents()
    rows = packed(examples)

    arrays = collate(rows.__getitems__(list(range(len(rows)))))
    named = {name: arrays[name] for name in ("position_ids", "segment_ids")}
    apply = jax.jit(apply)
    logits = apply(params, arrays["input_ids"], **named)

    found = {}
    for place, row in enumerate(rows.rows):
        for number, index in enumerate(row, start=1):
            found[index] = logits[place][arrays["segment_ids"][place] == number]
    assert sorted(found) == list(range(len(examples)))
    assert len(rows) < len(examples)
    for index, example in enumerate(examples):
        # Filled up, so that all have one shape; no token sees what comes behind it.
        length = len(example["input_ids"])
        ids = np.pad(example["input_ids"], (0, ROW - length))[None]
        np.testing.assert_allclose(
            found[index], apply(params, ids)[0, :length], rtol=1e-4, atol=2e-5
        )
    # And their mean, through the engine: one row per document against packed rows.
    trainer = trainer_of(apply, params)
    one_each = [[example] for example in examples]
    assert trainer.eval_loss(rows) == pytest.approx(trainer.eval_loss(one_each), rel=1e-5)


def test_evaluation_keeps_packed_rows_in_order():
    rows = packed(documents())

    with iter(EvalBatches(rows, collate, batch_size=4)) as batches:
        found = np.concatenate([b.rows[b.mask > 0] for b in batches])

    assert found.tolist() == list(range(len(rows)))
