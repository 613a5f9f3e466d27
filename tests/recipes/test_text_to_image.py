"""text_to_image: schedules and steps against closed forms, pictures by each example's key."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from redco_flow.recipes import text_to_image
from redco_flow.recipes.text_to_image.config import Settings
from redco_flow.recipes.text_to_image.run import Level, ddim_step, level_at, to_image, to_patches

SMALL = {"image_size": 8, "patch_size": 4, "width": 16, "num_layers": 1, "num_heads": 2}
SETTINGS = Settings(**SMALL, num_sampling_steps=3)
CAPTIONS = ["digit one", "latin small letter a", "latin small letter a with acute", "digit two"]


jitted_loss = jax.jit(text_to_image.loss_fn, static_argnums=(3, 4))
jitted_pred = jax.jit(text_to_image.pred_fn, static_argnums=3)


def examples(num=4):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, 8, 8)).astype(np.uint8)
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(num)]
    return [{"image": a, "caption": b} for a, b in zip(images, captions, strict=True)]


def trained_params():
    """Parameters of which none is zero, so that everything that is put in has a say."""
    shapes = jax.eval_shape(lambda key: text_to_image.init_params(key, SETTINGS), jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)


def losses_of(params, rows, rngs, settings=SETTINGS):
    batch = text_to_image.collate_fn(rows, settings)
    losses, weights = jitted_loss(params, batch, rngs, rngs is not None, settings)
    np.testing.assert_array_equal(weights, 1)
    return np.asarray(losses)


def test_the_linear_schedule_is_ddpm_s_in_its_thousand_steps():
    betas = np.linspace(1e-4, 0.02, 1000)
    expected = np.cumprod(1 - betas)  # signal squared, Ho et al. 2020

    found = level_at(jnp.arange(1, 1001) / 1000, "linear")

    # A sum over a thousand steps stands for an integral.
    np.testing.assert_allclose(np.square(found.signal), expected, rtol=0.03, atol=1e-5)
    np.testing.assert_allclose(np.square(found.noise), 1 - expected, rtol=0.1)
    assert found.noise[0] == pytest.approx(np.sqrt(1e-4), rel=0.06)


def test_the_cosine_schedule_turns_signal_into_noise_by_a_quarter_circle():
    found = level_at(jnp.array([0.0, 1 / 3, 0.5, 1.0]), "cosine")

    np.testing.assert_allclose(found.signal, [1, np.sqrt(3) / 2, np.sqrt(0.5), 0], atol=1e-6)
    np.testing.assert_allclose(found.noise, [0, 0.5, np.sqrt(0.5), 1], atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_a_step_is_the_ddim_paper_s_equation_12(schedule, eta):
    rng = np.random.default_rng(2)
    image, noise, fresh = rng.uniform(-0.9, 0.9, 50), rng.normal(size=50), rng.normal(size=50)
    now, then = (level_at(jnp.float32(time), schedule) for time in (0.6, 0.4))
    noised = np.float64(now.signal) * image + np.float64(now.noise) * noise
    velocity = np.float64(now.signal) * noise - np.float64(now.noise) * image

    found = ddim_step(noised, velocity, now, then, fresh, eta)

    alpha, next_alpha = np.float64(now.signal) ** 2, np.float64(then.signal) ** 2
    sigma = eta * np.sqrt((1 - next_alpha) / (1 - alpha)) * np.sqrt(1 - alpha / next_alpha)
    towards = np.sqrt(1 - next_alpha - sigma**2) * noise
    expected = np.sqrt(next_alpha) * image + towards + sigma * fresh
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_an_image_is_what_is_left_when_the_noise_is_known_and_gone():
    image = np.linspace(-1, 1, 9)
    now, then = level_at(jnp.float32(0.7), "cosine"), Level(jnp.float32(1), jnp.float32(0))
    noise = np.cos(np.arange(9))
    velocity = now.signal * noise - now.noise * image

    found = ddim_step(now.signal * image + now.noise * noise, velocity, now, then, noise, 1.0)

    np.testing.assert_allclose(found, image, atol=1e-6)


def test_at_the_start_the_loss_is_that_of_predicting_nothing():
    """The velocity's mean square: signal² · 1 + noise² · image², for noise of variance 1."""
    params = jax.jit(text_to_image.init_params, static_argnums=1)(jax.random.key(0), SETTINGS)
    white = [{"image": np.full((8, 8), 255, np.uint8), "caption": "white"}] * 400

    losses = losses_of(params, white, jax.random.split(jax.random.key(1), 400))

    # 400 × 64 pixels: the mean of their squares is known to about one percent.
    assert losses.mean() == pytest.approx(1.0, rel=0.03)


