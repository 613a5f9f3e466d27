"""Models compute on a GPU what they compute on the processor, by whichever kernel attends."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import Sampling, generate

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 3, 200
_LLAMA = {"vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
          "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip
# Between them: plain heads, soft caps with windows, a norm of heads, experts, latent heads, sinks.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 384, "n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 256,
             "bos_token_id": 2, "eos_token_id": 1},
    "llama": _LLAMA,
    "gemma2": {**_LLAMA, "head_dim": 64, "sliding_window": 50, "query_pre_attn_scalar": 64,
               "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "qwen3_moe": {**_LLAMA, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 128},
    "deepseek_v3": {**_LLAMA, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
                    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64,
                    "first_k_dense_replace": 1, "moe_intermediate_size": 128,
                    "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                    "num_experts_per_tok": 2},
    "gpt_oss": {**_LLAMA, "head_dim": 64, "sliding_window": 50, "num_local_experts": 4,
                "num_experts_per_tok": 2},
}  # fmt: skip


def case_of(family: str, **changes: Any) -> tuple[Any, Any, Any]:
    module = find_model(family)
    values = {"model_type": family, **FAMILIES[family]}
    config = module.Config.from_hugging_face(values).updated(changes)
    params = jax.tree.map(lambda leaf: 2 * leaf, module.init_params(config, jax.random.key(0)))
    return module, config, params


def batch_of(is_packed: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    batch = {"input_ids": random.integers(2, 384, (ROWS, LENGTH), dtype=np.int32)}
    if is_packed:
        lengths = [70, 90, 40]
        batch["segment_ids"] = np.repeat([[1, 2, 3]], lengths, axis=1).repeat(ROWS, axis=0)
        places = np.concatenate([np.arange(length) for length in lengths])
        batch["position_ids"] = np.tile(places, (ROWS, 1)).astype(np.int32)
    return batch


def loss_and_gradients(case: tuple[Any, Any, Any], batch: Any, device: jax.Device) -> Any:
    module, config, params = case
    deployer = Deployer(devices=[device], matmul_precision="highest")

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        hidden, head, _ = module.apply_before_head(
            config, params, batch["input_ids"], position_ids=batch.get("position_ids"),
            segment_ids=batch.get("segment_ids"),
        )  # fmt: skip
        labels = jnp.roll(batch["input_ids"], -1, axis=1)
        totals, weights = chunked_cross_entropy(
            partial(module.score, config), head, hidden, labels, num_chunks=2
        )
        return jnp.sum(totals) / jnp.sum(weights)

    step = jax.jit(deployer.on_mesh(jax.value_and_grad(mean_loss)))
    loss, gradients = step(*jax.device_put((params, batch), device))
    return float(loss), jax.tree.map(np.float32, gradients)


def largest_error(found: Any, expected: Any) -> float:
    """Of all parameters' gradients: the largest difference ÷ the gradient's norm."""

    def error(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-20))

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_in_float32_are_the_processors(family, is_packed, gpu, cpu):
    case, batch = case_of(family), batch_of(is_packed)

    loss, gradients = loss_and_gradients(case, batch, gpu)

    expected_loss, expected = loss_and_gradients(case, batch, cpu)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert largest_error(gradients, expected) < 1e-3


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_kernels_round_bfloat16_no_worse_than_formed_scores(family, is_packed, gpu, cpu):
    """Each by its distance from float32."""
    batch = batch_of(is_packed)
    _, exact = loss_and_gradients(case_of(family), batch, cpu)

    def error(attention: str) -> float:
        case = case_of(family, dtype="bfloat16", attention=attention)
        return largest_error(loss_and_gradients(case, batch, gpu)[1], exact)

    assert error("auto") < 1.2 * error("xla")


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "drawn": {"sampling": Sampling(temperature=0.8, top_k=20, top_p=0.9)},
}


@pytest.mark.parametrize(
    ("family", "how"),
    [*((family, "greedy") for family in FAMILIES), ("llama", "beams"), ("gemma2", "drawn")],
)
def test_texts_are_the_processors(family, how, gpu, cpu):
    module, config, params = case_of(family)
    ids = np.random.default_rng(2).integers(2, 384, (4, 24), dtype=np.int32)
    mask = (np.arange(24) >= [[0], [5], [11], [20]]).astype(np.int32)
    rngs = jax.random.split(jax.random.key(3), 4) if how == "drawn" else None

    def texts(device: jax.Device) -> np.ndarray:
        deployer = Deployer(devices=[device], matmul_precision="highest")
        search = partial(generate, module, config, max_new_tokens=24, **SEARCHES[how])
        run = jax.jit(deployer.on_mesh(search))
        given = jax.device_put((params, ids, mask, rngs), device)
        return np.asarray(run(*given[:3], rngs=given[3]).tokens)

    np.testing.assert_array_equal(texts(gpu), texts(cpu))
