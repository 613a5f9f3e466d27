"""classification and regression: the tokenizer's templates, batches, losses and predictions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from redco_flow.recipes import classification, regression
from redco_flow.recipes.classification import Settings
from redco_flow.recipes.parts.labelled_texts import Task
from redco_flow.text.pairs import PAIR_SEPARATOR
from redco_flow.text.tokenizer import TextTokenizer
from tests.drawn_params import draw_like

WORDS = [f"w{number}" for number in range(20)]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]
BERT = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
)
ROBERTA = processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1))
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 20, "max_position_embeddings": 24}


def tokenizer_with(template):
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
    backend.post_processor = template
    return TextTokenizer(backend, pad_id=0, eos_id=2)


def encode(texts, tokenizer, length, suffix=""):
    sources = [PAIR_SEPARATOR.join(pair) for pair in texts]
    around = {"source_prefix": "", "source_suffix": suffix}
    lengths = {"max_source_length": length, "max_target_length": 2}
    return classification.encode(sources, [], tokenizer, **around, **lengths)


def random_texts(num_texts):
    source = np.random.default_rng(0)
    return [
        tuple(" ".join(source.choice(WORDS, source.integers(1, 16))) for _ in range(num_texts))
        for _ in range(40)
    ]


@pytest.mark.parametrize("template", [BERT, ROBERTA], ids=["bert", "roberta"])
@pytest.mark.parametrize("num_texts", [1, 2])
def test_texts_are_encoded_and_cut_as_transformers_does(template, num_texts):
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizer_with(template)
    texts = random_texts(num_texts)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, pad_token="[PAD]")
    columns = map(list, zip(*texts, strict=True))
    expected = whole(*columns, truncation=True, max_length=14, return_token_type_ids=True)

    found = encode(texts, tokenizer_with(template), 14)
    firsts, seconds = list(found.source_ids), list(found.target_ids)

    assert [a + b for a, b in zip(firsts, seconds, strict=True)] == expected["input_ids"]
    types = [[0] * len(a) + [1] * len(b) for a, b in zip(firsts, seconds, strict=True)]
    assert types == expected["token_type_ids"]
    assert any(found.is_source_cut)
    assert not all(found.is_source_cut)


def test_a_suffix_is_never_cut_off():
    found = encode([("w1 w2 w3", "w4 w5 w6")], tokenizer_with(BERT), 8, "w7")

    assert list(found.source_ids) == [[1, 4, 5, 2]]
    assert list(found.target_ids) == [[7, 8, 10, 2]]


def test_a_length_without_room_for_both_texts_is_refused():
    with pytest.raises(ValueError, match=r"leaves 1 tokens beside .* \(max_source_length\)"):
        encode([("w1", "w2")], tokenizer_with(BERT), 4)


def example(first, second, label):
    return {"row_id": "x", "source_ids": first, "target_ids": second, "references": [label]}


def build(classes=("no", "yes"), family="bert", **config):
    model = {"family": family, "config": {**SIZES, **config}}
    lengths = {"source_length": 8, "target_length": 8}
    tokenizer = tokenizer_with(BERT)
    if classes is None:
        return regression.build(model, tokenizer, **lengths)
    settings = Settings(list(classes))
    return classification.build(model, tokenizer, **lengths, settings=settings)


def test_a_batch_has_both_texts_in_a_row_and_tells_them_apart():
    examples = [example([1, 5, 2], [6, 7, 2], "yes"), example([1, 5, 6, 2], [], "no")]

    batch = build().collate_to([8])(examples)

    expected = {
        "input_ids": [[1, 5, 2, 6, 7, 2, 0, 0], [1, 5, 6, 2, 0, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]],
        "token_type_ids": [[0, 0, 0, 1, 1, 1, 0, 0], [0] * 8],
        "labels": [1, 0],
    }
    assert {name: value.tolist() for name, value in batch.items()} == expected


def test_a_row_is_as_wide_as_its_two_texts():
    widths = build().row_widths(np.array([3, 4]), np.array([3, 0]))

    assert widths.tolist() == [[6], [4]]


def test_a_family_with_one_type_of_tokens_gets_none():
    batch = build(family="roberta", type_vocab_size=1).collate_fn([example([1, 2], [3], "no")])

    assert "token_type_ids" not in batch


def test_losses_are_cross_entropy_and_squared_error_of_each_example():
    scores = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)

    totals, weights = Task(("a", "b", "c", "d")).loss(jnp.asarray(scores), jnp.array([3, 0, 1]))
    errors, ones = Task(()).loss(jnp.asarray(scores[:, :1]), jnp.array([1.0, 0.0, -2.0]))

    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(totals, -np.log(chances[[0, 1, 2], [3, 0, 1]]), rtol=1e-5)
    np.testing.assert_allclose(errors, (scores[:, 0] - [1, 0, -2]) ** 2, rtol=1e-5)
    np.testing.assert_array_equal([weights, ones], np.ones((2, 3)))


@pytest.mark.parametrize("classes", [("no", "yes"), (10, 20), None])
def test_predictions_are_names_of_classes_in_their_own_type_or_numbers(classes):
    recipe = build(classes)
    names = classes or ("0.5", "1.5")
    batch = recipe.collate_fn([example([1, 5, 2], [], str(name)) for name in names])
    params = draw_like(recipe.abstract_params())

    found = recipe.output_fn(jax.jit(recipe.make_pred_fn(None))(params, batch, None))

    assert len(found) == 2
    if classes:
        assert set(found) <= set(classes)
    else:
        assert {type(one) for one in found} == {float}
        assert batch["labels"].tolist() == [0.5, 1.5]


def test_a_record_of_the_recipe_makes_it_again_without_any_data():
    recipe = build()

    again = classification.build(
        recipe.model,
        tokenizer_with(BERT),
        source_length=8,
        target_length=8,
        settings=Settings(recipe.model["settings"]["classes"]),
    )

    assert again.model == recipe.model
    assert jax.tree.map(lambda leaf: leaf.shape, again.abstract_params()) == jax.tree.map(
        lambda leaf: leaf.shape, recipe.abstract_params()
    )


def test_dropout_differs_from_example_to_example_and_is_none_in_evaluation():
    recipe = build(hidden_dropout_prob=0.5)
    batch = recipe.collate_fn([example([1, 5, 2], [], "no")] * 2)
    params = draw_like(recipe.abstract_params())
    keys = jax.random.split(jax.random.key(1), 2)
    loss = jax.jit(recipe.loss_fn, static_argnums=3)

    trained, _ = loss(params, batch, keys, True)
    evaluated, _ = loss(params, batch, keys, False)

    assert trained[0] != trained[1]
    assert evaluated[0] == evaluated[1]


def test_texts_beyond_learned_positions_are_refused():
    with pytest.raises(
        ValueError, match="up to 16 tokens, and the model's learned positions reach"
    ):
        build(max_position_embeddings=10)


def test_a_classification_without_classes_is_refused():
    with pytest.raises(ValueError, match=r"settings\.classes has none"):
        build(())


def test_a_published_heads_classes_in_another_order_are_refused(tmp_path):
    recipe = build(("no", "yes"))
    recipe.save_pretrained(draw_like(recipe.abstract_params()), tmp_path)
    lengths = {"source_length": 8, "target_length": 8}
    model = {"name_or_path": str(tmp_path)}
    tokenizer = tokenizer_with(BERT)

    again = classification.build(model, tokenizer, **lengths, settings=Settings(["no", "yes"]))
    with pytest.raises(ValueError, match=r"classes are no, yes, in this order, and the data's"):
        classification.build(model, tokenizer, **lengths, settings=Settings(["yes", "no"]))

    assert again.load_params is not None
