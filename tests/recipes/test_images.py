"""Images of rows as arrays: as transformers makes them, of any size and kind, told where none."""

import io
from functools import partial

import datasets
import jax
import numpy as np
import pytest
from PIL import ExifTags, Image
from pydantic import ValidationError

from redco_flow.corpora import digits
from redco_flow.recipes.parts.images import ImageSettings, augment, collate_images, read_image
from redco_flow.recipes.text_to_image.config import Settings, image_of
from redco_flow.stages.data.image_files import open_image
from redco_flow.stages.data.row_values import file_of_image

RGB = np.random.default_rng(0).integers(0, 256, (20, 14, 3), np.uint8)
GENERATED = Settings(image_size=4, num_channels=3)
SETTINGS = ImageSettings(image_size=12, mean=[0.5, 0.4, 0.3], stddev=[0.2, 0.3, 0.4])


def test_a_photograph_becomes_what_transformers_makes_of_it():
    """Exactly the same 8-bit pixels; the normalised floats within their rounding, 1e-6."""
    from transformers import ViTImageProcessorPil

    processor = ViTImageProcessorPil(
        size={"height": 12, "width": 12}, image_mean=SETTINGS.mean, image_std=SETTINGS.stddev
    )
    expected = processor(Image.fromarray(RGB), return_tensors="np")["pixel_values"]

    found = collate_images([Image.fromarray(RGB)], SETTINGS)

    np.testing.assert_allclose(found.transpose(0, 3, 1, 2), expected, rtol=1e-6, atol=1e-6)


