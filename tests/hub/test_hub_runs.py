"""Runs whose model and data come from a hub: end to end, and when it changes, breaks or is gone."""

import io
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub.conftest import DATASET, MODEL, OFFLINE, ROWS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_cache")]
PATIENCE = {"timeout": 400}


def parquet(rows):
    columns = dict(zip(("source", "target"), map(list, zip(*rows, strict=True)), strict=True))
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def jsonl(rows):
    lines = (json.dumps({"source": source, "target": target}) for source, target in rows)
    return "".join(f"{line}\n" for line in lines).encode()


def downloads(hub):
    """The method and the name of each file that was asked for."""
    return [(method, path.rpartition("/")[2]) for method, path, _ in hub.requests]


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
    calls = {stage: command.call(done["run"], stage) for stage in done["stages"]}
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


def test_a_broken_download_is_taken_up_at_its_byte_and_commit(hub, command, model_files):
    """Fault 49. It breaks off for good, `main` moves, and in the next attempt it breaks off once.

    The client keeps a file's bytes in pieces of 10 MiB, as long as its process lives.
    """
    filler = {"filler": "x" * 350_000}
    lines = (json.dumps({"source": a, "target": b, **filler}) for a, b in ROWS * 4)
    rows = "\n".join(lines).encode()
    hub.repository("models", MODEL).commit(model_files)
    dataset = hub.repository("datasets", DATASET)
    card = b"---\nconfigs:\n- config_name: swapped\n  data_files: train.jsonl\n---\n"
    first = dataset.commit({"train.jsonl": rows, "README.md": card})
    hub.breaks["train.jsonl"] = 0
    error = command("run", "hub.yaml", "--until", "preprocess", code=1, **PATIENCE)
    run = re.search(r"(hub-\w+) started", error)[1]
    told = command.attempt(run, "preprocess") / "error.json"
    assert f"the download of dataset '{DATASET}' at {first} broke off: Remote" in told.read_text()
    dataset.commit({"train.jsonl": jsonl(ROWS)})
    hub.requests.clear()
    hub.breaks["train.jsonl"] = 11 << 20

    def mend(path):
        if sum(asked == ("GET", path) for asked in downloads(hub)) > 1:
            hub.breaks.clear()

    hub.on_file = mend
    done = command.json("retry", run, **PATIENCE)

    assert done["state"] == "completed"
    assert asked_revisions(hub, DATASET) == {first}
    ranges = [asked for _, path, asked in hub.requests if path.endswith("train.jsonl") and asked]
    assert ranges == [f"bytes={10 << 20}-"]
