"""The recipe of captions: labels, losses, texts of images, and what it refuses."""

import json
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.recipe import Generation, TokenLengths
from redco_flow.stages.data.rows import FileRow
from redco_flow.stages.data.source import Source
from redco_flow.stages.predict import config as predict
from redco_flow.stages.preprocess import config as preprocess
from redco_flow.stages.preprocess.row_reader import row_reader
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer
from tests.drawn_params import draw_like

SETTINGS = {"image_size": 8, "num_channels": 1, "max_length": 6}
TINY = {
    "encoder": {
        "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 24, "patch_size": 4,
    },
    "decoder": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8},
    "dropout_rate": 0.0,
}  # fmt: skip
DATA = {"dataset": "python:redco_flow.corpora.glyphs"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["a dark image", "a light image"] * 9, 280, "bpe"), folder)
    return TextTokenizer.load(folder)


def build(tokenizer, model=None, **settings):
    section = {"settings": SETTINGS | settings, **(model or {"config": TINY})}
    return find_recipe("image_to_text").make(section, TokenLengths(tokenizer, 0, 0))


def example(value, caption):
    return {"image": np.full((8, 8), value, np.uint8), "caption": caption}


ROWS = [example(20, "a dark image"), example(230, "a light image")] * 2


def test_a_captions_tokens_are_the_labels_and_shifted_what_the_decoder_reads(tokenizer):
    batch = build(tokenizer).collate_fn(ROWS[:1])

    ids = [*tokenizer.encode_batch(["a dark image"])[0], tokenizer.eos_id][:6]
    filled = ids + [-100] * (6 - len(ids))
    assert batch["labels"].tolist() == [filled]
    assert batch["decoder_input_ids"][0, 0] == tokenizer.pad_id
    assert batch["decoder_input_ids"][0, 1 : len(ids)].tolist() == ids[:-1]
    assert batch["images"].shape == (1, 8, 8, 1)


def test_a_long_caption_is_cut_and_still_ends(tokenizer):
    batch = build(tokenizer).collate_fn([example(1, "a dark image " * 5)])

    assert batch["labels"][0, -1] == tokenizer.eos_id


@pytest.mark.slow
def test_a_captioner_learns_to_say_which_image_it_sees(tokenizer):
    """Over two model shards: `tests/models/test_vision_encoder_decoder.py`."""
    recipe, optimizer = build(tokenizer), optax.adam(1e-2)
    params, batch = draw_like(recipe.abstract_params()), recipe.collate_fn(ROWS)

    def mean_loss(params):
        totals, weights = recipe.loss_fn(params, batch, None, False)[:2]
        return totals.sum() / weights.sum()

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(mean_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for _ in range(60):
        params, state = step(params, state)

    prompts = recipe.collate_prompts(ROWS)
    tokens = jax.jit(recipe.make_pred_fn(Generation(0)))(params, prompts, None)
    assert recipe.output_fn(np.asarray(tokens)) == [row["caption"] for row in ROWS]


def test_the_recipe_is_made_again_from_what_its_checkpoint_says(tokenizer):
    recipe = build(tokenizer)

    record = json.loads(json.dumps(recipe.model))
    again = find_recipe("image_to_text").make(record, TokenLengths(tokenizer, 0, 0))

    assert again.model == recipe.model
    assert again.abstract_params() == recipe.abstract_params()


def test_a_published_captioner_is_read_and_must_fit_images_and_tokenizer(tokenizer, tmp_path):
    recipe = build(tokenizer)
    params = draw_like(recipe.abstract_params())
    recipe.save_pretrained(params, tmp_path)
    published = {"name_or_path": str(tmp_path)}

    jax.tree.map(
        np.testing.assert_array_equal, build(tokenizer, published).load_params(None), params
    )
    with pytest.raises(ValueError, match=r"image_size is 8, and settings\.image_size is 16"):
        build(tokenizer, published, image_size=16)
    with pytest.raises(ValueError, match="the model's eos_token_id is 1, the tokenizer's is 2"):
        build(replace(tokenizer, eos_id=2), published)


def test_a_caption_that_is_no_text_is_told():
    collate = find_recipe("image_to_text").collate_with(SETTINGS)

    with pytest.raises(ValueError, match="caption None is no text"):
        collate([example(0, None)])


@pytest.mark.parametrize("recipe", ["image_to_text", "text_to_image"])
def test_all_captions_of_an_image_are_in_one_split(recipe):
    """An image that is held out is seen by no training, as in COCO's splits."""
    settings = SETTINGS if recipe == "image_to_text" else {"image_size": 8}
    read = row_reader(find_recipe(recipe), settings, {})
    source = Source("train", "a.jsonl", "a.jsonl", lambda: iter(()))
    rows = [example(9, "dark"), example(9, "a dark image"), example(200, "dark")]

    splits = [read(FileRow(1, row), source, bytes.hex, 0).split for row in rows]

    assert splits[0] == splits[1] != splits[2]


def test_a_plan_asks_for_a_tokenizer_and_takes_settings_of_generation():
    config = preprocess.Config.from_json({"recipe": "image_to_text", "data": DATA})
    ((path, problem),) = preprocess.input_problems(config, ())
    assert path == ("data",)
    assert problem.startswith("there is no tokenizer: give data.tokenizer")
    with pytest.raises(ValueError, match=r"recipe 'image_to_text' .*: 'prompt_length' would"):
        predict.Config.from_json({"recipe": "image_to_text", "prompt_length": 3})

    config = {"recipe": "image_to_text", "num_beams": 4, "num_return_sequences": 2}
    assert predict.Config.from_json(config).num_beams == 4
