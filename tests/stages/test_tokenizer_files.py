"""The files that a tokenizer or a model is read from are exactly those of the fingerprint."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redco_flow.hub import is_hub_name
from redco_flow.models.hub.model_files import INDEX_FILE, SINGLE_FILE, weight_files, weight_names
from redco_flow.spec.pipeline import DataSection, ModelSection, TokenizerSection
from redco_flow.stages.artifacts.dataset import (
    TOKENIZER_FOLDER,
    DatasetArtifact,
    DatasetSummary,
)
from redco_flow.stages.artifacts.tokenizer import (
    WrongTokenizer,
    check_model_tokenizer,
    digest_of_tokenizer_files,
    model_files,
    save_pretrained_tokenizer,
)
from redco_flow.stages.preprocess.config import Config, data_files
from redco_flow.stages.preprocess.tokenizer import save_chat_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.text.tokenizer_files import TOKENIZER_PATTERNS, files_in

BESIDE = {
    "README.txt": b"a text",
    "generation_config.json": b'{"eos_token_id": 3}',
    "preprocessor_config.json": b"{}",
    "model.safetensors": b"no tensors",
    "model.safetensors.index.json": b"{}",
    "train.json": b"[]",
}
TEMPLATES = {
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}
FORMS = ("gpt2", "wordpiece", "tokenizer_json")


def write_form(form: str, folder: Path) -> Path:
    """Write a tokenizer as transformers has published them, and files that are not a part of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir()
    special = {"eos_token": "</s>", "unk_token": "[UNK]", "pad_token": "</s>"}
    if form == "wordpiece":
        words = ["</s>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "lo", "##w", "##er", "x"]
        (folder / "vocab.txt").write_text("\n".join(words))
        (folder / "config.json").write_text('{"model_type": "bert"}')
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        (folder / "special_tokens_map.json").write_text('{"sep_token": "[SEP]"}')
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=290, special_tokens=["</s>", "[UNK]"], initial_alphabet=alphabet,
            show_progress=False,
        )  # fmt: skip
        tokenizer.train_from_iterator(["lower and lower, newer and newest"] * 9, trainer)
        if form == "gpt2":
            tokenizer.model.save(str(folder))
            values = {"tokenizer_class": "GPT2Tokenizer", **special}
        else:
            tokenizer.save(str(folder / "tokenizer.json"))
            values = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
        (folder / "added_tokens.json").write_text('{"<new>": 290}')
    (folder / "additional_chat_templates").mkdir()
    for name, content in {**TEMPLATES, **BESIDE}.items():
        (folder / name).write_bytes(content)
    return folder


