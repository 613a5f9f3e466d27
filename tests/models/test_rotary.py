from __future__ import annotations

import numpy as np
import pytest

from redco_flow.models.attention.rope import RopeScaling, RotaryConfig, read_scaling
from redco_flow.models.attention.rotary import (
    attention_factor,
    choose_rotation,
    frequencies,
    rotate,
    rotation,
    rotations,
)

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_each_pair_is_turned_like_a_complex_number(is_interleaved):
    config = RotaryConfig(num_dims=6, is_interleaved=is_interleaved)
    rng = np.random.default_rng(0)
    heads = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 100, (2, 5))

    found = np.asarray(rotate(config, heads, rotation(config, positions)))

    turned, rest = heads[..., :6], heads[..., 6:]
    real = turned[..., ::2] if is_interleaved else turned[..., :3]
    imaginary = turned[..., 1::2] if is_interleaved else turned[..., 3:]
    angle = positions[..., None, None] * 10_000.0 ** (-np.arange(3) / 3)
    numbers = (real + 1j * imaginary) * np.exp(1j * angle)
    parts = np.stack([numbers.real, numbers.imag], axis=-1)
    expected = (
        parts.reshape(turned.shape)
        if is_interleaved
        else np.concatenate([numbers.real, numbers.imag], axis=-1)
    )
    np.testing.assert_allclose(found[..., :6], expected, atol=1e-5)
    np.testing.assert_array_equal(found[..., 6:], rest)


def test_linear_scaling_stretches_every_frequency():
    plain = frequencies(RotaryConfig(64))

    found = frequencies(RotaryConfig(64, scaling=RopeScaling("linear", 4.0)))

    np.testing.assert_allclose(found, plain / 4, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    config = RotaryConfig(128, theta=500_000.0, scaling=LLAMA3)
    plain = frequencies(RotaryConfig(128, theta=500_000.0))
    wavelengths = 2 * np.pi / plain

    ratio = frequencies(config) / plain

    np.testing.assert_allclose(ratio[wavelengths < 8192 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 1 / 8, rtol=1e-6)
    between = ratio[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert len(between) > 2
    assert (np.diff(between) < 0).all()


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        YARN,
        {**YARN, "beta_fast": 16.0, "truncate": False, "attention_factor": 1.3},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096,
         "short_factor": [1 + pair / 50 for pair in range(64)], "long_factor": [9.0] * 64},
    ],
    ids=["llama3", "yarn", "yarn by hand", "yarn by mscale", "longrope"],
)  # fmt: skip
def test_scaled_frequencies_equal_the_torch_reference(scaling):
    pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_theta=500_000.0, rope_scaling=dict(scaling)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, device="cpu")

    found = RotaryConfig(128, theta=500_000.0, scaling=read_scaling(scaling, {}))

    np.testing.assert_allclose(frequencies(found), expected.numpy(), rtol=1e-5)
    np.testing.assert_allclose(attention_factor(found), factor, rtol=1e-7)


def test_layers_without_positions_are_not_turned_beside_those_that_are():
    turned = RotaryConfig(6)
    heads = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
    ways = rotations((turned, None), np.arange(10).reshape(2, 5))

    found = [rotate(turned, heads, choose_rotation(ways, np.int32(number))) for number in range(2)]

    np.testing.assert_array_equal(found[0], rotate(turned, heads, ways[0]))
    np.testing.assert_array_equal(found[1], heads)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "rope_type 'longrope' and no short_factor, long_",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}, "beta_fast 0; it must be a number"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0],
                "original_max_position_embeddings": 64,
            },
            "1 numbers as short",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "rope_type 'llama3' needs the length of pretraining|must be above low_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 2.0}, "needs the length of pretraining in tokens"),
    ],
)
def test_a_scaling_without_what_it_needs_is_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        RotaryConfig(64, scaling=read_scaling(scaling, {}))


def test_a_scaling_that_is_not_offered_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="rope_type 'dynamic'; it must be one of linear, llama3"):
        RopeScaling("dynamic", 2.0)
