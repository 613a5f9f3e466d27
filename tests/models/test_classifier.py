"""Heads of labels against transformers on torch: logits, gradients, files with and without them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.models import classifier
from redco_flow.models.classifier import ClassifierConfig, published_labels
from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import save_pretrained
from redco_flow.models.hub.tensors import CheckpointMismatch, TensorFiles

from .conftest import DECODERS, ENCODERS, ModelCase, make_case, random_params

MODELS = {**ENCODERS, **DECODERS}
LABELS = ("apple", "fig", "pear", "plum", "rye")
_OTHERS = ("opt-350m", "gemma2", "mixtral")


def with_head(name: str, labels: tuple[str, ...] = LABELS) -> ModelCase:
    family, values = MODELS[name]
    inner = find_model(family).Config.from_hugging_face({**values, "pad_token_id": 0})
    config = ClassifierConfig.of(family, inner, labels)
    return ModelCase(classifier, config, random_params(classifier, config))


@pytest.fixture(
    params=[
        *("bert", "roberta", "gpt2", "llama3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS),
    ]
)
def case(request: pytest.FixtureRequest) -> ModelCase:
    return with_head(request.param)


@pytest.fixture
def batch(case: ModelCase) -> dict[str, np.ndarray]:
    """Texts of three lengths, padded behind, the second half of each a second text."""
    source = np.random.default_rng(1)
    mask = (np.arange(11) < np.array([11, 7, 2])[:, None]).astype(np.int32)
    ids = np.where(mask, source.integers(3, 61, mask.shape), case.config.inner.filler_token_id)
    found = {"input_ids": ids, "attention_mask": mask}
    if case.config.num_token_types > 1:
        found["token_type_ids"] = np.repeat([[0] * 5 + [1] * 6], 3, axis=0)
    return found


def torch_inputs(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.tensor(values) for name, values in batch.items()}


def assert_scores_equal(case: ModelCase, batch: dict[str, np.ndarray], reference: Any) -> None:
    import torch

    with torch.no_grad():
        expected = reference(**torch_inputs(batch)).logits.numpy()
    found = jax.jit(partial(classifier.apply, case.config))(case.params, **batch)
    # Engine case 53: within 1e-5 of the largest, float32.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.covers("transformers on torch", family="case")
def test_scores_of_labels_equal_the_torch_reference(case, batch, torch_reference):
    reference = torch_reference(case)

    assert type(reference).__name__.endswith("ForSequenceClassification")
    assert reference.config.id2label == dict(enumerate(LABELS))
    assert_scores_equal(case, batch, reference)


@pytest.mark.parametrize(("hidden", "head"), [(0.125, None), (0.0, 0.0), (0.0, 0.25)])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_head_drops_as_much_as_the_torch_reference(name, hidden, head, tmp_path):
    from transformers import AutoModelForSequenceClassification

    case = with_head(name)
    rates = {"hidden_dropout_prob": hidden, "classifier_dropout": head}
    values = {**case.config.inner.to_hugging_face(), "attention_probs_dropout_prob": 0.0, **rates}
    config = replace(case.config, inner=case.config.inner.from_hugging_face(values))
    save_pretrained(tmp_path, classifier, config, case.params)
    ids = jnp.full((4, 3), 5)

    scores, same = (
        classifier.apply(config, case.params, ids, jnp.ones_like(ids), rngs=keys)
        for keys in (jax.random.split(jax.random.key(0), 4), None)
    )

    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    dropout = reference.dropout if name == "bert" else reference.classifier.dropout
    assert config.inner.head_dropout == dropout.p
    changed = config.inner.updated({"hidden_dropout_prob": 0.5})
    assert changed.head_dropout == (0.5 if head is None else head)
    assert bool(jnp.array_equal(scores, same)) == (not hidden and not dropout.p)


@pytest.mark.parametrize("case", ["gpt2"])
def test_gradients_equal_the_torch_reference(case, torch_reference, assert_same_gradients):
    case = with_head(case)
    ids = np.random.default_rng(1).integers(3, 61, (3, 9))
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    labels = np.array([0, 4, 2])
    reference = torch_reference(case)
    reference(**torch_inputs({**batch, "labels": labels})).loss.backward()

    def mean_loss(params: Any) -> jax.Array:
        scores = classifier.apply(case.config, params, **batch)
        return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(3), labels])

    assert_same_gradients(case, mean_loss, reference)


@pytest.mark.parametrize("name", ["gpt2"])
def test_one_output_without_labels_is_transformers_regression(name, torch_reference):
    case = with_head(name, ())
    reference = torch_reference(case)
    ids = np.random.default_rng(1).integers(3, 61, (3, 9))

    assert reference.config.problem_type == "regression"
    assert reference.config.num_labels == 1
    assert_scores_equal(case, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, reference)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_a_saved_head_is_read_again_bit_by_bit(name, tmp_path):
    case = with_head(name)
    save_pretrained(tmp_path, *case)

    found = classifier.load_params(case.config, tmp_path)

    jax.tree.map(np.testing.assert_array_equal, found, case.params)


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("bert", {"pooler", "classifier"}),
        ("llama3", {"classifier"}),
    ],
)
def test_a_model_with_another_head_or_none_gets_one_that_is_drawn_anew(name, drawn, tmp_path):
    published = make_case(*MODELS[name])
    save_pretrained(tmp_path, *published)
    config = with_head(name).config

    found = classifier.load_params(config, tmp_path)
    expected = classifier.init_params(config, jax.random.key(0))

    for part in found:
        if part not in drawn:
            jax.tree.map(np.testing.assert_array_equal, found[part], published.params[part])
    # Drawn within one program or outside of it, numbers are rounded otherwise.
    near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8)
    for part in drawn:
        jax.tree.map(near, found[part], expected[part])


def test_a_head_of_another_number_of_labels_is_drawn_anew(tmp_path):
    published = with_head("bert")
    save_pretrained(tmp_path, *published)
    config = with_head("bert", ("no", "yes")).config

    found = classifier.load_params(config, tmp_path)

    assert found["classifier"]["kernel"].shape == (24, 2)
    np.testing.assert_array_equal(found["pooler"]["kernel"], published.params["pooler"]["kernel"])


def test_other_tensors_that_are_missing_are_told(tmp_path):
    case = with_head("bert")
    save_pretrained(tmp_path, *case)
    with TensorFiles(tmp_path) as files:
        kept = {name: files.read(name) for name in files.names if "word_emb" not in name}
    from safetensors.numpy import save_file

    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        CheckpointMismatch, match=r"missing: bert\.embeddings\.word_embeddings\.weight"
    ):
        classifier.load_params(case.config, tmp_path)


def test_labels_of_a_published_model_are_known_where_it_names_them(tmp_path):
    save_pretrained(tmp_path, *with_head("bert"))
    values = json.loads((tmp_path / "config.json").read_text())

    assert published_labels(values) == list(LABELS)
    assert published_labels({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}) is None
    assert published_labels({}) is None
