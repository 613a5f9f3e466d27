"""Adapters of models with a head of labels: what was trained is what transformers and PEFT load."""

import json
import re
import shutil
from dataclasses import asdict
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stage_kinds import preprocess, train

from redco_flow.engine.deployer import Deployer
from redco_flow.errors import ArtifactError
from redco_flow.orchestrate.checkpoints.model_card import CardFacts, model_card
from redco_flow.records import read_json, write_json
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.artifacts.export_check import Exported, check_export
from redco_flow.stages.artifacts.hugging_face import ExportRequest, write, write_checked
from redco_flow.stages.artifacts.recorded_model import find_recorded_model
from redco_flow.tracking.lineage_nodes import LineageNode

pytestmark = pytest.mark.slow
_BERT = {
    "vocab_size": 304, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40,
}  # fmt: skip
_GPT2 = {"vocab_size": 304, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
_VIT = {
    "image_size": 8, "num_channels": 1, "patch_size": 2, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
# transformers' class of the base and its shape, and what the adapter has besides factors.
BASES = {
    # Published without a head: the pooler is drawn, too.
    "bert": ("BertForMaskedLM", _BERT, ["bert.pooler.dense", "classifier"]),
    "gpt2": ("GPT2Model", _GPT2, ["score"]),
    # Published with a head of 5 classes, where the data have 10.
    "vit": ("ViTForImageClassification", {**_VIT, "num_labels": 5}, ["classifier"]),
}
TARGETS = {"gpt2": ["c_attn", "mlp.c_proj"], "bert": ["query", "value"]}
TRAIN = {"max_steps": 3, "global_batch_size": 16, "learning_rate": 0.01, "num_epochs": 1}
IMAGES = {"image_size": 8, "num_channels": 1, "max_value": 16.0}


@pytest.fixture(scope="module")
def datasets(shared_bench):
    path = shared_bench.root / "rows.jsonl"
    words = ["red", "green", "blue", "black"]
    rows = [
        {"text": f"number {number} is {words[number % 4]}", "label": words[number % 4]}
        for number in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(path), "source_key": "text", "target_key": "label"}
    data |= {"tokenizer": {"train": {"vocab_size": 300, "type": "bpe"}}}
    texts = {"recipe": "classification", "data": {**data, "validation_fraction": 0.0}}
    images = {"recipe": "image_classification", "settings": IMAGES}
    images["data"] = {"dataset": "python:redco_flow.corpora.digits", "max_examples": 60}
    images["data"] |= {"validation_fraction": 0.0}
    return [shared_bench.run(preprocess, config)["dataset"] for config in (texts, images)]


@pytest.fixture(scope="module")
def trained(shared_bench, datasets):
    """(family, options) -> the checkpoint of a few steps over a base that transformers wrote."""
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    pytest.importorskip("peft", reason="pip install peft==0.21.2 (extra: reference)")
    import transformers

    transformers.utils.logging.disable_progress_bar()

    def settings_of(name, **options):
        folder = shared_bench.root / name
        kind, config, _ = BASES[name]
        if not folder.exists():
            torch.manual_seed(0)
            config = getattr(transformers, kind).config_class(**config)
            getattr(transformers, kind)(config).save_pretrained(folder)
        is_image = name == "vit"
        lora = {"rank": 2, "targets": TARGETS.get(name, "all-linear")} | options
        settings = {**TRAIN, "model": {"name_or_path": str(folder)}, "lora": lora}
        settings["recipe"] = "image_classification" if is_image else "classification"
        # Heads lie on a mesh as they do on one device.
        settings |= {"settings": IMAGES, "fsdp": 2, "num_model_shards": 2} if is_image else {}
        return settings, {"dataset": [datasets[is_image]]}

    found = {}

    def train_one(name, **options):
        key = json.dumps([name, options])
        if key not in found:
            made = shared_bench.run(train, *settings_of(name, **options))
            found[key] = made["checkpoint/last"]
        return found[key]

    return train_one


def request_of(checkpoint, folder, base, **options):
    folder.mkdir()
    return ExportRequest(
        str(checkpoint.path), str(folder), "adapter", base_folder=str(base), **options
    )


def loaded_by_its_card(bench, checkpoint, written, folder, base):
    """The model that the card's own lines load, with this directory and base in their places."""
    node = LineageNode("artifact", "checkpoint", checkpoint.id)
    artifact = bench.store.get(checkpoint.id)
    card = model_card(CardFacts(artifact, node, (), "adapter", None, asdict(written)))
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    lines = program.partition("PeftModel.from_pretrained(model, path)")
    program = "".join(lines[:2]).replace('"."', repr(str(folder)))
    scope = {}
    exec(program.replace('"the model that was trained"', repr(str(base))), scope)
    return scope["model"], card


def our_scores(checkpoint, batch):
    artifact = CheckpointArtifact(checkpoint.path)
    params = artifact.load_params(artifact.build_recipe(), Deployer(devices=jax.devices()[:1]))
    model = find_recorded_model("", artifact.record.model)
    inputs = [batch["images"]] if "images" in batch else []
    named = {key: values for key, values in batch.items() if key != "images"}
    return np.asarray(jax.jit(partial(model.module.apply, model.config))(params, *inputs, **named))


@pytest.mark.parametrize("name", sorted(BASES))
def test_an_adapter_loaded_by_its_cards_lines_scores_as_here(
    shared_bench, datasets, trained, tmp_path, name
):
    """The head that was trained beside the factors is in it, whatever transformers' seed."""
    checkpoint, base = trained(name), shared_bench.root / name
    rows = DatasetArtifact(datasets[name == "vit"].path).split("train").__getitems__(range(6))
    batch = CheckpointArtifact(checkpoint.path).build_recipe().collate_fn(rows)
    labels = batch.pop("labels")
    import torch

    written = write_checked(request_of(checkpoint, tmp_path / "out", base))

    expected = our_scores(checkpoint, batch)
    given = {key: torch.tensor(values) for key, values in batch.items()}
    if name == "vit":
        given = {"pixel_values": given["images"].permute(0, 3, 1, 2)}
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, card = loaded_by_its_card(shared_bench, checkpoint, written, tmp_path / "out", base)
        with torch.no_grad():
            scores = model(**given).logits.numpy()
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert len(model.config.id2label) == (10 if name == "vit" else 4)
    assert len(labels) == 6
    config = read_json(tmp_path / "out" / "adapter_config.json")
    assert config["modules_to_save"] == BASES[name][2]
    assert config["task_type"] == (None if name == "vit" else "SEQ_CLS")
    assert "and peft 0.21.2 loaded the files and scored 2 example inputs" in card


def test_the_head_is_trained_beside_the_factors_and_all_else_stays(trained):
    checkpoint = trained("bert")
    artifact = CheckpointArtifact(checkpoint.path)
    recipe = artifact.build_recipe()
    params = artifact.load_params(recipe, Deployer(devices=jax.devices()[:1]))
    base = load_file(checkpoint.path.parents[4] / "bert" / "model.safetensors")
    bias = np.asarray(params["classifier"]["bias"])

    assert artifact.adapter.full == [
        "classifier/bias", "classifier/kernel", "pooler/bias", "pooler/kernel",
    ]  # fmt: skip
    assert (bias != 0).all()  # as which it begins
    table = base["bert.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(params["embedding"], table)


def test_an_older_checkpoint_exports_the_head_that_it_was_given(trained, tmp_path):
    """Its record has no list of what was trained in full: its head was drawn, and is in it."""
    checkpoint = trained("gpt2")
    shutil.copytree(checkpoint.path, tmp_path / "older")
    record = read_json(tmp_path / "older" / "adapter.json")
    old = {key: value for key, value in record.items() if key not in ("full", "base_dtype")}
    for target in old["targets"]:
        target.pop("parts")
    write_json(tmp_path / "older" / "adapter.json", old)
    for name, source in (("new", checkpoint.path), ("old", tmp_path / "older")):
        (tmp_path / name).mkdir()
        write(ExportRequest(str(source), str(tmp_path / name), "adapter"))

    assert_same = np.testing.assert_array_equal
    found, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("old", "new")
    )
    assert found.keys() == expected.keys()
    assert_same(found["base_model.model.score.weight"], expected["base_model.model.score.weight"])


def test_an_export_that_loads_as_another_model_is_an_error(shared_bench, trained, tmp_path):
    """Over another base, and with files in which a tensor was changed."""
    checkpoint = trained("bert")
    shutil.copytree(shared_bench.root / "bert", tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    name = "bert.encoder.layer.1.output.dense.weight"
    save_file(tensors | {name: -tensors[name]}, tmp_path / "other" / "model.safetensors")

    with pytest.raises(ArtifactError, match=r"the scores that transformers .* differ from"):
        write_checked(request_of(checkpoint, tmp_path / "out", tmp_path / "other"))

    (tmp_path / "merged").mkdir()
    write(ExportRequest(str(checkpoint.path), str(tmp_path / "merged"), "model"))
    artifact = CheckpointArtifact(checkpoint.path)
    model = find_recorded_model("", artifact.record.model)
    params = artifact.load_params(artifact.build_recipe(), Deployer(devices=jax.devices()[:1]))
    texts = [np.arange(5, 12), np.arange(20, 23)]
    exported = Exported(tmp_path / "merged", model, params, texts=texts)
    assert check_export(exported).reader.startswith("transformers ")
    path = tmp_path / "merged" / "model.safetensors"
    changed = load_file(path)
    changed["classifier.bias"] = changed["classifier.bias"] + np.float32(1e-6)
    save_file(changed, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"do not have the checkpoint's tensors: classifier\.b"):
        check_export(exported)
