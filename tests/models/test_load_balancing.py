"""The load-balancing loss of each text: against the torch reference, and alone in any row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.feed_forward.experts import choose_experts, load_balancing_losses
from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import save_pretrained
from redco_flow.models.layer_config import MixtureConfig

mixtral = find_model("mixtral")

IGNORED = -100


def test_a_balanced_router_costs_the_least():
    rng = np.random.default_rng(0)
    balanced = np.tile(np.eye(4, dtype=np.float32) * 1e-3, (2, 3, 4, 1))
    collapsed = balanced + np.array([9, 9, 0, 0], np.float32)

    least = load_balancing_losses(balanced, 1)

    np.testing.assert_allclose(least, np.ones((3, 16)), rtol=1e-3)
    assert (load_balancing_losses(collapsed + rng.normal(0, 0.1, collapsed.shape), 1) > 1.5).all()


@pytest.mark.parametrize("decoder", ["mixtral"], indirect=True)
def test_the_loss_of_one_example_and_all_its_gradients_are_the_torch_references(
    decoder, padded_batch, torch_reference, tmp_path
):
    import torch

    changes = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    decoder = decoder._replace(config=decoder.config.updated(changes))
    config = decoder.config
    one = {name: values[:1] for name, values in padded_batch.items()}
    # A row's first token may follow padding, from which nothing is to be predicted.
    is_wanted = (one["attention_mask"] == 1) & (one["position_ids"] > 0)
    one["labels"] = np.where(is_wanted, one["input_ids"], IGNORED)
    reference = torch_reference(decoder)
    expected = reference(**{name: torch.tensor(values) for name, values in one.items()})
    expected.loss.backward()

    @jax.jit
    def found(params: Any) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            mask, labels = one["attention_mask"], np.roll(one["labels"], -1, axis=1)
            logits, router_logits = mixtral.apply_with_router(
                config, params, one["input_ids"], mask
            )
            (total,), (weight,) = cross_entropy(logits, labels)
            losses = load_balancing_losses(router_logits, config.num_experts_per_tok, mask)
            balance = jnp.sum(losses * (labels >= 0))
            return (total + config.router_aux_loss_coef * balance) / weight, balance / weight

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, balance), gradients = found(decoder.params)
    # 1e-6: float32 sums in other orders.
    np.testing.assert_allclose(balance, expected.aux_loss.item(), rtol=1e-6)
    np.testing.assert_allclose(loss, expected.loss.item(), rtol=1e-6)
    assert_near_gradients(decoder, gradients, reference, tmp_path / "gradients")


def assert_near_gradients(decoder: Any, gradients: Any, reference: Any, directory: Path) -> None:
    """Compare those of every parameter under the names that files have."""
    for parameter in reference.parameters():
        parameter.data = parameter.grad
    reference.save_pretrained(directory)
    expected = load_file(directory / "model.safetensors")
    save_pretrained(directory / "found", decoder.module, decoder.config, gradients)
    found = load_file(directory / "found" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        tolerance = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.slow
def test_of_experts_that_are_alike_the_loss_counts_those_that_compute():
    logits = jnp.asarray([[1, 1, 1, 0], [0, 2, 0, 2], [0, 0, 0, 0], [0, 3, 1, 1]], jnp.float32)
    experts, _ = choose_experts(MixtureConfig(4, 2, 8, "silu"), logits)
    share_of_tokens = np.bincount(np.ravel(experts), minlength=4) / 4
    share_of_routing = np.mean(jax.nn.softmax(logits, axis=-1), axis=0)

    found = load_balancing_losses(logits[None, None], 2)

    np.testing.assert_allclose(found, 4 * np.sum(share_of_tokens * share_of_routing), rtol=1e-6)


@pytest.mark.slow
def test_every_token_of_a_packed_row_has_the_loss_of_its_text_alone():
    rng = np.random.default_rng(0)
    lengths, num_layers, num_experts = (5, 1, 7, 2), 3, 4
    texts = [rng.normal(size=(num_layers, 1, n, num_experts)).astype(np.float32) for n in lengths]
    padding = rng.normal(size=(num_layers, 1, 3, num_experts)).astype(np.float32)
    # The same number again, later in the row, is another text.
    ids = np.repeat([4, 7, 4, 1, 0], [*lengths, 3])[None]

    losses = jax.jit(partial(load_balancing_losses, experts_per_token=2))
    packed = losses(np.concatenate([*texts, padding], axis=2), attention_mask=ids, segment_ids=ids)

    alone = [losses(text) for text in texts]
    expected = np.concatenate([*alone, np.zeros((1, 3))], axis=1)
    # 1e-6: float32 sums in other orders.
    np.testing.assert_allclose(packed, expected, rtol=1e-6)
    assert len({float(text[0, 0]) for text in alone}) == len(lengths)


@pytest.mark.slow
def test_a_row_of_padding_alone_gives_neither_nan_nor_gradient():
    """Engine case 43: the loss is never NaN."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 4, 3)), jnp.float32)
    nothing = jnp.zeros((1, 4), jnp.int32)

    for segment_ids in (None, nothing):

        @jax.jit
        def losses_and_gradient(x: jax.Array, ids: Any = segment_ids) -> Any:
            losses, pull_back = jax.vjp(lambda x: load_balancing_losses(x, 2, nothing, ids), x)
            return losses, pull_back(jnp.ones((1, 4)))[0]

        losses, gradient = losses_and_gradient(logits)
        np.testing.assert_array_equal(losses, np.zeros((1, 4)))
        np.testing.assert_array_equal(gradient, np.zeros(logits.shape))
