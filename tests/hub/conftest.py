"""A hub on this machine, tiny repositories for it, and the command line with a cache of its own."""

import json
import os
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file, save

from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import save_pretrained
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from tests.cli.conftest import Command
from tests.hub.local_hub import LocalHub

t5 = find_model("t5")

ROWS = [(f"{a} {b}", f"{b} {a}") for a in ("one", "two", "three") for b in ("four", "five", "six")]
MODEL = "tester/tiny-t5"
DATASET = "tester/swapped-words"
PIPELINE = f"""\
name: hub
recipe: text_to_text
model:
  name_or_path: {MODEL}
data:
  dataset: {DATASET}
  validation_fraction: 0.2
stages:
  preprocess: {{max_source_length: 8, max_target_length: 8}}
  train: {{num_epochs: 1, global_batch_size: 8}}
"""
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def hub():
    server = LocalHub()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory):
    """A tokenizer's files by name."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [text for row in ROWS for text in row]
    save_tokenizer(train_tokenizer(texts, 280, "bpe"), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="session")
def model_files(tmp_path_factory, tokenizer_files):
    """A T5 of one layer with its parameters in two files, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    config = t5.Config(vocab_size=280, num_layers=1, num_decoder_layers=1, **sizes)
    save_pretrained(folder, t5, config, t5.init_params(config, jax.random.key(0)))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"1": names[: len(names) // 2], "2": names[len(names) // 2 :]}
    shards = {f"model-0000{n}-of-00002.safetensors": part for n, part in halves.items()}
    index = {"metadata": {}, "weight_map": {t: f for f, part in shards.items() for t in part}}
    return {
        **tokenizer_files,
        "config.json": (folder / "config.json").read_bytes(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{file: save({t: tensors[t] for t in part}) for file, part in shards.items()},
    }


class HubCommand(Command):
    """The command line with its own cache, and a hub that it can be told to forget."""

    def __init__(self, folder: Path, hub: LocalHub) -> None:
        super().__init__(folder)
        self.variables = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(folder / "huggingface"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        for name in ("HF_TOKEN", "HF_DATASETS_CACHE", "HF_HUB_CACHE"):
            assert name not in os.environ

    def start(self, *words, environment=None, **options):
        return super().start(
            *words, environment={**self.variables, **(environment or {})}, **options
        )

    def stages(self, *words, **options):
        """Action and reason by stage of a plan."""
        plan = self.json("plan", "hub.yaml", *words, **options)
        return {name: (stage["action"], stage["reason"]) for name, stage in plan["stages"].items()}

    def attempt(self, run, stage):
        """The directory of a stage's first attempt."""
        runs = self.folder / "redco-workspace" / "runs"
        return runs / run / "stages" / stage / "attempts" / "1"

    def call(self, run, stage):
        """What a stage was told to do."""
        return json.loads((self.attempt(run, stage) / "call.json").read_text())


@pytest.fixture
def command(tmp_path, hub):
    (tmp_path / "hub.yaml").write_text(PIPELINE)
    return HubCommand(tmp_path, hub)
