"""Runs whose model and data come from a hub: end to end, and when it changes, breaks or is gone."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub.conftest import DATASET, MODEL, OFFLINE, ROWS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("prefect_server"),
]
PATIENCE = {"timeout": 400}


def parquet(rows):
    columns = dict(zip(("source", "target"), map(list, zip(*rows, strict=True)), strict=True))
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def jsonl(rows):
    lines = (json.dumps({"source": source, "target": target}) for source, target in rows)
    return "".join(f"{line}\n" for line in lines).encode()


def asked_revisions(hub, name):
    """The revisions of a repository that were asked for, in files and in listings."""
    words = [path.partition(f"{name}/")[2].split("/") for _, path, _ in hub.requests]
    return {one[1] for one in words if one[0] in ("resolve", "tree", "revision", "paths-info")}


def test_a_run_stays_on_one_commit_while_main_moves(hub, command, model_files):
    """Fault 49. A sharded model and Parquet data; both move while the data is downloaded."""
    model, dataset = hub.repository("models", MODEL), hub.repository("datasets", DATASET)
    first_model = model.commit(model_files)
    first_data = dataset.commit({"data/train-00000-of-00001.parquet": parquet(ROWS * 4)})
    planned = command.stages()
    moved = []

    def move(path):
        if path.endswith(".parquet") and not moved:
            moved.append(model.commit({**model_files, "config.json": b"{}"}))
            moved.append(dataset.commit({"train.jsonl": jsonl(ROWS)}))

    hub.on_file = move
    done = command.json("run", "hub.yaml", **PATIENCE)

    assert planned["preprocess"] == ("run", "first run")
    assert done["state"] == "completed"
    assert len(moved) == 2
    assert asked_revisions(hub, MODEL) == {first_model}
    assert asked_revisions(hub, DATASET) == {first_data}
    calls = command.calls(done["run"])
    assert calls["preprocess"]["config"]["data"]["revision"] == first_data
    assert {call["config"]["model"]["revision"] for call in calls.values()} == {first_model}
    why = command("why", f"{done['run']}/train/eval_loss")
    assert f"data hub:datasets/{DATASET}  commit {first_data}" in why
    assert f"data hub:models/{MODEL}  commit {first_model}" in why
    assert f'model.revision = "{first_model}"  (main on the hub)' in why
    # The next plan says what moved, and takes the old commits again where it is told to.
    action, reason = command.stages()["preprocess"]
    assert action == "run"
    assert f"model.revision: {first_model[:12]} → {moved[0][:12]} (main on the hub)" in reason
    assert f"data.revision: {first_data[:12]} → {moved[1][:12]} (main on the hub)" in reason
    pins = (f"model.revision={first_model}", f"data.revision={first_data}")
    assert {action for action, _ in command.stages(*pins).values()} == {"reuse"}
    # Without the hub: the commits of the last run, which the cache has; and workers need no hub.
    hub.close()
    text = command("plan", "hub.yaml", environment=OFFLINE)
    assert f"hub: model {MODEL}, main: {first_model[:12]} (from the cache: HF_HUB_OFF" in text
    again = command.json("run", "hub.yaml", "train.seed=1", **PATIENCE)
    reused = {name: stage["reused"] for name, stage in again["stages"].items()}
    assert reused == {"preprocess": True, "train": False}


def test_a_broken_download_is_taken_up_at_its_byte_and_commit(hub, command, tokenizer_files):
    """Fault 49. The download breaks off for good; after main moved, `retry` asks for the rest."""
    rows = jsonl(ROWS * 400)
    hub.repository("models", MODEL).commit(tokenizer_files)
    dataset = hub.repository("datasets", DATASET)
    card = b"---\nconfigs:\n- config_name: swapped\n  data_files: train.jsonl\n---\n"
    first = dataset.commit({"train.jsonl": rows, "README.md": card})

    def break_off(path):
        """Half of the file, then nothing more of it, however often the client asks."""
        if path == "train.jsonl":
            hub.breaks[path] = 0 if path in hub.breaks else len(rows) // 2

    hub.on_file = break_off
    until = ("--until", "preprocess")
    failed = command.json("run", "hub.yaml", *until, code=1, **PATIENCE)

    hub.on_file = None
    hub.breaks.clear()
    hub.requests.clear()
    dataset.commit({"train.jsonl": jsonl(ROWS)})
    done = command.json("retry", failed["run"], **PATIENCE)

    assert done["state"] == "completed"
    assert asked_revisions(hub, DATASET) == {first}
    files = {path: asked for method, path, asked in hub.requests if method == "GET"}
    assert files[f"/datasets/{DATASET}/resolve/{first}/train.jsonl"] == f"bytes={len(rows) // 2}-"
