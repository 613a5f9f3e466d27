"""Learning rates against their formulas."""

import math
from functools import partial

import jax
import numpy as np
import optax
import pytest

from redco_flow.engine.step.optimizers import (
    OPTIMIZER_TYPES,
    SCHEDULE_TYPES,
    make_optimizer,
    make_schedule,
    stacked_dims,
)
from redco_flow.models.find import find_model

TOTAL, WARMUP, PEAK = 100, 10, 3e-4

AFTER_WARMUP = {
    "linear": lambda s: (TOTAL - s) / (TOTAL - WARMUP),
    "cosine": lambda s: 0.5 * (1 + math.cos(math.pi * (s - WARMUP) / (TOTAL - WARMUP))),
    "constant": lambda s: 1.0,
    "inverse_sqrt": lambda s: math.sqrt(WARMUP / s),
    "wsd": lambda s: min(1.0, (TOTAL - s) / 20),
}


@pytest.mark.parametrize("type", SCHEDULE_TYPES)
def test_a_schedule_is_its_formula_at_every_step(type):
    schedule = jax.jit(make_schedule(type, PEAK, TOTAL, WARMUP))

    found = [float(schedule(step)) for step in range(TOTAL + 1)]

    expected = [
        PEAK * (s / WARMUP if s < WARMUP else AFTER_WARMUP[type](s)) for s in range(TOTAL + 1)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=PEAK * 1e-6)


@pytest.mark.parametrize("type", SCHEDULE_TYPES)
def test_a_schedule_starts_at_its_peak_without_warmup_and_is_never_negative(type):
    schedule = make_schedule(type, PEAK, 10)

    assert schedule(0) == pytest.approx(PEAK)
    assert all(schedule(step) >= 0 for step in range(30))


def test_an_inverse_square_root_without_a_warmup_is_that_of_transformers():
    schedule = make_schedule("inverse_sqrt", PEAK, 10)

    assert schedule(30_000) == pytest.approx(PEAK / 2)  # 1 / sqrt((30,000 + 10,000) / 10,000)


@pytest.mark.parametrize("type", SCHEDULE_TYPES)
def test_a_warmup_that_is_longer_than_the_training_rises_no_faster(type):
    schedule = make_schedule(type, PEAK, 4, WARMUP)

    assert schedule(3) == pytest.approx(PEAK * 3 / WARMUP)