def as_transformers_loads_it(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        return type(error)
    content = json.loads(loaded.backend_tokenizer.to_str())
    return content, loaded.special_tokens_map, loaded.chat_template, type(loaded)


@pytest.fixture(scope="module", params=FORMS)
def form(request, tmp_path_factory) -> Path:
    pytest.importorskip("transformers")
    return write_form(request.param, tmp_path_factory.mktemp(request.param) / "tokenizer")


def preprocess_files(folder: Path) -> list[Path]:
    section = DataSection(train="a.csv", tokenizer=TokenizerSection(name_or_path=str(folder)))
    return data_files(Config(recipe="text_to_text", data=section))


def test_each_file_whose_change_changes_the_tokenizer_identifies_it(form, tmp_path):
    """transformers loads the whole folder; ours sees the files of the fingerprint alone."""
    before = as_transformers_loads_it(form)
    listed = {path.relative_to(form).as_posix() for path in preprocess_files(form) if
              path.is_relative_to(form)}  # fmt: skip
    changing = set()
    for path in sorted(path for path in form.rglob("*") if path.is_file()):
        name = path.relative_to(form).as_posix()
        changed = tmp_path / name.replace("/", "_")
        shutil.copytree(form, changed)
        (changed / name).write_bytes(b"")
        if as_transformers_loads_it(changed) != before:
            changing.add(name)

    assert changing <= listed
    assert not listed & {*BESIDE}
    assert {"tokenizer_config.json", *TEMPLATES} <= changing
    assert changing & {"merges.txt", "vocab.txt", "tokenizer.json"}


def test_the_tokenizer_that_is_loaded_is_that_of_transformers(form, tmp_path):
    save_pretrained_tokenizer(str(form), tmp_path)

    assert as_transformers_loads_it(tmp_path)[0] == as_transformers_loads_it(form)[0]
    assert TextTokenizer.load(tmp_path).vocab_size > 9


def test_a_tokenizer_of_the_plain_class_is_loaded_without_torch(tmp_path):
    save_chat_tokenizer(train_tokenizer(["some words of a text"], 300, "bpe"), tmp_path / "one")
    program = (
        "import sys; from pathlib import Path; from redco_flow.text.chat import ChatTemplate; "
        "from redco_flow.stages.artifacts.tokenizer import save_pretrained_tokenizer; "
        "save_pretrained_tokenizer('one', Path('two')); ChatTemplate.load(Path('two')); "
        "assert not {'torch', 'transformers.models.auto.tokenization_auto'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)

    assert as_transformers_loads_it(tmp_path / "two") == as_transformers_loads_it(tmp_path / "one")


def test_the_vocabulary_files_of_all_tokenizers_of_transformers_are_in_the_list(tmp_path):
    transformers = pytest.importorskip("transformers")
    names: set[str] = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else ()
            if any(getattr(one, "id", "") == "VOCAB_FILES_NAMES" for one in targets):
                names |= {one.value for one in getattr(node.value, "values", ())}
    for name in names:
        (tmp_path / name).touch()

    assert len(names) > 15
    assert {path.name for path in files_in(tmp_path, TOKENIZER_PATTERNS)} == names


@pytest.mark.parametrize(
    ("form_name", "file", "content", "message"),
    [
        ("gpt2", "merges.txt", b"", "vocab.json, merges.txt; missing or empty: merges.txt"),
        ("gpt2", "merges.txt", None, "files with a vocabulary there: vocab.json"),
        ("gpt2", "vocab.json", None, "files with a vocabulary there: merges.txt"),
        ("gpt2", "vocab.json", b"", "not a tokenizer, or a damaged one"),
        ("gpt2", "vocab.json", b"[1]", "not a tokenizer, or a damaged one"),
        ("wordpiece", "vocab.txt", b"", "missing or empty: vocab.txt"),
        ("tokenizer_json", "tokenizer.json", b"", "not a tokenizer, or a damaged one"),
        ("tokenizer_json", "tokenizer.json", b"{}", "not a tokenizer, or a damaged one"),
        ("tokenizer_json", "tokenizer.json", None, "cannot be loaded"),
    ],
)
def test_a_tokenizer_without_a_part_of_it_is_refused(
    form_name, file, content, message, tmp_path
):  # fmt: skip
    folder = write_form(form_name, tmp_path / "tokenizer")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)

    with pytest.raises(ValueError, match=message) as raised:
        save_pretrained_tokenizer(str(folder), tmp_path / "saved")

    assert str(folder) in str(raised.value)
    assert "redco-flow-tokenizer-" not in str(raised.value)


def write_dataset(folder, tokenizer, **recorded):
    """A dataset without rows, encoded by the tokenizer in a directory."""
    save_pretrained_tokenizer(str(tokenizer), folder / TOKENIZER_FOLDER)
    nothing = {key: {} for key in ("splits", "files", "skipped_rows", "most_frequent_target")}
    lengths = {"max_source_length": 8, "max_target_length": 8}
    texts = {"recipe": "text_to_text", "source_prefix": "", "source_suffix": ""}
    summary = DatasetSummary(**texts, **lengths, **nothing, tokenizer=recorded)
    (folder / "dataset.json").write_text(json.dumps(summary.to_json()))
    return DatasetArtifact(folder)


def test_a_local_model_with_vocab_and_merges_alone_is_compared_with_the_data(tmp_path):
    model = write_form("gpt2", tmp_path / "model")
    other, same = (
        write_dataset(tmp_path / f"{name}-data", write_form(name, tmp_path / name))
        for name in ("tokenizer_json", "gpt2")
    )
    section = ModelSection(name_or_path=str(model))

    check_model_tokenizer(section, same)
    with pytest.raises(WrongTokenizer, match="another tokenizer"):
        check_model_tokenizer(section, other)


def test_a_model_whose_files_made_the_data_is_not_loaded_to_be_compared(tmp_path):
    model, folder = write_form("gpt2", tmp_path / "model"), tmp_path / "data"
    files = digest_of_tokenizer_files(str(model), None)
    dataset = write_dataset(folder, write_form("tokenizer_json", tmp_path / "other"), files=files)
    section = ModelSection(name_or_path=str(model))

    check_model_tokenizer(section, dataset)  # by what is recorded: the tokenizers differ
    (model / "added_tokens.json").write_text("{}")
    with pytest.raises(WrongTokenizer):
        check_model_tokenizer(section, dataset)


def test_a_models_files_are_its_configurations_its_tokenizer_and_the_weights_that_are_read(
    tmp_path,
):
    for name in ("config.json", "generation_config.json", "a.safetensors", "b.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model-old.safetensors").touch()
    weight_map = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(weight_map))
    section = ModelSection(name_or_path=str(tmp_path))

    indexed = [path.name for path in model_files(section)]
    (tmp_path / SINGLE_FILE).touch()
    single = [path.name for path in model_files(section)]

    configurations = ["config.json", "generation_config.json"]
    assert indexed == ["a.safetensors", "b.safetensors", *configurations, INDEX_FILE]
    assert single == [*configurations, SINGLE_FILE]  # transformers reads it before an index
    assert [path.name for path in model_files(section.model_copy(update={"from_scratch": True}))] \
        == configurations  # fmt: skip


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", "\0"])
def test_an_index_that_names_a_file_outside_of_its_directory_is_refused(name, tmp_path):
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": name}}))

    with pytest.raises(ValueError, match=r"not in its directory|must name the file"):
        weight_names(tmp_path)
    assert weight_files(tmp_path) == [tmp_path / INDEX_FILE]
    assert not is_hub_name(str(tmp_path))
