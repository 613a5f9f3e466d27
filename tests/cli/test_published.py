"""predict, chat and serve-model with a directory in Hugging Face's format."""

import json
import re
from string import ascii_lowercase
from threading import Event

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import processors

from redco_flow.engine.deployer import Deployer
from redco_flow.errors import ArtifactError, UsageError
from redco_flow.orchestrate.checkpoints.chat import conversing, find_model
from redco_flow.orchestrate.checkpoints.new_file import read_new_files
from redco_flow.stages.artifacts.pretrained import PretrainedModel
from redco_flow.stages.artifacts.published import read_published
from redco_flow.stages.predict.conversation import ChatRequest, Conversant, Question
from redco_flow.text.chat import CHATML
from redco_flow.tracking.workspace import Workspace
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


def saved(folder, model, processor):
    """Write a published model of random parameters, large enough for it to say something."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def probabilities(logits):
    return dict(zip(NAMES.values(), logits.softmax(-1).tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("compile_cache")
def test_a_published_classifier_predicts_what_transformers_does(tmp_path):
    """With a tokenizer of BERT, which has no end token."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "?", ",", *ascii_lowercase]
    words += [f"##{letter}" for letter in ascii_lowercase]
    tokenizer = transformers.BertTokenizer(vocab={word: n for n, word in enumerate(words)})
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, id2label=NAMES, **TINY
    )
    folder = tmp_path / "classes"
    model = saved(folder, transformers.BertForSequenceClassification(config), tokenizer)
    command = Command(tmp_path)
    lines = [f"{number},{json.dumps(text)}\n" for number, text in enumerate([*TEXTS, ""])]
    (tmp_path / "texts.csv").write_text("".join(["id,review\n", *lines]))

    out, said = command.start("predict", str(folder), "texts.csv").communicate(timeout=500)

    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["id"] for row in rows] == ["0", "1", "2"], said
    for text, row in zip(TEXTS, rows, strict=False):
        with torch.no_grad():
            wanted = probabilities(model(**tokenizer(text, return_tensors="pt")).logits[0])
        # float32 on both sides, written with six digits.
        assert row["probabilities"] == pytest.approx(wanted, abs=2e-6)
        assert row["prediction"] == max(wanted, key=wanted.get)
    assert rows[2]["prediction_problem"] == "field 'review' is empty"
    assert re.search(r"recipe classification; source_key review\n", said)
    assert "model.safetensors" in command("why", "predict")


def test_a_published_model_of_images_resizes_and_scores_as_transformers_does(tmp_path):
    config = transformers.ViTConfig(image_size=8, patch_size=4, **TINY, id2label=NAMES)
    processor = transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    theirs = saved(tmp_path, transformers.ViTForImageClassification(config), processor)
    noise = np.random.default_rng(0).integers(0, 255, (40, 61, 3), np.uint8)
    image = Image.fromarray(noise)

    published = read_published(tmp_path)
    section = {"name_or_path": str(tmp_path), "settings": published.settings}
    model = PretrainedModel.load(section, published.recipe, None)
    batch = model.recipe.collate_fn([{"image": image, "label": "bad"}])
    params = model.load_params(model.recipe, Deployer(1, seed=0))
    scores = np.asarray(model.recipe.class_scores(params, batch, None))

    reads = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    with torch.no_grad():
        wanted = theirs(**reads([image], return_tensors="pt")).logits[0]
    found = probabilities(torch.tensor(scores[0]))
    assert found == pytest.approx(probabilities(wanted), abs=1e-5)
    assert not published.notes


@pytest.mark.slow
def test_a_published_model_converses_and_continues_as_transformers_does(tmp_path):
    """Its tokenizer puts a start token before plain texts, as LLaMA's does."""
    tokenizer = make_tokenizer(CHATML)
    start = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.bos_token_id)]
    )
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=256, **TINY, **ids
    )
    theirs = saved(tmp_path, transformers.LlamaForCausalLM(config), tokenizer)
    conversant = Conversant(ChatRequest(**conversing(tmp_path), max_new_tokens=12))

    def generated(asked):
        found = theirs.generate(**asked, max_new_tokens=12, do_sample=False)
        length = asked["input_ids"].shape[1]
        return tokenizer.decode(found[0, length:], skip_special_tokens=True), length

    def answered(**question):
        pieces = []
        found = conversant.answer(Question(**question), 0, Event(), pieces.append)
        return (found.text, found.num_prompt_tokens), "".join(pieces)

    messages = [{"role": "user", "content": TEXTS[0]}]
    text, length = generated(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )
    assert answered(messages=messages) == ((text.strip(), length), "")
    assert answered(messages=messages, in_pieces=True) == ((text.strip(), length), text.strip())
    for prompt in (*TEXTS, ""):
        expected = generated(tokenizer(prompt, return_tensors="pt"))
        assert answered(prompt=prompt) == (expected, "")
    assert expected[1] == 1  # of an empty prompt: the start token
    assert answered(prompt=TEXTS[0], checks_alone=True)[0][0] == ""


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99,
    "max_position_embeddings": 256, **TINY,
}  # fmt: skip
BERT = {
    "architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 99,
    "max_position_embeddings": 64, "id2label": {"0": "bad", "1": "good", "2": "odd"}, **TINY,
}  # fmt: skip
VIT = {"architectures": ["ViTForImageClassification"], "model_type": "vit", **TINY}
BASE = BERT | {"architectures": ["BertModel"]}