def test_a_hidden_caption_has_no_say_and_a_told_one_has():
    params, rngs = trained_params(), jax.random.split(jax.random.key(1), 4)
    rows = examples()
    others = [row | {"caption": "another"} for row in rows]
    always, never = (Settings(**SMALL, caption_dropout=share) for share in (1 - 1e-7, 0.0))

    hidden = [losses_of(params, some, rngs, always) for some in (rows, others)]
    told = [losses_of(params, some, rngs, never) for some in (rows, others)]

    np.testing.assert_array_equal(*hidden)
    assert np.all(told[0] != told[1])


def test_an_evaluation_repeats_itself_whatever_the_batch():
    params, rows = trained_params(), examples()

    whole = losses_of(params, rows, None)
    turned = losses_of(params, rows[::-1], None)[::-1]
    alone = [losses_of(params, [row], None)[0] for row in rows]

    np.testing.assert_allclose(turned, whole, rtol=1e-5)
    np.testing.assert_allclose(alone, whole, rtol=1e-5)


def draw(params, rows, rngs, settings=SETTINGS):
    batch = text_to_image.collate_fn(rows, settings)
    pictures = jitted_pred(params, batch, rngs, settings)
    return np.array(text_to_image.output_fn(np.asarray(pictures), settings), np.int32)


def test_a_picture_is_decided_by_its_caption_and_its_own_key():
    params, rows, rngs = trained_params(), examples(), jax.random.split(jax.random.key(3), 4)

    whole = draw(params, rows, rngs)
    alone = np.concatenate([draw(params, rows[i : i + 1], rngs[i : i + 1]) for i in range(4)])
    other_images = draw(params, [row | {"image": 255 - row["image"]} for row in rows], rngs)
    other_keys = draw(params, rows, rngs[::-1])

    assert whole.shape == (4, 8, 8)
    assert np.abs(alone - whole).max() <= 1  # sums in another order, rounded to a grey level
    np.testing.assert_array_equal(other_images, whole)
    assert np.abs(other_keys - whole).max() > 50


def test_without_guidance_a_picture_of_a_caption_ignores_what_no_caption_would_give():
    params, rows, rngs = trained_params(), examples(), jax.random.split(jax.random.key(3), 4)
    changed = params | {"no_caption": params["no_caption"] + 1}
    plain, guided = (Settings(**SMALL, num_sampling_steps=3, guidance=w) for w in (1.0, 3.0))

    assert np.abs(draw(changed, rows, rngs, plain) - draw(params, rows, rngs, plain)).max() <= 1
    assert np.abs(draw(changed, rows, rngs, guided) - draw(params, rows, rngs, guided)).max() > 10


def test_patches_are_put_together_again():
    image = np.arange(2 * 8 * 8).reshape(2, 8, 8, 1)

    patches = to_patches(jnp.array(image), 4)

    np.testing.assert_array_equal(patches[1, 1], image[1, :4, 4:].ravel())
    np.testing.assert_array_equal(to_image(patches, SETTINGS), image)


def test_words_are_the_same_numbers_wherever_they_stand_and_however_they_are_written():
    first, second = (
        text_to_image.collate_fn([{**examples(1)[0], "caption": text}], SETTINGS)["words"][0]
        for text in ("Letter A, acute", "a letter")
    )

    np.testing.assert_array_equal(first[[1, 0]], second[:2])
    assert len({tuple(word) for word in first[:4]}) == 4
    assert not first[4:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((8, 9), np.uint8)}, "shape (8, 9), and settings.image_size"),
        ({"image": np.zeros((8, 8))}, "the image is float64"),
        ({"caption": "word " * 17}, "17 words, and settings.max_words is 16"),
        ({"caption": 7}, "no text, but a int"),
    ],
)
def test_a_row_that_cannot_be_learnt_from_is_told(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        text_to_image.collate_fn([{**examples(1)[0], **change}], SETTINGS)


def test_images_of_pillow_are_read_in_grey_or_colours():
    picture = Image.new("RGB", (8, 8), (255, 0, 0))
    colours = Settings(**SMALL, num_channels=3)

    grey, red = (
        text_to_image.collate_fn([{"image": picture, "caption": "red"}], settings)["image"]
        for settings in (SETTINGS, colours)
    )

    np.testing.assert_allclose(red[0, 0, 0], [1, -1, -1])
    assert grey.shape == (1, 8, 8, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 3}, "patch_size, 3, must divide"),
        ({"num_heads": 3}, "twice num_heads, 6, must divide"),
        ({"caption_dropout": 1.0}, "from 0 to below 1"),
        ({"eta": 2.0}, "from 0 \\(DDIM\\) to 1 \\(DDPM\\)"),
    ],
)
def test_settings_that_do_not_fit_are_told(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)