def image_file(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def test_a_photograph_is_turned_as_its_exif_orientation_says():
    """As `datasets` turns it; damaged Exif data turn nothing, and may say how to turn."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned, damaged = (
        image_file(Image.fromarray(RGB), exif=one) for one in (exif, b"Exif\0\0damaged")
    )
    exif[ExifTags.Base.Make] = "maker"
    # A width that is a text: Pillow reads it, and cannot write it again.
    half_damaged = exif.tobytes().replace(b"\x01\x0f\0\2", b"\x01\0\0\2")
    files = turned, image_file(Image.fromarray(RGB), exif=half_damaged)
    expected = datasets.Image().decode_example({"bytes": turned, "path": None})

    found = [read_image(open_image(one), SETTINGS) for one in (*files, damaged)]

    assert expected.size == (20, 14)
    stored = read_image(open_image(file_of_image(open_image(turned))), SETTINGS)
    for one in (*found[:2], stored):
        np.testing.assert_array_equal(one, read_image(expected, SETTINGS))
    square = Image.fromarray(RGB[:4, :4])
    of_caption = image_of(open_image(image_file(square, exif=exif)), GENERATED)
    np.testing.assert_array_equal(of_caption, np.rot90(RGB[:4, :4], -1))
    np.testing.assert_array_equal(found[2], read_image(Image.fromarray(RGB), SETTINGS))


def test_sixteen_bits_a_pixel_are_not_cut_to_eight():
    pixels = np.array([[0, 255, 256, 65535]] * 4, np.uint16)
    image = open_image(image_file(Image.fromarray(pixels)))

    found = read_image(image, ImageSettings(image_size=4, num_channels=1, max_value=65535))

    np.testing.assert_array_equal(found[..., 0], pixels)
    with pytest.raises(ValueError, match="pixels up to 65535, where black is 0 and white is 255"):
        read_image(image, SETTINGS)
    with pytest.raises(ValueError, match="pixels up to 65535, where black is 0 and white is 255"):
        image_of(image, GENERATED)


def test_fractions_as_pixels_are_kept():
    pixels = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)

    found = read_image(
        Image.fromarray(pixels), ImageSettings(image_size=4, num_channels=1, max_value=1)
    )

    np.testing.assert_array_equal(found[..., 0], pixels)
    with pytest.raises(ValueError, match="fractions as pixels"):
        image_of(Image.fromarray(pixels), GENERATED)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_an_array_a_list_and_an_image_file_are_the_same(num_channels):
    """Up to the rounding to 8 bits that Pillow's own conversion has."""
    settings = ImageSettings(image_size=8, num_channels=num_channels)
    pixels = RGB[:8, :8]

    of_file, of_array, of_list = (
        read_image(value, settings) for value in (Image.fromarray(pixels), pixels, pixels.tolist())
    )

    assert of_file.shape == (8, 8, num_channels)
    np.testing.assert_allclose(of_array, of_file, atol=1)
    np.testing.assert_array_equal(of_list, of_array)


def test_grey_pixels_stand_in_every_channel_and_are_resized_by_their_neighbours():
    step = np.repeat([[0.0, 16.0]], 2, axis=0)

    found = read_image(step, ImageSettings(image_size=4, max_value=16.0))

    assert found.shape == (4, 4, 3)
    # Bilinear: the new pixels' middles are at 0.25, 0.75, 1.25, 1.75 of the old.
    np.testing.assert_allclose(found[0, :, 0], [0, 4, 12, 16])
    np.testing.assert_array_equal(found[..., 0], found[..., 2])


def test_pixels_are_scaled_by_white_and_normalised():
    settings = ImageSettings(
        image_size=2, num_channels=1, max_value=16.0, mean=[0.25], stddev=[0.5]
    )

    found = collate_images([[[0, 16], [8, 4]]], settings)

    np.testing.assert_allclose(found[0, ..., 0], [[-0.5, 1.5], [0.5, 0.0]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(64), r"no image: an array of shape \(64,\); images are \(rows, columns\)"),
        (np.zeros((4, 4, 2)), r"shape \(4, 4, 2\), whose last dim is the channels: 1 or 3"),
        ([[1, 2], [3]], "no image: "),
        ("cat.png", "no image: could not convert string"),
        ([[1.0, float("nan")]], "no image: some pixels are not finite"),
        (Image.fromarray(np.float32([[1, np.nan]])), "no image: some pixels are not finite"),
        (Image.fromarray(np.int32([[1, -3]])), "pixels of -3, where black is 0"),
        (np.zeros((0, 4)), r"no image: an array of shape \(0, 4\)"),
    ],
)
def test_what_is_no_image_is_told(value, message):
    with pytest.raises(ValueError, match=message):
        read_image(value, SETTINGS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean": [0.5, 0.5]}, "'mean' has 2 numbers, and images have 3 channels"),
        ({"stddev": [0.0]}, "'stddev' must be above 0"),
        ({"image_size": 4, "shift": 4}, "'shift' must be less than 'image_size'"),
    ],
)
def test_settings_that_no_image_can_follow_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        ImageSettings(**values)


def test_an_image_is_varied_by_its_own_key_alone():
    images = np.arange(4 * 5 * 5, dtype=np.float32).reshape(4, 5, 5, 1)
    keys = jax.random.split(jax.random.key(0), 4)

    varied = jax.jit(partial(augment, flip=True, shift=2))

    whole, last = varied(images, keys), varied(images[2:], keys[2:])

    np.testing.assert_array_equal(whole[2:], last)


def test_flips_are_mirrors_and_shifts_repeat_the_side():
    image = np.arange(9, dtype=np.float32).reshape(3, 3)
    images, keys = (
        np.tile(image[None, ..., None], (64, 1, 1, 1)),
        jax.random.split(jax.random.key(1), 64),
    )
    padded = np.pad(image, 1, mode="edge")
    moved = {padded[r : r + 3, c : c + 3].tobytes() for r in range(3) for c in range(3)}

    flipped = {x.tobytes() for x in np.asarray(augment(images, keys, flip=True, shift=0))}
    shifted = {x.tobytes() for x in np.asarray(augment(images, keys, flip=False, shift=1))}

    assert flipped == {image.tobytes(), image[:, ::-1].tobytes()}
    assert shifted == moved


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    expected = load_digits()

    found = list(digits.rows(digits.files()))

    np.testing.assert_array_equal([row["image"] for row in found], expected.images)
    np.testing.assert_array_equal([row["label"] for row in found], expected.target)