@pytest.mark.parametrize("type", SCHEDULE_TYPES)
def test_a_schedule_with_a_least_rate_ends_at_it(type):
    schedule = jax.jit(make_schedule(type, PEAK, TOTAL, WARMUP, min_ratio=0.4))

    found = [float(schedule(step)) for step in range(TOTAL + 1)]

    def ratio(step):
        share = AFTER_WARMUP[type](step)
        # A decay ends at the least rate; the inverse square root stops falling there.
        return max(share, 0.4) if type == "inverse_sqrt" else 0.4 + 0.6 * share

    expected = [PEAK * (s / WARMUP if s < WARMUP else ratio(s)) for s in range(TOTAL + 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("type", ["adamw", "lion"])
def test_the_betas_are_those_of_the_published_update(type):
    rng = np.random.default_rng(0)
    param, gradients = rng.normal(size=4), rng.normal(size=(5, 4))
    optimizer = make_optimizer(type, 0.01, b1=0.7, b2=0.9, eps=0.1)

    state, found = optimizer.init(np.float32(param)), []
    for gradient in gradients:
        update, state = optimizer.update(np.float32(gradient), state, np.float32(param))
        found.append(update)

    first, second = np.zeros(4), np.zeros(4)
    for count, (update, gradient) in enumerate(zip(found, gradients, strict=True), start=1):
        if type == "lion":
            step = np.sign(0.7 * first + 0.3 * gradient)
            first = 0.9 * first + 0.1 * gradient
        else:
            first = 0.7 * first + 0.3 * gradient
            second = 0.9 * second + 0.1 * gradient**2
            step = first / (1 - 0.7**count) / (np.sqrt(second / (1 - 0.9**count)) + 0.1)
        np.testing.assert_allclose(update, -0.01 * step, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linaer", 1e-4, 10), "'linaer' is unknown; allowed: linear, cosine"),
        (("linear", -1e-4, 10), "must not be negative"),
        (("linear", float("nan"), 10), "must not be negative"),
        (("linear", 1e-4, 0), "total_steps=0"),
        (("linear", 1e-4, 10, -1), "warmup_steps=-1"),
    ],
)
def test_a_schedule_out_of_range_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


@pytest.mark.parametrize("type", OPTIMIZER_TYPES)
def test_every_optimizer_descends_and_decays_only_where_it_may(type):
    params = {"matrix": np.full((4, 4), 2.0, np.float32), "norm": np.full(4, 2.0, np.float32)}
    optimizer = make_optimizer(
        type,
        optax.constant_schedule(0.1),
        weight_decay=0.5,
        decay_mask={"matrix": True, "norm": False},
    )
    zero = jax.tree.map(np.zeros_like, params)
    ones = jax.tree.map(np.ones_like, params)

    still, _ = optimizer.update(zero, optimizer.init(params), params)
    moved, _ = optimizer.update(ones, optimizer.init(params), params)

    # 0.1 (rate) × 0.5 (decay) × 2 (value), whatever the gradient.
    np.testing.assert_allclose(still["matrix"], np.full((4, 4), -0.1), rtol=1e-5)
    np.testing.assert_allclose(still["norm"], np.zeros(4), atol=1e-7)
    assert (np.asarray(moved["norm"]) < 0).all()


def test_adafactor_limits_the_update_of_each_layer_of_a_stack_by_itself():
    """As where each layer is an array, by Shazeer and Stern 2018, algorithm 4."""
    params = {"stack": np.ones((2, 3), np.float32), "one": np.ones(3, np.float32)}
    dims = {"stack": (0,), "one": ()}
    optimizer = make_optimizer("adafactor", 0.1, stacked=dims)
    stack = np.array([[1.0, 1, 1], [1, 1, 1]], np.float32)

    _, state = optimizer.update({"stack": stack, "one": stack[1]}, optimizer.init(params), params)
    grown = {"stack": stack * [[10], [1]], "one": stack[1] / 10}
    found, _ = optimizer.update(jax.tree.map(np.float32, grown), state, params)

    decay = 1 - 2**-0.8
    smaller = 0.1 / math.sqrt(decay + (1 - decay) * 0.1**2)
    # Ten times the gradient is 1.31 after its scaling, and its layer alone is scaled down.
    np.testing.assert_allclose(found["stack"], np.full((2, 3), -0.1), rtol=1e-5)
    np.testing.assert_allclose(found["one"], np.full(3, -0.1 * smaller), rtol=1e-5)


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
STACKS = {
    "t5": {**T5, "num_layers": 2},
    "llama": {**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", STACKS)
def test_the_dims_of_a_stack_number_what_published_files_have_as_tensors(name):
    """Other families differ: files have GPT-2's q, k and v in one tensor, and experts apart."""
    family = find_model(name)
    config = family.Config(**STACKS[name], vocab_size=40)
    shapes, ids = family.abstract_params(config), jax.ShapeDtypeStruct((2, 4), np.int32)
    inputs = [ids] * (3 if name == "t5" else 2)

    found = stacked_dims(shapes, partial(family.apply, config), *inputs)

    for (path, dims), layout in zip(
        jax.tree.leaves_with_path(found, is_leaf=lambda x: isinstance(x, tuple)),
        jax.tree.leaves(family.tensor_layouts(config)),
        strict=True,
    ):
        assert [layout.dims[at] for at in dims] == layout.stacked, path


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="'adam' is unknown; allowed: adamw, adafactor, lion, sgd"):
        make_optimizer("adam", 1e-3)
