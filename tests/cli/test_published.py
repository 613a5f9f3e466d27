"""predict, chat and serve-model with a directory in Hugging Face's format."""

import json
import re

import pytest
import torch
import transformers
from PIL import Image

from redco_flow.cli.main import run_command
from redco_flow.stages.artifacts.published import read_published
from redco_flow.text.chat import CHATML
from tests.cli.conftest import Command
from tests.text.chat_tokenizers import make_tokenizer

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
NAMES = {0: "bad", 1: "good", 2: "odd"}
TEXTS = ["one and two?", "three, my friend"]


def saved(folder, model, tokenizer=None):
    """Write a published model of random parameters, large enough for it to say something."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    model.eval().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of the models, and each model and tokenizer by its name."""
    root = tmp_path_factory.mktemp("published")
    with_template, plain = make_tokenizer(CHATML), make_tokenizer("")
    plain.chat_template = None
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    ids = {name: getattr(with_template, name) for name in names}
    llama = transformers.LlamaConfig(
        vocab_size=len(with_template), num_key_value_heads=2, max_position_embeddings=256,
        **TINY, **ids,
    )  # fmt: skip
    bert = transformers.BertConfig(
        vocab_size=len(with_template), max_position_embeddings=64, id2label=NAMES,
        label2id={name: number for number, name in NAMES.items()}, **TINY,
        pad_token_id=ids["pad_token_id"],
    )  # fmt: skip
    vit = transformers.ViTConfig(image_size=8, patch_size=4, **TINY, id2label=NAMES)
    processor = transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(root / "images")
    models = {
        "chat": (transformers.LlamaForCausalLM(llama), with_template),
        "classes": (transformers.BertForSequenceClassification(bert), plain),
        "images": (transformers.ViTForImageClassification(vit), None),
        "base": (transformers.BertModel(bert), plain),
    }
    made = {name: (saved(root / name, *pair), pair[1]) for name, pair in models.items()}
    return root, made | {"processor": processor}


def conversation(text):
    return [{"role": "user", "content": text}]


def generated(model, tokenizer, text, number):
    """What transformers generates greedily."""
    asked = tokenizer.apply_chat_template(
        conversation(text), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**asked, max_new_tokens=number, do_sample=False)
    new = found[0, asked["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True).strip()


@pytest.mark.slow
@pytest.mark.usefixtures("compile_cache")
def test_a_published_model_predicts_what_transformers_does(published, tmp_path):
    root, models = published
    command = Command(tmp_path)
    rows = [{"id": number, "messages": conversation(text)} for number, text in enumerate(TEXTS)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [f"{number},{json.dumps(text)}\n" for number, text in enumerate([*TEXTS, ""])]
    (tmp_path / "texts.csv").write_text("".join(["id,review\n", *lines]))
    image = Image.frombytes("RGB", (8, 8), bytes(range(192)))
    image.save(tmp_path / "image.png")
    words = {
        "chat": ["chats.jsonl", "predict.max_target_length=12"],
        "classes": ["texts.csv"],
        "images": ["image.png"],
    }

    started = {name: command.start("predict", str(root / name), *words[name]) for name in words}
    said = {name: process.communicate(timeout=500) for name, process in started.items()}

    found = {
        name: [json.loads(line) for line in out.splitlines()] for name, (out, _) in said.items()
    }
    assert [len(rows) for rows in found.values()] == [2, 3, 1], said
    expected = [generated(*models["chat"], text, 12) for text in TEXTS]
    assert [row["prediction"].strip() for row in found["chat"]] == expected
    assert [row["id"] for row in found["chat"]] == [0, 1]
    model, tokenizer = models["classes"]
    with torch.no_grad():
        scores = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
        pixels = models["processor"]([image], return_tensors="pt")
        scores += [models["images"][0](**pixels).logits[0]]
    for row, logits in zip([*found["classes"][:2], *found["images"]], scores, strict=True):
        # float32 on both sides, written with six digits.
        wanted = dict(zip(NAMES.values(), logits.softmax(-1).tolist(), strict=True))
        assert row["probabilities"] == pytest.approx(wanted, abs=2e-6)
        assert row["prediction"] == max(wanted, key=wanted.get)
    assert found["classes"][2]["prediction_problem"] == "field 'review' is empty"
    assert re.search(r"recipe classification; source_key review\n", said["classes"][1])
    assert "model.safetensors" in command("why", "predict")


@pytest.mark.slow
def test_a_published_model_converses_as_transformers_does(published, capsys):
    root, models = published
    expected = generated(*models["chat"], TEXTS[0], 12)

    words = ["chat", str(root / "chat"), "--max-new-tokens", "12", "--message", TEXTS[0], "--json"]
    assert run_command(words) == 0

    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["num_tokens"]) == (expected, 12)


def test_what_a_published_model_predicts_is_read_from_its_config(published, tmp_path):
    root, _ = published
    for name, changes, recipe in (
        ("chat", {}, "chat"),
        ("classes", {"id2label": None, "num_labels": 1}, "regression"),
        ("classes", {}, "classification"),
        ("images", {}, "image_classification"),
    ):
        assert read_published(copied(root / name, tmp_path, **changes)).recipe == recipe
    half = read_published(copied(root / "chat", tmp_path, dtype="bfloat16"))
    assert (half.dtype, half.answer_length, half.lengths["max_length"]) == ("bfloat16", 128, 128)


def copied(folder, tmp_path, **changes):
    """A directory of the same files, with changes of its config.json."""
    other = tmp_path / f"{folder.name}{len([*tmp_path.iterdir()])}"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | changes
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config))
    return other


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["predict", "BASE", "x.jsonl"], "the model is a BertModel, so what it predicts is not"),
        (
            ["predict", "BASE", "x.jsonl", "recipe=classification"],
            "BertModel, which has no param",
        ),
        (["predict", "CHAT", "x.jsonl", "recipe=text_to_text"], "recipe 'text_to_text' trains t5"),
        (["predict", "CHAT", "x.jsonl"], "the file has a, b, and recipe chat reads messages|"),
        (["predict", "org/name", "x.jsonl"], "A model of the hub is downloaded first: `hf downl"),
        (["predict", "EMPTY", "x.jsonl"], "a directory without a config.json"),
        (["predict", "ADAPTER", "x.jsonl"], "is a PEFT adapter, and not a model"),
        (["predict", "CUT", "x.jsonl"], "and no parameters (model.safetensors)"),
        (["predict", "STRANGE", "x.jsonl"], "is of family 'mamba', which is none of those"),
        (["chat", "CLASSES", "--message", "x"], "recipe classification, which does not converse"),
        (["serve-model", "CLASSES"], "recipe classification, which does not converse"),
    ],
)
def test_a_directory_that_is_no_model_for_it_is_refused_in_one_line(
    published, tmp_path, monkeypatch, capsys, words, problem
):
    root, _ = published
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDCO_FLOW_WORKSPACE", str(tmp_path / "workspace"))
    (tmp_path / "x.jsonl").write_text('{"a": 1, "b": 2}\n')
    for name in ("empty", "adapter", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "cut" / "config.json").write_text((root / "chat" / "config.json").read_text())
    named = {name.upper(): str(root / name) for name in ("base", "chat", "classes")}
    named |= {name.upper(): str(tmp_path / name) for name in ("empty", "adapter", "cut")}
    named["STRANGE"] = str(copied(root / "chat", tmp_path, model_type="mamba"))

    assert run_command([named.get(word, word) for word in words]) == 2

    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not [*tmp_path.glob("workspace/predict/*")]
