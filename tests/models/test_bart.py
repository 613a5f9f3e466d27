"""BART against transformers on torch: logits, gradients, files, generated tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redco_flow.models.generation.generate import generate
from redco_flow.models.hub.pretrained import load_pretrained, read_model, save_pretrained
from redco_flow.models.transformer.encoder_decoder_model import EncoderDecoder

MODEL_INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")
MAX_NEW_TOKENS = 14
EOS, PAD = 2, 1
SOURCE_LENGTHS = (9, 3, 6, 1, 8, 5, 2, 7)
# What does not depend on the version is shown on the one with more parts.
one_version = pytest.mark.parametrize("bart", ["bart"], indirect=True)


@pytest.fixture
def batch(padded_batch) -> dict[str, np.ndarray]:
    """Sources padded in front, behind and not at all; targets of any lengths."""
    rng = np.random.default_rng(5)
    labels = rng.integers(3, 61, (3, 9))
    labels[np.arange(9) >= np.array([6, 9, 3])[:, None]] = -100
    shifted = np.pad(labels, ((0, 0), (1, 0)), constant_values=EOS)[:, :-1]
    return {
        "input_ids": padded_batch["input_ids"],
        "attention_mask": padded_batch["attention_mask"],
        "decoder_input_ids": np.where(shifted == -100, PAD, shifted),
        "labels": labels,
    }


def logits_of(case: Any, batch: dict[str, Any], params: Any = None, **how: Any) -> Any:
    inputs = (batch[name] for name in MODEL_INPUTS)
    return (case if params is None else case._replace(params=params)).apply(*inputs, **how)


def torch_inputs(batch: dict[str, np.ndarray], *names: str) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(batch[name]) for name in names}


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare relative to the largest element, the scale that rounding errors have."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.covers("transformers on torch", family="bart")
def test_logits_equal_the_torch_reference(bart, batch, torch_reference):
    """Engine case 53: within 1e-5 of the largest logit, float32, either padding."""
    import torch

    with torch.no_grad():
        expected = torch_reference(bart)(**torch_inputs(batch, *MODEL_INPUTS)).logits

    assert_near(logits_of(bart, batch), expected.numpy())


@pytest.mark.parametrize("bart", ["bart-scaled"], indirect=True)
def test_the_scale_of_embeddings_is_not_rounded_to_bfloat16(bart):
    """That of 24 dims would be 0.15% larger."""
    import torch
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

    table = np.array(bart.params["embedding"])
    reference = BartScaledWordEmbedding(*table.shape, PAD, embed_scale=24**0.5)
    reference.weight.data = torch.tensor(table)
    expected = reference.bfloat16()(torch.arange(3, 61)).detach().float()

    config = replace(bart.config, dtype="bfloat16")
    found = EncoderDecoder(config.core).apply(
        {"params": bart.params}, jnp.arange(3, 61), method="embed"
    )

    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@one_version
def test_a_mask_over_target_tokens_is_that_of_the_torch_reference(bart, batch, torch_reference):
    import torch

    batch["decoder_attention_mask"] = np.ones_like(batch["decoder_input_ids"])
    batch["decoder_attention_mask"][:, 1] = 0
    names = (*MODEL_INPUTS, "decoder_attention_mask")
    with torch.no_grad():
        expected = torch_reference(bart)(**torch_inputs(batch, *names)).logits

    found = logits_of(bart, batch, decoder_attention_mask=batch["decoder_attention_mask"])
    assert_near(found, expected.numpy())


@pytest.mark.slow
@one_version
@pytest.mark.covers("transformers on torch", family="bart")
def test_gradients_of_every_parameter_equal_the_torch_reference(
    bart, batch, torch_reference, assert_same_gradients
):
    """Engine cases 15 and 53; the bias of the logits is a constant, there as here."""
    # transformers gives padding's row of the table no gradient where it is read.
    batch["decoder_input_ids"] = np.where(batch["decoder_input_ids"] == PAD, 3, PAD + 5)
    reference = torch_reference(bart)
    reference(**torch_inputs(batch, *MODEL_INPUTS, "labels")).loss.backward()
    labels = batch["labels"]

    def mean_loss(params: Any) -> jax.Array:
        log_probs = jax.nn.log_softmax(logits_of(bart, batch, params))
        chosen = jnp.take_along_axis(log_probs, np.maximum(labels, 0)[..., None], 2)[..., 0]
        return -jnp.sum(chosen * (labels != -100)) / np.sum(labels != -100)

    assert_same_gradients(bart, mean_loss, reference)


def test_a_checkpoint_of_transformers_is_saved_again_bit_by_bit(bart, torch_reference, tmp_path):
    """Engine case 53: theirs, ours, theirs; and what was ours in the beginning."""
    torch_reference(bart).save_pretrained(tmp_path / "theirs")
    module, config = read_model(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", module, config)

    save_pretrained(tmp_path / "again", module, config, ours)

    jax.tree.map(np.testing.assert_array_equal, ours, bart.params)
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@one_version
def test_a_bare_model_as_the_first_were_published_is_read(bart, tmp_path):
    save_pretrained(tmp_path, *bart)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare["encoder.embed_tokens.weight"] = bare["shared.weight"].copy()
    del bare["final_logits_bias"]
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found = load_pretrained(tmp_path, bart.module, bart.config)

    expected = {**bart.params, "final_logits_bias": np.zeros((1, 61), np.float32)}
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def talkative(case: Any) -> Any:
    """A model of few tokens that heeds its source: some texts end early, others never."""
    return heeding(case.changed(vocab_size=11, seed=9))


def heeding(case: Any) -> Any:
    """Let what stands in the source and where outweigh what is the same for all rows."""

    def weigh(path: Any, leaf: jax.Array) -> jax.Array:
        names = {entry.key for entry in path}
        return leaf * (6 if names & {"cross_attention", "positions"} else 1)

    return case._replace(params=jax.tree_util.tree_map_with_path(weigh, case.params))


def sources() -> dict[str, np.ndarray]:
    """Rows padded in front and behind by turns."""
    rng = np.random.default_rng(1)
    places = np.arange(max(SOURCE_LENGTHS))
    lengths = np.array(SOURCE_LENGTHS)[:, None]
    mask = np.where(np.arange(8)[:, None] % 2, places >= 9 - lengths, places < lengths)
    ids = rng.integers(3, 11, mask.shape)
    return {"input_ids": np.where(mask, ids, PAD), "attention_mask": mask.astype(np.int32)}


def search(case: Any, batch: dict[str, Any], **how: Any) -> Any:
    run = case.jitted(generate, max_new_tokens=MAX_NEW_TOKENS, **how)
    return run(case.params, batch["input_ids"], batch["attention_mask"])


def torch_search(model: Any, batch: dict[str, Any], **how: Any) -> Any:
    return model.generate(
        **torch_inputs(batch, "input_ids", "attention_mask"),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )


def until_end(tokens: Any) -> list[list[int]]:
    rows = np.asarray(tokens).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("bart", ["bart-scaled"], indirect=True)
@pytest.mark.covers("transformers on torch", family="bart")
def test_greedy_tokens_equal_the_torch_reference(bart, torch_reference):
    """Forced tokens, by the config's own word, included."""
    case = talkative(bart)

    found = search(case, sources())

    expected = torch_search(torch_reference(case), sources())
    rows = until_end(found.tokens)
    assert rows == until_end(expected.sequences[:, 1:])
    assert len({len(row) for row in rows}) > 1, "the rows end at different lengths"
    assert all(row[-1] == EOS for row in rows)


