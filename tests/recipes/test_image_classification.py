"""The recipe of classes of images: what it loads, what it refuses, and that it learns."""

import json

import jax
import numpy as np
import pytest

from redco_flow import Deployer
from redco_flow.models import cnn
from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import save_pretrained
from redco_flow.models.hub.tensors import CheckpointMismatch
from redco_flow.recipes.find import family_problem, find_recipe
from redco_flow.recipes.recipe import Generation
from redco_flow.spec.pipeline import ModelSection
from redco_flow.stages.train import config as train
from redco_flow.stages.train.plan import initial_params
from tests.drawn_params import draw_like, draw_params

vit = find_model("vit")

TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "patch_size": 4,
}  # fmt: skip
SETTINGS = {"image_size": 8, "num_channels": 1, "classes": ["cat", "dog", "eel"]}
CNN = {"family": "redco_flow.models.cnn", "config": {"num_filters": 4, "num_layers": 2}}


def build(model=None, **settings):
    return find_recipe("image_classification").make(
        {"settings": SETTINGS | settings, **(model or {"config": TINY})},
        None,
    )


@pytest.fixture
def rows():
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8), np.uint8)
    return [
        {"image": image, "label": label}
        for image, label in zip(images, ["eel", "cat", "dog", "eel"], strict=True)
    ]


@pytest.mark.parametrize("model", [{"config": TINY}, CNN], ids=["vit", "cnn"])
def test_a_loss_is_the_cross_entropy_of_each_images_class(model, rows):
    recipe = build(model)
    params = jax.jit(recipe.init_params)(jax.random.key(0))
    batch = recipe.collate_fn(rows)

    totals, weights = jax.jit(recipe.loss_fn, static_argnums=3)(params, batch, None, False)
    found = jax.jit(recipe.make_pred_fn(Generation(0)))(params, batch, None)

    assert batch["labels"].tolist() == [2, 0, 1, 2]
    assert np.asarray(weights).tolist() == [1, 1, 1, 1]
    # What is drawn knows nothing: within a fifth of the uniform distribution's.
    np.testing.assert_allclose(totals, np.log(3), rtol=0.2)
    assert set(recipe.output_fn(found)) <= {"cat", "dog", "eel"}


def test_a_recipe_is_made_again_from_what_its_checkpoint_says():
    recipe = build()

    again = find_recipe("image_classification").make(json.loads(json.dumps(recipe.model)), None)

    assert again.model == recipe.model
    assert again.abstract_params() == recipe.abstract_params()
    assert recipe.model["config"]["num_labels"] == 3


@pytest.mark.parametrize("labels", [3, 5])
def test_a_published_model_keeps_its_classifier_where_it_has_as_many_classes(labels, tmp_path):
    """A model of other classes gets a classifier drawn anew."""
    config = vit.Config(**TINY, image_size=8, num_channels=1, num_labels=labels)
    theirs = draw_params(vit, config, seed=1)
    save_pretrained(tmp_path, vit, config, theirs)
    recipe = build({"name_or_path": str(tmp_path)})

    found = recipe.load_params(None)

    assert jax.tree.map(np.shape, found) == jax.tree.map(
        lambda leaf: leaf.shape, recipe.abstract_params()
    )
    jax.tree.map(np.testing.assert_array_equal, found["encoder"], theirs["encoder"])
    is_kept = np.array_equal(found["classifier"]["kernel"], theirs["classifier"]["kernel"])
    assert is_kept == (labels == 3)


def test_a_training_draws_a_new_classifier_by_its_seed(tmp_path):
    config = vit.Config(**TINY, image_size=8, num_channels=1, num_labels=5)
    save_pretrained(tmp_path, vit, config, draw_params(vit, config, seed=1))
    recipe = build({"name_or_path": str(tmp_path)})

    one, other = (initial_params(recipe, seed, recipe.abstract_params()) for seed in (0, 1))

    jax.tree.map(np.testing.assert_array_equal, one["encoder"], other["encoder"])
    kernels = [params["classifier"]["kernel"] for params in (one, other)]
    assert not np.array_equal(*kernels)


def test_the_bare_model_of_a_directory_gets_a_classifier_and_loses_its_pooler(tmp_path):
    config = vit.Config(**TINY, image_size=8, num_channels=1, has_classifier=False, has_pooler=True)
    theirs = draw_params(vit, config, seed=1)
    save_pretrained(tmp_path, vit, config, theirs)

    found = build({"name_or_path": str(tmp_path)}).load_params(None)

    assert found.keys() == {"patches", "class_token", "encoder", "classifier"}
    jax.tree.map(np.testing.assert_array_equal, found["patches"], theirs["patches"])


