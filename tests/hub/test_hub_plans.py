"""What `plan` and `run` ask of the hub before anything starts, and what they refuse."""

import json
import os
import subprocess
import sys

import pytest

from tests.hub.conftest import DATASET, MODEL, ROWS

LOAD_TWICE = """
import json, sys
from pathlib import Path
from redco_flow.orchestrate.pins.hub import HubPins
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.workspace import Workspace
pipeline, _ = HubPins().pinned(load_pipeline(sys.argv[1]), Workspace.open("workspace"))
Path("resolved.yaml").write_text(write_yaml(pipeline.document))
again = load_pipeline("resolved.yaml")
assert again.document == pipeline.document
assert {n: s.settings for n, s in again.stages.items()} == {
    n: s.settings for n, s in pipeline.stages.items()
}
print(json.dumps({name: stage.config.model.revision for name, stage in again.stages.items()}))
"""


def jsonl(rows):
    lines = (json.dumps({"source": source, "target": target}) for source, target in rows)
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.fixture
def repositories(hub, model_files):
    """The model and the dataset of the pipeline."""
    model = hub.repository("models", MODEL)
    model.commit(model_files)
    dataset = hub.repository("datasets", DATASET)
    dataset.commit({"train.jsonl": jsonl(ROWS * 4)})
    return model, dataset


@pytest.mark.slow
def test_what_the_hub_refuses_is_told_at_once_with_file_and_line(hub, command, model_files):
    """Gated, gone, without that revision, and parameters in a format that nothing reads."""
    hub.repository("datasets", DATASET).is_gated = True
    hub.repository("datasets", DATASET).commit({"train.jsonl": b""})
    pickled = dict.fromkeys(("config.json", "pytorch_model.bin", "tokenizer.json"), b"")
    hub.repository("models", MODEL).commit(pickled)
    hub.repository("models", MODEL).commit(model_files, branch="v1")

    error = command("plan", "hub.yaml", code=2)

    assert "hub.yaml:4:3: 'model.name_or_path': model 'tester/tiny-t5' at main (" in error
    assert "has only pytorch_model.bin, and redco-flow reads model.safetensors or" in error
    assert f"hub.yaml:6:3: 'data.dataset': dataset '{DATASET}' is gated: its owners" in error
    other = ("model.name_or_path=tester/nothing", f"data.dataset={DATASET}-2")
    error = command("plan", "hub.yaml", *other, code=2)
    assert "there is no model 'tester/nothing' at http://127.0.0.1:" in error
    assert f"there is no dataset '{DATASET}-2'" in error
    assert "has no revision 'v9'" in command("plan", "hub.yaml", "model.revision=v9", code=2)
    granted = {"HF_TOKEN": "hf_granted"}
    plan = command.json("plan", "hub.yaml", "model.revision=v1", environment=granted)
    assert [pin["asked"] for pin in plan["hub"]] == ["v1", "main"]


@pytest.mark.slow
def test_without_a_network_a_hub_id_is_refused_at_once(hub, command):
    """It is asked once, not again and again for every name, and what can be done is said."""
    hub.is_down = True

    error = command("plan", "hub.yaml", code=2)

    assert len(hub.asked) == 1
    assert f"{hub.address} did not answer (RemoteProtocolError" in error
    assert f"`hf download {MODEL}` fills it (HF_HOME says where it is); HF_ENDPOINT" in error
    assert f"`hf download --repo-type dataset {DATASET}` fills it" in error
    hub.close()
    assert "did not answer (ConnectError" in command("plan", "hub.yaml", code=2)


@pytest.mark.slow
def test_a_model_of_a_family_that_is_not_read_is_refused_with_the_nearest(
    hub, command, repositories, model_files
):
    """On the hub and in a directory; also a family that is read, and that the recipe lacks."""
    other = hub.repository("models", "tester/other")
    other.commit({**model_files, "config.json": b'{"model_type": "qwen2_moe"}'})
    decoder = hub.repository("models", "tester/decoder")
    decoder.commit({**model_files, "config.json": b'{"model_type": "llama"}'})
    folder = command.folder / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text('{"model_type": "falcon"}')

    on_hub = command("plan", "hub.yaml", "model.name_or_path=tester/other", code=2)
    local = command("plan", "hub.yaml", "model.name_or_path=./model", code=2)
    of_another = command("plan", "hub.yaml", "model.name_or_path=tester/decoder", code=2)

    assert "'model.name_or_path': model 'tester/other' at main (" in on_hub
    assert "is of family 'qwen2_moe', which is none of those that are read: t5, bart" in on_hub
    assert (
        "the nearest by name is 'qwen3_moe'. To add it, write a module with a Config like" in on_hub
    )
    assert "model directory './model' is of family 'falcon', which" in local
    assert "plain ones are 'llama' (decoder-only), 't5'" in local
    assert "recipe 'text_to_text' trains t5, bart, and not 'llama'; for 'llama' use" in of_another


