"""The text-to-text recipe: shifting, padding, losses, decoding, and which models it accepts."""

import jax
import numpy as np
import pytest

from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.recipe import Generation
from redco_flow.recipes.text_to_text import encode
from redco_flow.recipes.text_to_text.run import collate
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer
from tests.drawn_params import draw_like

TINY = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
LAYOUT = {"source_length": 4, "target_length": 4, "vocab_size": 10, "pad_id": 0, "start_id": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["a few words, and some more words"] * 9, 280, "bpe"), folder)
    return TextTokenizer.load(folder)


def build(tokenizer, model=None, length=8):
    model = model or {"config": TINY}
    module = find_recipe("text_to_text")
    return module.build(model, tokenizer, source_length=length, target_length=length)


def example(source, target):
    return {"row_id": "x:1", "source_ids": np.array(source), "target_ids": np.array(target)}


def test_labels_are_shifted_exactly_once_also_at_the_maximal_length():
    """Engine case 33: labels are shifted once."""
    batch = collate([example([5, 1], [7, 8, 9, 1]), example([5, 6, 6, 1], [7, 1])], **LAYOUT)

    assert batch["labels"].tolist() == [[7, 8, 9, 1], [7, 1, -100, -100]]
    assert batch["decoder_input_ids"].tolist() == [[0, 7, 8, 9], [0, 7, 1, 0]]


def test_a_target_cut_at_the_maximal_length_still_ends_and_loses_nothing_else(tokenizer):
    """Engine case 33: labels are shifted once."""
    text = "some words " * 9
    around = {"source_prefix": "", "source_suffix": ""}
    lengths = {"max_source_length": 6, "max_target_length": 6}

    pairs = encode([text], [text], tokenizer, **around, **lengths)

    whole = tokenizer.encode_batch([text])[0]
    assert list(pairs.target_ids) == [[*whole[:5], tokenizer.eos_id]]
    assert pairs.is_target_cut == [True]


def test_sources_are_padded_and_masked():
    batch = collate([example([5, 1], [1])], **LAYOUT)

    assert batch["input_ids"].tolist() == [[5, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0]]
    assert all(array.dtype == np.int32 for array in batch.values())


def test_prompts_are_the_sources_alone_in_any_width_that_they_fit(tokenizer):
    rows = [example([5, 6, 1], [7, 1]), example([5, 1], [8] * 7)]
    recipe = build(tokenizer)
    widths = recipe.prompt_widths(np.array([3, 2])).tolist()

    prompts = recipe.collate_prompts_to([3])(rows)

    assert widths == [[3], [2]]
    assert {name: array.tolist() for name, array in prompts.items()} == {
        "input_ids": [[5, 6, 1], [5, 1, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
    }
    for name, array in recipe.collate_prompts(rows).items():
        np.testing.assert_array_equal(array, recipe.collate_fn(rows)[name])
    with pytest.raises(ValueError, match="source_ids has 3 tokens; batches are 2 wide"):
        recipe.collate_prompts_to([2])(rows)


@pytest.mark.parametrize("key", ["source_ids", "target_ids"])
@pytest.mark.parametrize("token", [10, -1])
def test_a_token_outside_the_vocabulary_is_an_error_at_collate_time(key, token):
    """Engine case 44: the error comes where batches are made."""
    bad = example([5, 1], [7, 1]) | {key: np.array([token, 1])}

    with pytest.raises(ValueError, match=rf"x:1: {key} holds token id {token}, outside .* of 10"):
        collate([bad], **LAYOUT)


def test_more_tokens_than_the_batch_is_wide_are_an_error_and_not_cut_silently():
    with pytest.raises(ValueError, match="source_ids has 5 tokens; batches are 4 wide"):
        collate([example([5] * 5, [1])], **LAYOUT)


@pytest.mark.slow
def test_padding_changes_no_loss_and_gives_no_nan(tokenizer):
    """Engine case 43: the reference is the same example without padding, and log V by hand."""
    rows = [example([5, 6, 1], [7, 1]), example([9, 1], [3, 4, 5, 1])]
    narrow, wide = build(tokenizer, length=4), build(tokenizer, length=12)
    params = jax.jit(wide.init_params)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 2)

    results = [
        jax.jit(recipe.loss_fn, static_argnums=3)(params, recipe.collate_fn(rows), keys, False)
        for recipe in (narrow, wide)
    ]

    (totals, weights), (wide_totals, wide_weights) = results
    # 1e-5: float32 sums over another number of masked positions.
    np.testing.assert_allclose(totals, wide_totals, rtol=1e-5)
    assert weights.tolist() == wide_weights.tolist() == [2, 4]
    # Before any training every token is about equally likely.
    np.testing.assert_allclose(totals / weights, np.log(280), rtol=0.2)


@pytest.mark.slow
def test_gradients_of_an_example_without_labels_are_finite_and_zero(tokenizer):
    """Engine case 43: the loss is never NaN."""
    recipe = build(tokenizer, length=4)
    params = draw_like(recipe.abstract_params())
    batch = recipe.collate_fn([example([5, 1], [7, 1])])
    batch["labels"] = np.full_like(batch["labels"], -100)
    keys = jax.random.split(jax.random.key(1), 1)

    gradients = jax.jit(jax.grad(lambda p: recipe.loss_fn(p, batch, keys, True)[0].sum()))(params)

    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(gradients))


def test_predictions_end_at_the_end_token_and_ids_without_a_token_say_nothing(tokenizer):
    recipe = build(tokenizer)
    words = tokenizer.encode_batch(["some words"])[0]
    after = tokenizer.encode_batch([" and more"])[0]

    texts = recipe.output_fn(np.array([[*words, 1, *after], [*words, 286, *after]]))

    assert texts == ["some words", "some words and more"]


def test_the_recorded_model_is_built_again_without_any_file(tokenizer):
    recipe = build(tokenizer, {"config": TINY | {"feed_forward_proj": "gated-gelu"}})

    again = build(tokenizer, recipe.model)

    assert again.model == recipe.model
    assert jax.tree.structure(again.abstract_params()) == jax.tree.structure(
        recipe.abstract_params()
    )


@pytest.mark.slow
def test_a_saved_model_is_read_back_bitwise_and_predicts_the_same(tokenizer, tmp_path):
    recipe = build(tokenizer)
    params = draw_like(recipe.abstract_params(), seed=3)
    recipe.save_pretrained(params, tmp_path)

    again = build(tokenizer, {"name_or_path": str(tmp_path)})
    loaded = again.load_params(None)

    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(before, after)
    batch = recipe.collate_fn([example([5, 6, 1], [7, 1])])
    tokens = [
        jax.jit(r.make_pred_fn(Generation(4, num_beams=2)))(p, batch, None)
        for r, p in ((recipe, params), (again, loaded))
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 100}, "vocab_size is 100, and the tokenizer has 277"),
        ({"eos_token_id": 5}, "eos_token_id is 5, the tokenizer's is 1"),
        ({"d_modle": 8}, "no key 'd_modle'; did you mean 'd_model'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_model_that_does_not_fit_the_tokenizer_is_an_error(tokenizer, config, message):
    with pytest.raises(ValueError, match=message):
        build(tokenizer, {"config": TINY | config})


def test_a_module_without_the_recipes_functions_is_an_error_that_names_them():
    with pytest.raises(
        ValueError, match=r"lacks init_params, collate_fn, loss_fn, pred_fn: .* or encode and build"
    ):
        find_recipe("json.decoder")
    with pytest.raises(ValueError, match=r"there is no module redco_flow\.recipes\.no_such"):
        find_recipe("no_such_recipe")
