"""Every decoder-only family against transformers/torch: numbers, gradients, files."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from redco_flow.models.hub.pretrained import load_pretrained, read_model, save_pretrained
from redco_flow.models.hub.tensors import named_tensors

INPUTS = ("input_ids", "attention_mask")


def torch_inputs(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(values) for name, values in batch.items()}


@pytest.mark.covers("transformers on torch", family="decoder")
def test_logits_equal_the_torch_reference(decoder, padded_batch, torch_reference):
    """Engine cases 17 and 53: within 1e-5 of the largest logit, float32, either padding."""
    import torch

    with torch.no_grad():
        expected = torch_reference(decoder)(**torch_inputs(padded_batch)).logits.numpy()

    found = np.asarray(decoder.apply(*(padded_batch[name] for name in INPUTS)))

    is_token = padded_batch["attention_mask"] == 1
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(found[is_token], expected[is_token], rtol=0, atol=tolerance)


# One for each mechanism: fused kernels and learned positions, blocks side by side, projected
# embeddings, norms of queries and keys, norms of results, soft caps with windows, sinks and biases
# of experts, and a latent; `test_load_balancing` has Mixtral's. All logits are compared above.
DIFFERENTIATED = (
    "gpt2", "gptj", "opt-350m", "qwen3", "olmo2-grouped", "gemma2", "gpt_oss", "deepseek_v3",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DIFFERENTIATED, indirect=True)
@pytest.mark.covers("transformers on torch", family="decoder")
def test_gradients_of_every_parameter_equal_the_torch_reference(
    decoder, padded_batch, torch_reference, tmp_path
):
    """Engine cases 15 and 53: torch adds both gradients of a tied embedding, and so do we."""
    # A row's first token follows padding, from which nothing is to be predicted.
    is_wanted = (padded_batch["attention_mask"] == 1) & (padded_batch["position_ids"] > 0)
    labels = np.where(is_wanted, padded_batch["input_ids"], -100)
    reference = torch_reference(decoder)
    reference(**torch_inputs({**padded_batch, "labels": labels})).loss.backward()
    # Saved in the weights' places, gradients come under the names that files have.
    for parameter in reference.parameters():
        parameter.data = parameter.grad
    for buffer in reference.buffers():  # such as what corrects a router's choice alone
        buffer.data.zero_()
    reference.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients" / "model.safetensors")

    @jax.jit
    def gradient(params: Any) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            inputs = (padded_batch[name] for name in INPUTS)
            log_probs = jax.nn.log_softmax(decoder.module.apply(decoder.config, params, *inputs))
            wanted = labels[:, 1:]
            chosen = jnp.take_along_axis(log_probs[:, :-1], np.maximum(wanted, 0)[..., None], 2)
            return -jnp.sum(chosen[..., 0] * (wanted != -100)) / np.sum(wanted != -100)

        return jax.grad(mean_loss)(params)

    layouts = decoder.module.tensor_layouts(decoder.config)
    found = dict(named_tensors(layouts, gradient(decoder.params)))

    assert found.keys() == expected.keys()
    # The largest of all: a bias of keys shifts every score alike, and has no gradient at all.
    largest = max(np.abs(tensor).max() for tensor in expected.values())
    for name, tensor in found.items():
        scale = max(np.abs(expected[name]).max(), 1e-3 * largest)
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=1e-5 * scale, err_msg=name)


def test_a_checkpoint_of_transformers_is_saved_again_bit_by_bit(decoder, torch_reference, tmp_path):
    """Engine case 53: theirs, ours, theirs; and what was ours in the beginning."""
    torch_reference(decoder).save_pretrained(tmp_path / "theirs")
    module, config = read_model(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", module, config)

    save_pretrained(tmp_path / "again", module, config, ours)

    assert config == decoder.config
    jax.tree.map(np.testing.assert_array_equal, ours, decoder.params)
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_transformers_reads_an_exported_config_as_the_same_model(decoder, torch_reference):
    """Nothing that shapes the model is left to a default of theirs."""
    theirs = torch_reference(decoder).config.to_dict()

    assert type(decoder.config).from_hugging_face(theirs) == decoder.config