@pytest.mark.slow
def test_a_quantized_model_is_refused_with_its_method(hub, command, repositories, model_files):
    """On the hub and in a directory."""
    quantized = b'{"model_type": "t5", "quantization_config": {"quant_method": "gptq", "bits": 4}}'
    hub.repository("models", "tester/other").commit({**model_files, "config.json": quantized})
    folder = command.folder / "model"
    folder.mkdir()
    for name, content in {**model_files, "config.json": quantized.replace(b"gptq", b"awq")}.items():
        (folder / name).write_bytes(content)

    on_hub = command("plan", "hub.yaml", "model.name_or_path=tester/other", code=2)
    local = command("plan", "hub.yaml", "model.name_or_path=./model", code=2)

    assert "has quantized parameters (gptq, by quantization_config in its config.json)" in on_hub
    assert "model directory './model' has quantized parameters (awq, by" in local


def test_a_sweep_asks_the_hub_once(hub, command, repositories):
    """Fault 49. All points of a sweep are at the same commits."""
    sweep = ("--sweep", "learning_rate=1e-3,1e-4", "--sweep", "train.seed=1,2")

    command("run", "hub.yaml", *sweep, "-n")

    looked_up = [path for path in hub.asked if path.startswith("/api/") and "/tree/" not in path]
    assert len(looked_up) == 2
    downloads = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert downloads == {"config.json"}


@pytest.mark.slow
def test_a_directory_of_pickled_parameters_or_none_is_refused(command, hub, repositories):
    folder = command.folder / "model"
    folder.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (folder / name).write_text("{}")

    error = command("plan", "hub.yaml", "model.name_or_path=./model", code=2)
    other = ("model.name_or_path=./modell", f"data.tokenizer.name_or_path={folder}")
    pinned = command("plan", "hub.yaml", *other, "data.tokenizer.revision=main", code=2)

    assert "'model.name_or_path': model directory './model' has only pytorch_model.bin" in error
    assert "'model.name_or_path': there is no directory './modell'" in pinned
    assert "only the hub's have a 'revision'" in pinned


def test_a_stage_with_a_model_of_its_own_has_a_commit_of_its_own(hub, command, repositories):
    """What the run's records say is loaded again as the very same pipeline."""
    own = hub.repository("models", "tester/own")
    hub.repository("models", MODEL).commit({"tokenizer.json": b"{}"})
    commit = own.commit(dict.fromkeys(("config.json", "model.safetensors"), b""))
    text = (command.folder / "hub.yaml").read_text()
    text += "    model: {name_or_path: tester/own, revision: v1}\n  other:\n    kind: train\n"
    text += "    model: {name_or_path: null, family: t5}\n"
    text = text.replace("  train: {num_epochs: 1, global_batch_size: 8}", "  train:")
    (command.folder / "hub.yaml").write_text(text)
    own.refs["v1"] = commit
    own.commit({})
    done = subprocess.run(
        [sys.executable, "-c", LOAD_TWICE, "hub.yaml"],
        cwd=command.folder,
        env={**os.environ, **command.variables},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    main = hub.repository("models", MODEL).refs["main"]
    assert json.loads(done.stdout) == {"preprocess": main, "train": commit, "other": None}


@pytest.mark.slow
def test_lengths_are_compared_with_the_positions_of_a_model_on_the_hub(hub, command, model_files):
    """Its config.json alone is downloaded, and once."""
    config = {"model_type": "gpt2", "n_positions": 16, "n_embd": 8, "n_head": 2, "n_layer": 1}
    files = model_files | {"config.json": json.dumps(config).encode()}
    hub.repository("models", MODEL).commit(files)
    hub.repository("datasets", DATASET).commit({"train.jsonl": jsonl(ROWS * 4)})
    words = ("recipe=language_modeling", "stages.preprocess.max_source_length=17")

    error = command("plan", "hub.yaml", *words, code=2)

    message = "'stages.preprocess.max_source_length': 17 tokens, and the model's positions (gpt2)"
    assert f"{message} reach 16" in error
    downloads = [path for path in hub.asked if "/resolve/" in path and MODEL in path]
    assert {path.rpartition("/")[2] for path in downloads} == {"config.json"}
    assert message in command("plan", "hub.yaml", *words, code=2)
    again = [path for path in hub.asked if "/resolve/" in path and MODEL in path]
    assert again == downloads