@pytest.fixture
def folder(tmp_path):
    """Writes a model's directory without its parameters: (config.json, other files)."""

    def write(config, files=None):
        model = tmp_path / "model"
        model.mkdir()
        contents = {"config.json": config, "model.safetensors": {}, **(files or {})}
        for name, content in contents.items():
            (model / name).write_text(json.dumps(content))
        return model

    return write


@pytest.mark.parametrize(
    ("config", "recipe", "lengths", "note"),
    [
        (LLAMA, "language_modeling", {"max_source_length": 128}, ""),
        (BERT, "classification", {"max_source_length": 64}, ""),
        (BERT | {"id2label": None, "num_labels": 1}, "regression", {"max_source_length": 64}, ""),
        (VIT, "image_classification", {}, "there is no preprocessor_config.json"),
        (
            BERT | {"max_position_embeddings": 1000}, "classification", {"max_source_length": 512},
            "texts of more than 512 tokens are cut",
        ),
    ],
)  # fmt: skip
def test_what_a_published_model_predicts_is_read_from_its_config(
    folder, config, recipe, lengths, note
):
    found = read_published(folder(config | {"dtype": "bfloat16"}))

    assert (found.recipe, found.lengths, found.dtype) == (recipe, lengths, "bfloat16")
    assert note in "".join(found.notes)
    assert bool(note) == bool(found.notes)


def test_a_model_with_a_chat_template_converses(folder):
    template = {"tokenizer_config.json": {"chat_template": CHATML}}
    found = read_published(folder(LLAMA, template))
    assert (found.recipe, found.lengths["max_length"], found.answer_length) == ("chat", 128, 128)


@pytest.mark.parametrize(
    ("config", "recipe", "problem"),
    [
        (BASE, None, "the model is a BertModel, so what it predicts is not known. Train it first"),
        (BASE, "classification", "BertModel, which has no parameters"),
        (LLAMA, "text_to_text", "recipe 'text_to_text' trains t5"),
        (LLAMA | {"architectures": None}, None, "Give recipe=NAME (chat or language_modeling)"),
        (LLAMA | {"model_type": "mamba"}, None, "is of family 'mamba', which is none of those"),
        (BERT | {"id2label": {"good": 0, "bad": 1}}, None, "must name classes by their numbers"),
        (BERT | {"id2label": {"0": "a", "1": "a"}}, None, "gives two classes one name: a, a"),
        *(
            (BERT | {"problem_type": "multi_label_classification"}, recipe, problem)
            for recipe, problem in (
                (None, "(multi_label_classification), so what it predicts is not known. Train it"),
                ("classification", "(multi_label_classification), which no recipe predicts"),
            )
        ),
    ],
)
def test_a_model_whose_predictions_are_not_known_is_refused(folder, config, recipe, problem):
    with pytest.raises(UsageError) as refused:
        read_published(folder(config), recipe)

    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("names", [["good", "bad", "odd"], ["bad", "good"], ["bad", "good", "so"]])
def test_classes_of_a_pipeline_are_those_of_the_head_in_its_order(folder, names):
    section = {"name_or_path": str(folder(BERT)), "settings": {"classes": names}}

    with pytest.raises(ArtifactError, match=r"classes are bad, good, odd, in this order, and"):
        PretrainedModel.load(section, "classification", None)


def test_a_directory_that_is_no_model_for_a_command_is_refused(folder, tmp_path):
    workspace = Workspace.open(tmp_path / "workspace")
    llama = folder(LLAMA)
    file, spool = tmp_path / "x.jsonl", tmp_path / "spool"
    file.write_text('{"a": 1, "b": 2}\n')
    for name in ("empty", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for problem, action in (
        ("A model of the hub is downloaded first: `hf downl", lambda: find_model(workspace, "a/b")),
        ("without a config.json", lambda: find_model(workspace, str(tmp_path / "empty"))),
        ("is a PEFT adapter", lambda: find_model(workspace, str(tmp_path / "adapter"))),
        (
            "the file has a, b, and recipe language_modeling reads ",
            lambda: read_new_files(workspace, llama, [file], [], [], spool),
        ),
    ):
        with pytest.raises(UsageError) as refused:
            action()
        assert problem in str(refused.value)
    assert not [*workspace.predict.glob("*")]
    (llama / "config.json").write_text(json.dumps(BERT))
    with pytest.raises(UsageError, match="recipe classification, which does not converse"):
        conversing(llama)
    (llama / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"and no parameters \(model.safetensors\)"):
        conversing(llama)