@one_version
def test_a_longer_text_than_the_positions_reach_is_refused(bart, batch):
    long = {name: np.repeat(values, 3, axis=1) for name, values in batch.items()}

    with pytest.raises(ValueError, match="33 tokens long; the model has learned positions for 20"):
        logits_of(bart, long)
    with pytest.raises(ValueError, match="21 tokens long"):
        jax.eval_shape(
            partial(generate, bart.module, bart.config, max_new_tokens=21),
            bart.params, batch["input_ids"], batch["attention_mask"],
        )  # fmt: skip


@one_version
@pytest.mark.parametrize("are_unstacked", [True, False], ids=["layers unstacked", "layers stacked"])
def test_decoding_token_by_token_gives_the_logits_of_the_whole_target(bart, batch, are_unstacked):
    expected = np.asarray(logits_of(bart, batch))
    module, config, params = bart
    if are_unstacked:
        params = module.decoding_params(config, params)
        assert isinstance(params["decoder"]["layers"], tuple)
    ids, mask, targets = (batch[name] for name in MODEL_INPUTS)
    encoded = module.encode(config, params, ids, mask)
    sizes = {"num_beams": 1, "max_length": targets.shape[1]}
    cache = module.init_cache(config, params, encoded, mask, **sizes)
    step = jax.jit(module.decode_step, static_argnums=0)

    for position in range(targets.shape[1]):
        logits, cache = step(config, params, cache, targets[:, position : position + 1], position)

        assert_near(logits[:, 0], expected[:, position])
