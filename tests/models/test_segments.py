"""Decoding in segments, whose caches grow, gives the tokens of one loop over the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from redco_flow import Deployer
from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import LogitsProcessing, Sampling, generate
from redco_flow.models.generation.greedy import segment_length

t5 = find_model("t5")

# Two segments each, by number of texts.
NEW_TOKENS = {4: 70, 1: 260}
EOS = 1
LENGTHS = (6, 1, 4, 8)
FACE = ("decoding_params", "encode", "init_cache", "prefill", "decode_step")
one_family = pytest.mark.parametrize("decoder", ["llama3"], indirect=True)
gated = pytest.mark.parametrize("config", ["v1.1"], indirect=True)


def prompts(side: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompts padded on one side, and which of their places are tokens."""
    places, lengths = np.arange(max(LENGTHS)), np.array(LENGTHS)[:, None]
    mask = places >= max(LENGTHS) - lengths if side == "left" else places < lengths
    ids = np.random.default_rng(3).integers(2, 11, mask.shape)
    return np.where(mask, ids, 0).astype(np.int32), mask.astype(np.int32)


def in_one_loop(module: Any) -> Any:
    """The same model without `grow_cache`, as a module of a user's own may be."""
    return SimpleNamespace(
        **{name: getattr(module, name) for name in FACE if hasattr(module, name)}
    )


def search(module: Any, config: Any, num_beams: int, **how: Any) -> Any:
    length = NEW_TOKENS[num_beams * how.get("num_return_sequences", 1)]
    return jax.jit(
        partial(generate, module, config, max_new_tokens=length, num_beams=num_beams, **how)
    )


def test_segments_are_few_and_none_is_short_beside_what_was_read():
    lengths = [segment_length(new, beams, read) for new, beams, read in (
        (64, 1, 0), (255, 1, 0), (256, 1, 1024), (257, 1, 0), (64, 4, 64), (4096, 1, 64),
        (256, 1, 4096), (1, 1, 1 << 20),
    )]  # fmt: skip

    assert lengths == [64, 255, 128, 129, 32, 1024, 256, 1]


@pytest.mark.slow
@one_family
def test_a_decoder_only_model_continues_prompts_as_in_one_loop(decoder):
    case = decoder.changed(vocab_size=11, seed=7)
    rngs = jax.random.split(jax.random.key(0), len(LENGTHS))
    how = {"num_beams": 1, "sampling": Sampling(), "num_return_sequences": 4}
    how["processing"] = LogitsProcessing(min_new_tokens=50)
    inputs = (case.params, *prompts("right"))

    found = search(case.module, case.config, **how)(*inputs, rngs=rngs)

    whole = search(in_one_loop(case.module), case.config, **how)(*inputs, rngs=rngs)
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_allclose(found.scores, whole.scores, rtol=1e-5)
    is_past_first = np.asarray(found.tokens)[..., found.tokens.shape[-1] // 2 :] != EOS
    assert is_past_first.any(), "a text goes on in the second segment"


@pytest.mark.slow
@one_family
def test_prompts_are_continued_as_by_the_torch_reference(decoder, torch_reference):
    import torch

    case = decoder.changed(vocab_size=11, seed=7)
    ids, mask = prompts("left")

    found = search(case.module, case.config, num_beams=4)(case.params, ids, mask)

    expected = torch_reference(case).generate(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        attention_mask=torch.tensor(mask, dtype=torch.int64),
        max_new_tokens=NEW_TOKENS[4],
        num_beams=4,
        do_sample=False,
    )
    assert until_end(found.tokens) == until_end(expected[:, ids.shape[1] :])


@pytest.mark.slow
@gated
def test_an_encoder_decoder_gives_the_tokens_of_torch(config, make_params, torch_model):
    import torch

    config = config.updated({"vocab_size": 11})
    params, (ids, mask) = make_params(config, seed=4), prompts("right")

    found = search(t5, config, num_beams=4)(params, ids, mask)

    expected = torch_model(config, params).generate(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        attention_mask=torch.tensor(mask, dtype=torch.int64),
        max_new_tokens=NEW_TOKENS[4],
        num_beams=4,
        do_sample=False,
    )
    assert until_end(found.tokens) == until_end(expected[:, 1:])


def until_end(tokens: Any) -> list[list[int]]:
    rows = np.asarray(tokens).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@pytest.mark.slow
@one_family
@pytest.mark.covers("one device", family="llama", mesh="data × fsdp × model")
def test_a_split_model_gives_the_same_tokens(decoder):
    case = decoder.changed(vocab_size=12, num_key_value_heads=4, seed=7)
    ids, mask = prompts("left")
    run = search(case.module, case.config, num_beams=4)
    deployer = Deployer(2, num_fsdp_shards=2, devices=jax.devices()[:8])
    rules = deployer.get_sharding_rules(case.params, partial(case.module.apply, case.config), ids)

    params = deployer.shard_params(case.params, rules)
    found = jax.jit(deployer.on_mesh(run))(params, *deployer.put_rows((ids, mask)))

    np.testing.assert_array_equal(found.tokens, run(case.params, ids, mask).tokens)


@one_family
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_layers_are_unstacked_for_the_platform_of_the_mesh(decoder, platform):
    """What is compiled ahead for a TPU, on a machine without one, is what would run there."""
    mesh = AbstractMesh(
        (1, 1),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        abstract_device=AbstractDevice(platform, 1, platform),
    )

    with jax.sharding.use_abstract_mesh(mesh):
        params = jax.eval_shape(
            partial(decoder.module.decoding_params, decoder.config), decoder.params
        )

    assert isinstance(params["layers"], tuple) == (platform != "tpu")


@pytest.mark.slow
def test_a_token_moves_little_more_than_weights_and_filled_cache_once():
    """Compiled for a v5p chip, in two segments."""
    pytest.importorskip("libtpu", reason="pip install libtpu")
    script = Path(__file__).parents[2] / "benchmarks" / "decode_cost.py"
    environment = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

    done = subprocess.run(
        [sys.executable, script, "--shape", "tiny", "--layers", "8", "--prompt", "256"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip

    record = json.loads(done.stdout.splitlines()[-1])
    assert record["segments"] == [128, 256]
    assert 0.9 <= record["ratio"] <= 1.25
