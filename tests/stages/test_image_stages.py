"""Recipes of images through the stages: scikit-learn's digits, and images that are none."""

import json

import jax
import numpy as np
import pytest
import scipy.special
from PIL import Image
from stage_kinds import evaluate, predict, preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.hugging_face import ExportRequest, write
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.data.rows import BadRows

RECIPE = {
    "recipe": "image_classification",
    "settings": {"image_size": 8, "num_channels": 1, "max_value": 16.0},
}
DATA = {
    "dataset": "python:redco_flow.corpora.digits",
    "max_examples": 300,
    "validation_fraction": 0.0,
    "test_fraction": 0.3,
}
MODEL = {
    "config": {
        "patch_size": 2, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "initializer_range": 0.1,
    }
}  # fmt: skip
TRAIN = RECIPE | {
    "model": MODEL, "num_epochs": 8, "global_batch_size": 16, "learning_rate": 3e-3,
    "dropout_rate": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(shared_bench):
    return shared_bench.run(preprocess, RECIPE | {"data": DATA})["dataset"]


@pytest.fixture(scope="module")
def checkpoint(shared_bench, dataset):
    return shared_bench.run(train, TRAIN, {"dataset": [dataset]})["checkpoint/last"]


@pytest.mark.slow
@pytest.mark.covers("stages by themselves", family="vit", recipe="image_classification")
def test_a_vit_learns_digits_beyond_the_commonest_one(shared_bench, dataset, checkpoint):
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}
    predictions = shared_bench.run(predict, {"recipe": "image_classification"}, inputs)

    found = shared_bench.run(
        evaluate, {"metrics": ["accuracy"]}, {"predictions": [predictions["predictions"]]}
    )

    scores = json.loads((found["metrics"].path / "metrics.json").read_text())
    trivial = scores["baselines"]["most_frequent_target"]["metrics"]["accuracy"]
    assert scores["metrics"]["accuracy"] > 60
    assert trivial < 20
    assert CheckpointArtifact(checkpoint.path).record.model["settings"]["classes"] == [*range(10)]


@pytest.mark.slow
def test_an_exported_vit_says_in_transformers_what_it_said_here(
    shared_bench, dataset, checkpoint, tmp_path
):
    """Engine case 64: of files of images, by the processor and the names that are exported too."""
    pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers

    written = write(ExportRequest(str(checkpoint.path), str(tmp_path), "model"))
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    processor = transformers.ViTImageProcessorPil.from_pretrained(tmp_path)
    rows = DatasetArtifact(dataset.path).split("test").__getitems__(range(20))
    pixels = processor(
        [np.repeat(row["image"][..., None], 1, -1) for row in rows],
        input_data_format="channels_last",
        return_tensors="pt",
    )
    scores = model(**pixels).logits.detach().numpy()

    recipe = CheckpointArtifact(checkpoint.path).build_recipe()
    predict_classes = jax.jit(recipe.make_pred_fn(None))
    found = predict_classes(params_of(checkpoint), recipe.collate_fn(rows), None)
    assert written.architectures == ("ViTForImageClassification",)
    named = [model.config.id2label[int(number)] for number in scores.argmax(axis=-1)]
    assert named == [str(name) for name in recipe.output_fn(found)]
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}
    asked = {"recipe": "image_classification", "num_examples": 20, "probabilities": True}
    lines, _ = read_predictions(shared_bench.run(predict, asked, inputs)["predictions"].path)
    probabilities = [list(line.probabilities.values()) for line in lines]
    np.testing.assert_allclose(probabilities, scipy.special.softmax(scores, -1), atol=1e-5)
    assert list(lines[0].probabilities) == [str(number) for number in range(10)]


def params_of(checkpoint):
    artifact = CheckpointArtifact(checkpoint.path)
    return artifact.load_params(artifact.build_recipe(), Deployer(devices=jax.devices()[:1]))


CAPTIONS = {
    "recipe": "image_to_text",
    "settings": {"image_size": 16, "num_channels": 1, "max_length": 12},
}
CAPTIONER = {
    "config": {
        "encoder": {
            "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64,
        },
        "decoder": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16},
    }
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.covers("stages by themselves", family="vision_encoder_decoder", recipe="image_to_text")
def test_captions_of_glyphs_are_trained_generated_and_scored(bench):
    """The tokenizer is trained on the captions, and goes with the dataset and the checkpoint."""
    data = {
        "dataset": "python:redco_flow.corpora.glyphs",
        "max_examples": 94,
        "validation_fraction": 0.1,
        "test_fraction": 0.2,
        "tokenizer": {"train": {"vocab_size": 400, "type": "bpe"}},
    }
    dataset = bench.run(preprocess, CAPTIONS | {"data": data})["dataset"]
    summary = DatasetArtifact(dataset.path).summary
    training = CAPTIONS | {
        "model": CAPTIONER, "num_epochs": 1, "global_batch_size": 16, "learning_rate": 3e-3,
        "keep": {"best": ["eval_loss"]},
    }  # fmt: skip
    trained = bench.run(train, training, {"dataset": [dataset]})
    checkpoint = trained["checkpoint/best/eval_loss"]
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}
    asked = {"recipe": "image_to_text", "num_beams": 3, "num_return_sequences": 2}

    predictions = bench.run(predict, asked, inputs)["predictions"]
    scores = bench.run(
        evaluate, {"metrics": ["exact_match", "bleu"]}, {"predictions": [predictions]}
    )

    lines, said = read_predictions(predictions.path)
    assert summary.is_of_rows
    assert 259 < summary.tokenizer["vocab_size"] <= 400
    assert (
        CheckpointArtifact(checkpoint.path).record.tokenizer_digest == summary.tokenizer["digest"]
    )
    assert said.generation["num_beams"] == 3
    assert {len(line.predictions) for line in lines} == {2}
    assert all(line.prediction == line.predictions[0] for line in lines)
    assert lines[0].references == [lines[0].row["caption"]]
    found = json.loads((scores["metrics"].path / "metrics.json").read_text())
    assert set(found["metrics"]) == {"exact_match", "bleu"}
    assert set(found["baselines"]) == {"most_frequent_target"}  # a caption has no source to repeat


def write_images(folder):
    for name, value in (("dark", 20), ("light", 230)):
        for number in range(3):
            path = folder / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((9, 7), value + number, np.uint8)).save(path)


def test_images_of_folders_have_the_folders_names_as_classes(bench):
    write_images(bench.root / "images")
    data = {"dataset": str(bench.root / "images"), "validation_fraction": 0.0}

    made = bench.run(preprocess, RECIPE | {"data": data})
    artifact = DatasetArtifact(made["dataset"].path)

    assert artifact.summary.classes == ["dark", "light"]
    assert artifact.split("train")[0]["label"] == "dark"


def test_an_image_that_cannot_be_read_is_told_with_its_file_and_row(bench):
    write_images(bench.root / "images")
    whole = bench.root / "images" / "dark" / "0.png"
    broken = bench.root / "images" / "dark" / "broken.png"
    broken.write_bytes(whole.read_bytes()[:40])
    rows = bench.root / "rows.jsonl"
    good = {"image": [[0, 255], [255, 0]], "label": "dark"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (good, good | {"image": [0, 1]})))

    for path, message in (
        (bench.root / "images", rf"{broken}:1: field 'image' is no image that can be read"),
        (rows, rf"{rows}:2: collate_fn raised ValueError.*no image: an array of shape \(2,\)"),
    ):
        data = {"dataset": str(path), "validation_fraction": 0.0}
        with pytest.raises(BadRows, match=message):
            bench.run(preprocess, RECIPE | {"data": data})
