"""Where keys and values lie while a model that is split over devices generates."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.models.generation.generate import generate

pytestmark = pytest.mark.slow

ROWS, PROMPT, NEW_TOKENS, HEAD_DIM = 4, 6, 7, 6
NUM_SHARDS = 4


@pytest.mark.parametrize("decoder", ["llama3"], indirect=True)
def test_a_device_keeps_only_its_heads_keys_and_values(decoder):
    """Also where key-value heads are fewer than shards: they are repeated until all can split."""
    num_kv_heads, num_beams = 2, 3
    case = decoder.changed(
        vocab_size=64, num_attention_heads=8, num_key_value_heads=num_kv_heads, head_dim=HEAD_DIM
    )
    deployer = Deployer(NUM_SHARDS)
    ids = np.random.default_rng(0).integers(2, 64, (ROWS, PROMPT)).astype(np.int32)
    rules = deployer.get_sharding_rules(case.params, partial(case.module.apply, case.config), ids)
    search = partial(
        generate, case.module, case.config, max_new_tokens=NEW_TOKENS, num_beams=num_beams
    )

    inputs = deployer.put_rows((ids, np.ones_like(ids)))
    params = deployer.shard_params(case.params, rules)
    hlo = jax.jit(deployer.on_mesh(search)).lower(params, *inputs).compile().as_text()

    num_places = PROMPT + NEW_TOKENS * num_beams
    kept = re.findall(rf"f32\[(?:\d+,)?(\d+),(\d+),{num_places},{HEAD_DIM}\]", hlo)
    num_held = max(num_kv_heads, NUM_SHARDS)
    num_data = deployer.num_data_shards
    assert set(kept) == {(str(ROWS // num_data), str(num_held // NUM_SHARDS))}