def test_a_published_classifier_with_the_classes_in_another_order_is_refused(tmp_path):
    config = vit.Config(**TINY, image_size=8, num_channels=1, num_labels=3)
    save_pretrained(tmp_path, vit, config, draw_params(vit, config, seed=1))
    values = json.loads((tmp_path / "config.json").read_text())
    labels = {"0": "eel", "1": "cat", "2": "dog"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"id2label": labels}))

    with pytest.raises(ValueError, match="classes are eel, cat, dog, in this order, and the data"):
        build({"name_or_path": str(tmp_path)})


def test_a_model_that_lacks_more_than_its_head_is_told(tmp_path):
    config = vit.Config(**TINY, image_size=8, num_channels=1, num_labels=5)
    save_pretrained(tmp_path, vit, config, draw_params(vit, config, seed=1))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 3}))

    with pytest.raises(CheckpointMismatch, match=r"missing: vit\.encoder\.layer\.2\."):
        build({"name_or_path": str(tmp_path)}).load_params(None)


def test_images_of_another_size_than_the_models_are_refused(tmp_path):
    config = vit.Config(**TINY, image_size=12, num_channels=1)
    save_pretrained(tmp_path, vit, config, draw_params(vit, config, seed=1))

    with pytest.raises(ValueError, match=r"the model.s image_size is 12, and settings\.image_size"):
        build({"name_or_path": str(tmp_path)})


def test_a_row_is_checked_without_a_model(rows):
    collate = find_recipe("image_classification").collate_with(SETTINGS)

    assert collate(rows)["images"].shape == (4, 8, 8, 1)
    with pytest.raises(ValueError, match="label 'bat' is none of cat, dog, eel"):
        collate([{**rows[0], "label": "bat"}])


def test_a_plan_knows_which_models_classify_images():
    recipe = find_recipe("image_classification")
    config = train.Config(recipe="image_classification", model=ModelSection(config=TINY))

    assert "redco_flow.models.families.encoders" in train.code_modules(config)
    assert "use recipe image_classification" in family_problem(find_recipe("text_to_text"), "vit")
    assert "trains vit, and not 't5'" in family_problem(recipe, "t5")
    with pytest.raises(ValueError, match="vit config has no key 'vocab_size'"):
        train.Config(recipe="image_classification", model=ModelSection(config={"vocab_size": 300}))


def test_a_cnn_is_what_torch_convolves():
    """Of odd images, whose halves JAX and torch pad alike; 1e-5 of the largest logit."""
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    config = cnn.Config(image_size=9, num_channels=2, num_labels=5, num_filters=4, num_layers=2)
    params = draw_params(cnn, config)
    images = np.random.default_rng(0).standard_normal((3, 9, 9, 2)).astype(np.float32)

    hidden = torch.tensor(images.transpose(0, 3, 1, 2))
    for stride, name in ((1, "conv_0"), (2, "conv_1")):
        kernel, bias = (np.array(params[name][part]) for part in ("kernel", "bias"))
        hidden = torch.nn.functional.conv2d(
            hidden, torch.tensor(kernel.transpose(3, 2, 0, 1)), torch.tensor(bias), stride, 1
        ).relu()
    last = params["classifier"]
    expected = hidden.mean((2, 3)).numpy() @ np.array(last["kernel"]) + np.array(last["bias"])

    found = jax.jit(cnn.apply, static_argnums=0)(config, params, images)

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be in"),
        ({"filters": 3}, "no key filters. Known keys: image_size"),
        ({"dtype": "bfloat16"}, "it computes in float32 alone"),
    ],
)
def test_a_cnn_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        cnn.Config().updated(values)


def test_two_model_shards_give_the_losses_of_one(rows):
    """Engine case 12: five steps of SGD with all that varies images; 1e-5 relative, float32.

    Of a ViT: `tests/models/test_image_encoder.py`.
    """
    recipe = build(CNN, flip=True, shift=1)
    batch, keys = recipe.collate_fn(rows), jax.random.split(jax.random.key(3), 4)

    def losses(num_model_shards):
        deployer = Deployer(
            num_model_shards,
            devices=jax.devices()[: 2 * num_model_shards],
            matmul_precision="highest",
        )
        params = draw_like(recipe.abstract_params(), stddev=0.1)
        rules = deployer.get_sharding_rules(params, recipe.loss_fn, batch, None, False)
        params = deployer.shard_params(params, rules)

        def mean_loss(params, batch, keys):
            return recipe.loss_fn(params, batch, keys, True)[0].mean()

        @deployer.jit
        def step(params, batch, keys):
            loss, gradients = jax.value_and_grad(mean_loss)(params, batch, keys)
            return loss, jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients)

        for _ in range(5):
            loss, params = step(params, deployer.put_rows(batch), deployer.put_rows(keys))
            yield float(loss)

    alone, split = list(losses(1)), list(losses(2))

    np.testing.assert_allclose(split, alone, rtol=1e-5)
    assert alone[-1] < alone[0]
