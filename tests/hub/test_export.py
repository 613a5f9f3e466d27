"""Checkpoints out of the door: as transformers and PEFT read them, in a directory and on a hub."""

import json
import os
import shutil
from dataclasses import asdict

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

from redco_flow.engine.checkpoint.checkpointer import Checkpointer, parameter_digests
from redco_flow.engine.checkpoint.commit import TRAINING
from redco_flow.engine.step.lora import plan_lora
from redco_flow.errors import ArtifactError, UsageError
from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import load_pretrained, read_model
from redco_flow.orchestrate.checkpoints.export import export_checkpoint, find_checkpoint
from redco_flow.recipes.find import find_recipe
from redco_flow.stages.artifacts.checkpoint import (
    AdapterRecord,
    CheckpointArtifact,
    RecipeRecord,
    checkpoint_identity,
    write_checkpoint_artifact,
)
from redco_flow.stages.artifacts.hugging_face import ExportRequest, write
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult, publish_result
from redco_flow.tracking.workspace import Workspace
from tests.drawn_params import as_array, draw_like
from tests.hub.conftest import HubCommand

pytestmark = [pytest.mark.slow]
NAME = "tester/exported"
LENGTHS = {"source_length": 8, "target_length": 8}
_LLAMA = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_heads": 2, "num_layers": 2}
# The recipe, the family and its size, and which kernels have factors.
MODELS = {
    "llama": (
        "language_modeling",
        "llama",
        {**_LLAMA, "eos_token_id": [1, 7, 9]},
        "attention/(q|kv|out)$|mlp",
    ),
    "gpt2": ("language_modeling", "gpt2", _GPT2, "attention/(qkv|out)$|mlp"),
    "t5": ("text_to_text", "t5", _T5, "decoder.*attention"),
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
PRIVATE = "/home/somebody/secret-project"


class Published:
    """A workspace with a checkpoint of a tiny model, as a training publishes it."""

    def __init__(
        self, root, tokenizer_files, name, *, is_factored=False, separate=False, scale=1, **record
    ):
        recipe_name, family, config, targets = MODELS[name]
        tokenizer = root / "tokenizer"
        tokenizer.mkdir()
        for file, content in tokenizer_files.items():
            (tokenizer / file).write_bytes(content)
        (tokenizer / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        self.workspace = Workspace.open(root / "workspace")
        model = {"family": family, "config": config}
        self.recipe = find_recipe(recipe_name).build(
            model, TextTokenizer.load(tokenizer), **LENGTHS
        )
        params = draw_like(self.recipe.abstract_params())
        self.params = jax.tree.map(lambda leaf: as_array(np.asarray(leaf) * scale), params)
        state = {"params": self.params}
        lora = None
        if is_factored:
            lora = self._plan_lora(targets, separate)
            state = self._factored(lora)
        self.merged = state["params"]
        step = root / "checkpoints"
        with Checkpointer(step) as checkpointer:
            checkpointer.save(3, state, metrics={"eval_loss": 1.5}, cursor={})
            checkpointer.wait()
            step = checkpointer.step_directory(3)
        said = {
            "recipe": recipe_name,
            "model": self.recipe.model,
            **LENGTHS,
            "tokenizer_digest": "t" * 64,
            "step": 3,
            "metrics": {"eval_loss": 1.5},
            "data": "d" * 64,
            "config": "c" * 64,
        }
        adapter = None
        if lora is not None:
            targets = [asdict(one) for one in lora.targets]
            digests = parameter_digests(step, TRAINING)
            adapter = AdapterRecord(lora.rank, lora.alpha, targets, digests)
        digests = write_checkpoint_artifact(
            root / "artifact", step, tokenizer, RecipeRecord(**{**said, **record}), adapter
        )
        self.checkpoint = ArtifactStore(self.workspace).publish(
            "checkpoint",
            root / "artifact",
            metadata={"recipe": recipe_name, "step": 3, "metrics": {"eval_loss": 1.5}},
            produced_by={"stage": "train", "run": "tiny-abc123", "fingerprint": "f" * 64},
            digests=digests,
            identity=checkpoint_identity(digests, parameter_digests(step), {}),
        )

    def _plan_lora(self, targets, separate):
        example = {"row_id": "x", "source_ids": np.array([5, 6]), "target_ids": np.array([7, 1])}
        shapes = jax.eval_shape(lambda: self.params)
        traced = (shapes, self.recipe.loss_fn, self.recipe.collate_fn([example]), None, False)
        return plan_lora(*traced, rank=2, alpha=6.0, targets=targets, separate=separate)

    def _factored(self, lora):
        @jax.jit
        def factored(params):
            state = lora.start(params, jax.random.key(0))
            state["lora"] = jax.tree.map(lambda x: x + 0.3, state["lora"])
            return {"params": lora.merge(state), "lora": state["lora"]}

        return factored(self.params)

    def tell_lineage(self, model, data, inputs=None):
        """Publish the training's result, and an evaluation."""
        settings = {"model": model, "learning_rate": 0.1, "note": f"{PRIVATE}/notes"}
        result = StageResult(
            fingerprint="f" * 64,
            pipeline="tiny",
            stage="train",
            kind="train",
            ingredients={"kind": "train", "settings": settings, "data": data}
            | {"inputs": inputs or {}},
            outputs={"checkpoint/last": self.checkpoint.id},
            run="tiny-abc123",
            origins={"learning_rate": {"source": f"{PRIVATE}/my.yaml", "line": 3}}
            | {"note": {"source": f"{PRIVATE}/my.yaml", "line": 4}},
            host="login7",
            versions={"redco-flow": "0.2.0", "jax": "0.10.2"},
        )
        publish_result(self.workspace, result)
        summary = self.workspace.artifacts / "summary.json"
        summary.write_text("{}")
        baselines = {"copy_source": {"text": None, "metrics": {"bleu": 1.25}}}
        metadata = {"checkpoint": self.checkpoint.id, "metrics": {"bleu": 41.5}}
        metadata |= {"baselines": baselines, "split": "test", "num_examples": 99}
        of_tasks = {**metadata, "modules": [], "baselines": {}, "metrics": {"hellaswag/acc": 0.25}}
        for one in (metadata, of_tasks):
            ArtifactStore(self.workspace).publish("metrics", summary, metadata=one)
            summary.write_text("{ }")  # another artifact
        summary.unlink()

    def export(self, folder, *, merge_lora=False, dtype=None):
        return export_checkpoint(
            self.workspace, self.checkpoint, folder, merge_lora=merge_lora, dtype=dtype
        )


@pytest.fixture(scope="module")
def make(tmp_path_factory, tokenizer_files):
    def make_one(name, **options):
        return Published(tmp_path_factory.mktemp(name), tokenizer_files, name, **options)

    return make_one


@pytest.fixture(scope="module")
def llama(make):
    published = make("llama")
    published.tell_lineage({"name_or_path": None}, {f"{PRIVATE}/rows.jsonl": "b" * 64})
    return published


@pytest.fixture(scope="module")
def exported(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "deeper" / "model"
    assert llama.export(folder) == "model"
    return folder


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_export_holds_the_same_parameters_bit_by_bit(llama, exported):
    module, config = read_model(exported)

    assert_equal(load_pretrained(exported, module, config), llama.params)
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"
    generation = json.loads((exported / "generation_config.json").read_text())
    assert config.eos_token_ids == (1, 7, 9)
    assert generation["eos_token_id"] == [1, 7, 9]
    assert (exported / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert {oct(path.stat().st_mode & 0o777) for path in exported.iterdir()} == {"0o644"}
    assert not list(exported.parent.glob(".*"))


def test_large_models_are_shards_with_an_index(llama, tmp_path):
    request = ExportRequest(
        str(llama.checkpoint.path), str(tmp_path), "model", max_file_bytes=20_000
    )

    written = write(request)

    module, config = read_model(tmp_path)
    assert_equal(load_pretrained(tmp_path, module, config), llama.params)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {path.name for path in tmp_path.glob("model-*.safetensors")}
    assert shards == set(index["weight_map"].values())
    assert len(shards) > 1
    sizes = [leaf.size for leaf in jax.tree.leaves(llama.params)]
    assert (written.num_parameters, index["metadata"]["total_size"]) == (sum(sizes), 4 * sum(sizes))


def test_a_narrower_dtype_rounds_every_parameter_once(llama, tmp_path):
    write(ExportRequest(str(llama.checkpoint.path), str(tmp_path), "model", dtype="bfloat16"))

    module, config = read_model(tmp_path)
    rounded = jax.tree.map(
        lambda x: np.asarray(x).astype("bfloat16").astype("float32"), llama.params
    )
    assert_equal(load_pretrained(tmp_path, module, config), rounded)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_parameters_that_overflow_in_float16_name_the_dtypes_that_hold_them(make, tmp_path):
    large = str(make("llama", scale=1e8).checkpoint.path)

    with pytest.raises(ArtifactError, match=r"has values of up to \S+, and float16 ends at 65,504"):
        write(ExportRequest(large, str(tmp_path), "model", dtype="float16"))
    assert list(tmp_path.iterdir()) == []


def test_the_card_tells_the_making_and_the_scores_and_nothing_private(llama, exported):
    card = ModelCard.load(exported / "README.md")

    texts = [path for path in exported.iterdir() if path.suffix in (".json", ".md", ".jinja")]
    text = "".join(path.read_text() for path in texts)
    private = (PRIVATE, "somebody", "login7", str(llama.workspace.root))
    assert not [word for word in private if word in text]
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    results = {one.metric_type: one for one in card.data.eval_results}
    assert {name: one.metric_value for name, one in results.items()} == {"bleu": 41.5, "acc": 0.25}
    assert (results["acc"].dataset_type, results["bleu"].dataset_type) == ("hellaswag", "tiny")
    assert "| bleu | 41.5 | 1.25 |" in card.text
    assert "On 99 examples of the test split" in card.text
    assert "learning_rate: 0.1" in card.text
    assert 'note: "…/notes"' in card.text
    assert f"`rows.jsonl`, BLAKE3 `{'b' * 64}`" in card.text
    assert llama.checkpoint.id in card.text
    assert "run `tiny-abc123`, step 3" in card.text


def test_the_same_export_is_not_written_again_and_nothing_else_is_touched(
    llama, exported, tmp_path
):
    before = {path: path.stat().st_mtime_ns for path in exported.iterdir()}
    (exported / "README.md").write_text((exported / "README.md").read_text() + "\nMy own words.\n")
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.txt").write_text("mine")

    assert llama.export(exported) == "model"

    changed = {path.name for path in before if path.stat().st_mtime_ns != before[path]}
    assert changed == {"README.md"}
    for folder, options in ((own, {}), (exported, {"dtype": "bfloat16"})):
        with pytest.raises(UsageError, match="not empty, and not this export"):
            llama.export(folder, **options)
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    (copy / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds this export, but config\.json changed since"):
        llama.export(copy)
    assert [path.name for path in own.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("torch", "checked"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the process that computed them was killed"),
        ("raise OSError('libcudart.so: cannot open it')", "redco-flow loaded the files"),
    ],
)
def test_an_export_needs_no_torch_that_works_nor_memory_to_run_the_model(
    llama, tmp_path, monkeypatch, torch, checked
):
    """The process is killed as where memory runs out, or the library is broken."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text(torch)
    monkeypatch.syspath_prepend(tmp_path / "broken")

    llama.export(tmp_path / "out")

    assert_equal(load_pretrained(tmp_path / "out", *read_model(tmp_path / "out")), llama.params)
    assert checked in (tmp_path / "out" / "README.md").read_text()


def test_a_damaged_checkpoint_is_refused_and_leaves_no_directory(make, tmp_path):
    published = make("llama")
    file = max(published.checkpoint.path.rglob("params/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)

    with pytest.raises(ArtifactError, match=r"is damaged, and nothing was exported: .*BLAKE3"):
        published.export(tmp_path / "out")

    assert not list(tmp_path.iterdir())


def test_a_model_of_a_users_own_has_no_layout_and_says_so(make, tmp_path):
    published = make("llama", model={"width": 8}, recipe="my_package.images")

    with pytest.raises(ArtifactError, match=r"model of recipe 'my_package\.images' is its own"):
        published.export(tmp_path / "out")

    assert not list(tmp_path.iterdir())


def test_checkpoints_are_named_by_id_path_run_and_stage(llama):
    artifact = llama.checkpoint
    for text in (artifact.id[:8], artifact.id, str(artifact.path), str(artifact.directory)):
        assert find_checkpoint(llama.workspace, text).id == artifact.id
    metrics = ArtifactStore(llama.workspace).latest("metrics")
    with pytest.raises(UsageError, match="is of kind metrics, not a checkpoint"):
        find_checkpoint(llama.workspace, metrics.id[:8])


@pytest.mark.parametrize(("name", "separate"), [("llama", True), ("t5", False)])
def test_an_adapter_over_its_base_gives_the_trained_models_logits(make, tmp_path, name, separate):
    pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    peft = pytest.importorskip("peft", reason="pip install peft==0.21.2 (extra: reference)")
    published = make(name, is_factored=True, separate=separate)
    published.recipe.save_pretrained(published.params, tmp_path / "base")

    for form in ("adapter", "model"):
        (tmp_path / form).mkdir()
        write(ExportRequest(str(published.checkpoint.path), str(tmp_path / form), form))

    base, merged = load(tmp_path / "base"), load(tmp_path / "model")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    parts = {module for module in adapted.state_dict() if ".lora_A." in module}
    assert len(parts) == len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) / 2
    expected = our_logits(published, published.merged)
    assert np.abs(expected - our_logits(published, published.params)).max() > 0.1
    for model in (adapted, merged):
        np.testing.assert_allclose(their_logits(model, name), expected, rtol=0, atol=1e-4)


IDS = np.array([[5, 9, 12, 33, 2, 7]])


def load(folder):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder).eval()


def their_logits(model, name):
    import torch

    inputs = {"input_ids": torch.tensor(IDS)}
    if name == "t5":
        inputs["decoder_input_ids"] = torch.tensor(IDS)
    with torch.no_grad():
        return model(**inputs).logits.numpy()


def our_logits(published, params):
    model = CheckpointArtifact(published.checkpoint.path).record.model
    module = find_model(model["family"])
    config = module.Config().updated(model["config"])
    inputs = (IDS, np.ones_like(IDS), IDS) if model["family"] == "t5" else (IDS,)
    return np.asarray(jax.jit(lambda params: module.apply(config, params, *inputs))(params))


def test_factors_are_exported_as_an_adapter_that_names_its_base(make, tmp_path):
    published = make("gpt2", is_factored=True)
    commit = {"hub:models/org/base": {"commit": "e" * 40}}
    published.tell_lineage({"name_or_path": "org/base", "revision": "e" * 40}, commit)

    assert published.export(tmp_path / "out") == "adapter"

    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", "e" * 40)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.library_name) == ("org/base", "peft")
    assert "model = PeftModel.from_pretrained(model, path)" in card.text
    with pytest.raises(UsageError, match="--dtype is for a whole model"):
        published.export(tmp_path / "narrow", dtype="bfloat16")


def test_an_adapter_over_a_model_of_no_hub_is_refused(make, tmp_path):
    published = make("gpt2", is_factored=True)
    published.tell_lineage({"name_or_path": None}, {})

    with pytest.raises(UsageError, match=r"drawn at random.*Give --merge-lora"):
        published.export(tmp_path / "out")


def test_an_adapter_over_another_checkpoint_is_refused(make, tmp_path):
    """With the model that its settings name, its factors would give other results."""
    published = make("gpt2", is_factored=True)
    (tmp_path / "begun").write_text("")
    begun = ArtifactStore(published.workspace).publish(
        "checkpoint", tmp_path / "begun", metadata={"recipe": "language_modeling"}
    )
    commit = {"hub:models/org/base": {"commit": "e" * 40}}
    published.tell_lineage({"name_or_path": "org/base"}, commit, {"start_from": [begun.id]})

    with pytest.raises(UsageError, match=r"over another checkpoint .*Give --merge-lora"):
        published.export(tmp_path / "out")


@pytest.fixture
def command(llama, tmp_path, hub):
    """The command line beside the workspace, this checkout's."""
    (tmp_path / "redco-workspace").symlink_to(llama.workspace.root)
    found = HubCommand(tmp_path, hub)
    found.variables |= {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HF_TOKEN": "hf_write"}
    return found


def test_what_is_pushed_is_the_directory_and_a_second_push_sends_no_tensors(
    llama, exported, command, hub, tmp_path
):
    shutil.copytree(exported, tmp_path / "out")
    words = ("export", llama.checkpoint.id[:12], "out", "--push", NAME)
    hub.refuses_large_files = True

    failed = command(*words, code=1)

    assert "the export is whole in out, but not on the hub" in failed
    assert "The same command goes on with the upload alone" in failed
    hub.refuses_large_files = False
    done = command.json(*words)
    found = hub.repository("models", NAME)
    assert done["pushed"] == f"{hub.address}/{NAME}/commit/{found.refs['main']}"
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found.commits[found.refs["main"]] == files
    assert set(done["files"]) == files.keys()
    hub.requests.clear()
    command(*words)
    assert not [path for method, path, _ in hub.requests if method == "PUT"]
    found.commit({**files, "adapter_config.json": b"{}", "model-00001-of-00002.safetensors": b"",
                  "notes.txt": b""})  # fmt: skip
    command(*words)
    assert found.commits[found.refs["main"]] == {**files, "notes.txt": b""}
    theirs = {"config.json": b"{}", "model-00001-of-00002.safetensors": b""}
    found.commit(theirs)
    assert "holds another model (model-00001-of-" in command(*words, code=1)
    assert found.commits[found.refs["main"]] == theirs


def test_what_no_push_could_be_made_with_is_told_before_anything_is_written(
    llama, command, tmp_path
):
    words = ("export", llama.checkpoint.id, "out", "--push")

    assert "needs a token that may write: set HF_TOKEN" in command(
        *words, NAME, code=2, environment={"HF_TOKEN": ""}
    )
    assert "no name of a repository" in command(*words, "a/b/c", code=2)
    assert "no name of a repository to push to: ORG/NAME" in command(*words, "exported", code=2)
    assert not (tmp_path / "out").exists()


def test_an_export_stays_whole_while_the_hub_is_down_or_refuses(
    llama, exported, command, hub, tmp_path
):
    shutil.copytree(exported, tmp_path / "out")
    words = ("export", llama.checkpoint.id, "out", "--push", NAME)

    refused = command(*words, code=1, environment={"HF_TOKEN": "hf_read"})
    hub.close()
    unreachable = command(*words, code=1)

    assert "is the token in HF_TOKEN still valid" in refused
    assert f"{hub.address} did not answer" in unreachable
    assert_equal(load_pretrained(tmp_path / "out", *read_model(tmp_path / "out")), llama.params)


def test_paths_of_this_machine_are_not_in_the_record(exported):
    record = json.loads((exported / "redco_flow_export.json").read_text())

    assert record.keys() == {"checkpoint", "form", "dtype", "files"}
    assert all("/" not in name for name in record["files"])
