from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from redco_flow.models import mixtral
from redco_flow.models.mixture import load_balancing_loss, routing_weights


def test_the_chosen_experts_share_all_weight_by_their_probability():
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05]], np.float32))

    found = routing_weights(logits, experts_per_token=2)

    expected = [[0, 4 / 7, 0, 3 / 7], [0.7 / 0.85, 0, 0.15 / 0.85, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_balanced_router_costs_the_least():
    rng = np.random.default_rng(0)
    balanced = np.tile(np.eye(4, dtype=np.float32) * 1e-3, (2, 3, 4, 1))
    collapsed = balanced + np.array([9, 9, 0, 0], np.float32)

    least = load_balancing_loss(balanced, 1)

    np.testing.assert_allclose(least, 1.0, rtol=1e-3)
    assert load_balancing_loss(collapsed + rng.normal(0, 0.1, collapsed.shape), 1) > 1.5


@pytest.mark.parametrize("decoder", ["mixtral"], indirect=True)
def test_the_load_balancing_loss_is_that_of_the_torch_reference(
    decoder, padded_batch, torch_reference
):
    import torch

    inputs = {name: torch.tensor(values) for name, values in padded_batch.items()}
    reference = torch_reference(decoder)
    with torch.no_grad():
        expected = reference(**inputs, output_router_logits=True).aux_loss.numpy()

    apply = jax.jit(partial(mixtral.apply_with_router, decoder.config))
    mask = padded_batch["attention_mask"]
    _, router_logits = apply(decoder.params, padded_batch["input_ids"], mask)

    assert router_logits.shape == (3, *mask.shape, 4)
    found = load_balancing_loss(router_logits, decoder.config.num_experts_per_tok, mask)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
