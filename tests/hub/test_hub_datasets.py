"""Which commit and which rows of a dataset a worker reads, with the hub and without it."""

import gzip
import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from redco_flow.stages.data.row_files import read_file
from tests.hub.conftest import DATASET, OFFLINE

pytestmark = pytest.mark.slow

HEAD = """
import json, shutil, sys
import huggingface_hub
from redco_flow import hub
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.data.source import open_sources

def rows(**data):
    return [
        [source.split, source.name, row.line, dict(row.fields)]
        for source in open_sources(DataSection.from_json(data))
        for row in source.rows()
    ]

name, *words = sys.argv[1:]
"""


@pytest.fixture
def python(command):
    """Runs a script with the local hub; returns what it prints as JSON, and its errors."""

    def run(script, *words, **variables):
        done = subprocess.run(
            [sys.executable, "-c", HEAD + script, DATASET, *words],
            env={**os.environ, **command.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


def parquet(rows, schema=None):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema), sink)
    return sink.getvalue()


def zstd(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def test_without_the_hub_the_asked_commit_is_read_or_none(hub, python):
    """Fault 49. What `datasets` itself takes there is whatever commit it prepared last."""
    repository = hub.repository("datasets", DATASET)
    row = {"source": "a", "target": "b"}
    lines = json.dumps(row).encode() + b"\n"
    commits = [
        repository.commit({"train.jsonl": lines * 3}),
        repository.commit({"train.parquet": parquet([row] * 5)}),
        repository.commit({"train.jsonl": lines * 7}),
        repository.commit({"train.jsonl": lines * 9}),
    ]
    online = """
for commit in words[:2]:
    rows(dataset=name, revision=commit)
huggingface_hub.snapshot_download(name, repo_type="dataset", revision=words[2])
print("null")
"""
    offline = """
counts = [len(rows(dataset=name, revision=commit)) for commit in words[:3]]
try:
    rows(dataset=name, revision=words[3])
except hub.HubUnreachable as error:
    print(json.dumps([counts, str(error)]))
"""

    python(online, *commits)
    (counts, error), _ = python(offline, *commits, **OFFLINE)

    assert counts == [3, 5, 7]  # downloaded, prepared, and downloaded whole by `hf download`
    assert f"dataset '{DATASET}' at {commits[3]} is not in the cache" in error
    assert f"`hf download --repo-type dataset {DATASET} --revision {commits[3]}` fills it" in error


CELLS = ["null", "NA", "nan", "None", "007", "1.0", "true", "", "2020-01-01", 'say "x"']
OBJECTS = [
    {"id": "007", "text": cell, "more": {"a": 1} if cell else {"b": "x"}} for cell in CELLS
] + [{"id": 7, "text": None}]
FILES = {
    "csv": b"id,text\n" + b"".join(f'007,"{c}"\n'.encode() for c in CELLS[:-1]),
    "tsv": b"id\ttext\n" + b"".join(f"007\t{c}\n".encode() for c in CELLS),
    "jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in OBJECTS),
    "json": json.dumps(OBJECTS, indent=1).encode(),
    "parquet": parquet([{"id": "007", "text": cell} for cell in CELLS] + [{"text": None}]),
}
FILES |= {
    "csv.gz": gzip.compress(FILES["csv"]),
    "jsonl.zst": zstd(FILES["jsonl"]),
    "json.gz": gzip.compress(FILES["json"]),
}


def test_a_file_has_the_same_rows_on_the_hub_and_here(hub, python, tmp_path):
    """`datasets`' own readers make `NA` missing, `007` a number, and dates in JSON timestamps."""
    repository = hub.repository("datasets", DATASET)
    commits = [repository.commit({f"train.{ending}": FILES[ending]}) for ending in FILES]
    card = b"---\nconfigs:\n- {config_name: x, data_files: train.csv, thousands: '.'}\n---\n"
    of_option = repository.commit({"train.csv": FILES["csv"], "README.md": card})
    script = "print(json.dumps([rows(dataset=name, revision=commit) for commit in words]))"

    (*found, by_datasets), log = python(script, *commits, of_option)

    assert by_datasets[0][3] == {"id": 7, "text": None}
    assert "the package `datasets` reads it, which makes NA and null in CSV missing values" in log

    for ending, on_hub in zip(FILES, found, strict=True):
        path = tmp_path / f"train.{ending}"
        path.write_bytes(FILES[ending])
        here = [[row.line, dict(row.fields)] for row in read_file(path)]
        assert len(here) >= len(CELLS) - 1
        assert [row[2:] for row in on_hub] == here, ending


CARD = b"""---
configs:
- config_name: pairs
  default: true
  data_files:
  - {split: train, path: train.csv}
  - {split: validation_matched, path: matched.csv}
  - {split: validation_mismatched, path: mismatched.csv}
  - {split: test, path: test.csv}
  delimiter: ";"
- config_name: others
  data_files: others.jsonl
dataset_info:
  config_name: pairs
  features:
  - {name: text, dtype: string}
  - {name: label, dtype: {class_label: {names: {"0": no, "1": yes}}}}
---
"""
REPOSITORY = {
    "README.md": CARD,
    "train.csv": b"text;label\na;0\nb;1\n",
    "matched.csv": b"text;label\nc;1\n",
    "mismatched.csv": b"text;label\nd;0\n",
    "test.csv": b"text;label\ne;-1\nf;-1\n",
    "others.jsonl": b'{"text": "g"}\n',
}


def test_splits_are_chosen_by_a_key_and_what_is_left_out_is_reported(hub, python, command):
    """Names as in MNLI, labels of the test split -1 as in GLUE; the repository's own delimiter."""
    commit = hub.repository("datasets", DATASET).commit(REPOSITORY)
    script = """
data = {"dataset": name, "revision": words[0], "target_key": "label", "source_key": "text"}
chosen = {"splits": {"validation": "validation_matched", "test": "none"}}
try:
    rows(**data, splits={"validation": "dev"})
except ValueError as error:
    wrong = str(error)
print(json.dumps([rows(**data), rows(**data, **chosen), rows(**data, subset="others"), wrong]))
"""

    (all_read, chosen, others, wrong), log = python(script, commit)

    train = [["train", "train.csv", 2, {"text": "a", "label": 0}]]
    train += [["train", "train.csv", 3, {"text": "b", "label": 1}]]
    assert all_read == train
    assert chosen == [*train, ["validation", "matched.csv", 2, {"text": "c", "label": 1}]]
    assert others == [["train", "others.jsonl", 1, {"text": "g"}]]
    assert "'data.splits.validation': there is no split 'dev'; its splits are test, train" in wrong
    assert f"dataset {DATASET}: validation_matched, validation_mismatched are not read; data" in log
    assert f"{DATASET}: split 'test' is left out: all its labels are -1 or null" in log

    pipeline = command.folder / "hub.yaml"
    pipeline.write_text(
        "name: hub\nrecipe: classification\n"
        f"data: {{dataset: {DATASET}, source_key: text, target_key: label, "
        "tokenizer: {train: {vocab_size: 300}}}\nstages: {preprocess: {}}\n"
    )
    note = f"note: dataset {DATASET}: validation_matched, validation_mismatched are not read"
    assert note in command("plan", "hub.yaml")
    named = command("plan", "hub.yaml", "data.splits.validation=validation_matched")
    assert f"{DATASET}: validation_mismatched is not read (data.splits)\n" in named
    error = command("plan", "hub.yaml", "data.splits.validation=dev", code=2)
    assert "hub.yaml:3:8: 'data.dataset': " in error
    assert "there is no split 'dev'; its splits are" in error


def test_a_dataset_that_names_files_of_this_machine_is_refused(hub, python, tmp_path):
    private = tmp_path / "private.csv"
    private.write_text("source,target\na,b\n")
    repository = hub.repository("datasets", DATASET)
    card = "---\nconfigs:\n- {config_name: x, data_files: %s}\n---\n"
    names = (str(private), "../" * 20 + str(private)[1:])
    commits = [repository.commit({"README.md": (card % name).encode()}) for name in names]
    script = """
errors = []
for commit in words:
    try:
        rows(dataset=name, revision=commit)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
print(json.dumps(errors))
"""

    errors, _ = python(script, *commits)

    assert len(errors) == 2
    assert all("names a file outside of its repository" in error for error in errors), errors


def test_files_of_splits_that_are_left_out_are_not_downloaded(hub, python):
    files = {f"{split}.jsonl": b'{"source": "a"}\n' for split in ("train", "validation", "test")}
    hub.repository("datasets", DATASET).commit(files)
    splits = json.dumps({"validation": "none", "test": "validation"})

    found, _ = python("print(json.dumps(rows(dataset=name, splits=json.loads(words[0]))))", splits)

    assert [(split, name) for split, name, *_ in found] == [
        ("train", "train.jsonl"),
        ("test", "validation.jsonl"),
    ]
    downloads = {path.rpartition("/")[2] for path in hub.asked if path.endswith(".jsonl")}
    assert downloads == {"train.jsonl", "validation.jsonl"}
