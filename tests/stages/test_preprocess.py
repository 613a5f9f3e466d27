"""preprocess on real files: good ones, broken ones, grouped, held out, changed under it."""

import csv
import json

import pytest
from stage_kinds import preprocess

from redco_flow.records import digest_file
from redco_flow.spec.load import settings_of
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.guard import DataChanged
from redco_flow.stages.data.rows import BadRows, NoRows
from redco_flow.stages.data.text_lines import MAX_LINE_BYTES

ROWS = [(f"name {i % 20}, area {i % 3}", f"number {i} is called {i % 20}.") for i in range(60)]
LENGTHS = {"max_source_length": 16, "max_target_length": 16}


def settings(data, **more):
    tokenizer = {"train": {"vocab_size": 300, "type": "bpe"}}
    return {"data": {"tokenizer": tokenizer, **data}, **LENGTHS, **more}


def preprocessed(bench, data, **more):
    return DatasetArtifact(bench.run(preprocess, settings(data, **more))["dataset"].path)


def as_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("source", "target"), *rows])


def as_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"source": [s for s, _ in rows], "target": [t for _, t in rows]}
    pq.write_table(pa.table(columns), path)


def as_arrow(path, rows):
    import pyarrow as pa

    table = pa.table({"source": [s for s, _ in rows], "target": [t for _, t in rows]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def as_jsonl(path, rows):
    path.write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in rows))


FORMATS = {".csv": as_csv, ".jsonl": as_jsonl, ".parquet": as_parquet, ".arrow": as_arrow}


@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_gives_every_row_once_with_its_text_and_ids(bench, tmp_path, ending):
    path = tmp_path / f"train{ending}"
    FORMATS[ending](path, ROWS)

    dataset = preprocessed(bench, {"train": str(path), "validation_fraction": 0.2})

    rows = [row for split in dataset.summary.splits for row in dataset.split(split)]
    assert sorted((row["source"], row["references"][0]) for row in rows) == sorted(ROWS)
    assert all(row["source_ids"][-1] == dataset.tokenizer.eos_id for row in rows)
    ids = [row["target_ids"][:-1] for row in rows]
    assert dataset.tokenizer.decode_batch(ids) == [row["references"][0] for row in rows]


def test_a_damaged_dataset_is_made_again_in_the_work_directory_that_shares_its_files(
    bench, tmp_path
):
    """Fault 41: a published file and the block it was made of may be one file."""
    as_csv(tmp_path / "train.csv", ROWS)
    given = settings({"train": str(tmp_path / "train.csv")})
    before = bench.run(preprocess, given, work="preprocess")["dataset"]
    for path in sorted(path for path in before.path.rglob("*") if path.is_file()):
        path.chmod(0o644)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert len(bench.store.damage(before.id)) == len(before.manifest["files"])

    again = bench.run(preprocess, given, work="preprocess")["dataset"]

    assert again.id == before.id
    assert bench.store.verify(before.id) == []


def test_a_directory_gives_the_splits_that_its_files_are_named_for(bench, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    as_csv(folder / "train-0.csv", ROWS[:10])
    as_csv(folder / "train-1.csv", ROWS[10:30])
    as_jsonl(folder / "dev.jsonl", ROWS[30:40])
    as_parquet(folder / "test.parquet", ROWS[40:])

    dataset = preprocessed(bench, {"dataset": str(folder)})

    counts = {split: count["rows"] for split, count in dataset.summary.splits.items()}
    assert counts == {"train": 30, "validation": 10, "test": 20}
    assert dataset.split("train")[0]["row_id"] == "train-0.csv:2"


def test_a_list_of_files_is_read_in_its_order_with_names_that_differ(bench, tmp_path):
    for number, day in enumerate(("monday", "tuesday")):
        (tmp_path / day).mkdir()
        as_jsonl(tmp_path / day / "log.jsonl", ROWS[10 * number : 10 * number + 10])
    files = [str(tmp_path / day / "log.jsonl") for day in ("tuesday", "monday")]

    dataset = preprocessed(bench, {"train": files, "validation_fraction": 0.0})

    rows = [(row["row_id"], row["source"]) for row in dataset.split("train")]
    expected = [
        (f"{day}/log.jsonl:{line + 1}", ROWS[start + line][0])
        for day, start in (("tuesday", 10), ("monday", 0))
        for line in range(10)
    ]
    assert rows == expected


def test_a_python_module_gives_rows_and_its_files_are_the_data(bench, tmp_path, monkeypatch):
    (tmp_path / "my_corpus.py").write_text(
        "from pathlib import Path\n"
        f"def files(): return [Path({str(tmp_path / 'raw.txt')!r})]\n"
        "def rows(files):\n"
        "    for line in files[0].read_text().splitlines():\n"
        "        yield {'source': line, 'target': line.upper()}\n"
        "def identity(): return {'version': 3}\n"
    )
    (tmp_path / "raw.txt").write_text("\n".join(f"line {i}" for i in range(20)))
    monkeypatch.syspath_prepend(str(tmp_path))
    given = settings({"dataset": "python:my_corpus", "validation_fraction": 0.0})
    config = preprocess.Config.from_json(given)

    dataset = DatasetArtifact(bench.run(preprocess, given)["dataset"].path)

    assert len(dataset.split("train")) == 20
    assert preprocess.data_files(config) == [tmp_path / "raw.txt"]
    assert preprocess.data_identity(config) == {"python:my_corpus": {"version": 3}}
    assert preprocess.code_modules(config) == [
        "redco_flow.recipes.text_to_text.config",
        "my_corpus",
    ]


def test_equal_sources_are_held_out_together_and_reordering_moves_none(bench, tmp_path):
    as_jsonl(tmp_path / "a.jsonl", ROWS)
    as_jsonl(tmp_path / "b.jsonl", ROWS[::-1])
    fractions = {"validation_fraction": 0.2, "test_fraction": 0.2}

    first = preprocessed(bench, {"train": str(tmp_path / "a.jsonl"), **fractions})
    second = preprocessed(bench, {"train": str(tmp_path / "b.jsonl"), **fractions})

    def sources(dataset):
        splits = dataset.summary.splits
        return {split: {row["source"] for row in dataset.split(split)} for split in splits}

    assert sources(first) == sources(second)
    assert set(sources(first)) == {"train", "validation", "test"}
    assert sum(map(len, sources(first).values())) == len({source for source, _ in ROWS})


def test_grouped_evaluation_splits_have_each_source_once_with_all_its_references(bench, tmp_path):
    rows = [("a", "x"), ("b", "y"), ("a", "z"), ("a", "x")]
    as_csv(tmp_path / "train.csv", rows)
    as_csv(tmp_path / "test.csv", rows)
    files = {split: str(tmp_path / f"{split}.csv") for split in ("train", "test")}

    dataset = preprocessed(bench, {**files, "group_by_source": True, "validation_fraction": 0.0})

    test = [(row["row_id"], row["source"], row["references"]) for row in dataset.split("test")]
    assert test == [("test.csv:2", "a", ["x", "z"]), ("test.csv:3", "b", ["y"])]
    assert len(dataset.split("train")) == 4
    assert dataset.summary.most_frequent_target == {"text": "x", "count": 2, "among": 4}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_equal_input_gives_a_byte_identical_dataset_whatever_the_workers(bench, tmp_path, kind):
    as_jsonl(tmp_path / "train.jsonl", ROWS)
    data = {"train": str(tmp_path / "train.jsonl"), "tokenizer": {"train": {"type": kind}}}

    first = bench.run(preprocess, {**LENGTHS, "data": data})["dataset"]
    second = bench.run(preprocess, {**LENGTHS, "data": data, "num_workers": 2})["dataset"]

    assert first.id == second.id


def test_rows_are_the_same_encoded_while_read_and_encoded_after_training_the_tokenizer(
    bench, tmp_path
):
    as_jsonl(tmp_path / "train.jsonl", ROWS * 20)
    as_jsonl(tmp_path / "test.jsonl", ROWS)
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    data = {**files, "group_by_source": True, "source_prefix": "say: ", "validation_fraction": 0.2}

    trained = preprocessed(bench, data)
    tokenizer = {"name_or_path": str(trained.path / "tokenizer")}
    given = preprocessed(bench, {**data, "tokenizer": tokenizer})

    assert given.summary.splits == trained.summary.splits
    assert given.summary.most_frequent_target == trained.summary.most_frequent_target
    for split in ("train", "validation", "test"):
        files = [dataset.path / f"{split}-00000.arrow" for dataset in (given, trained)]
        assert digest_file(files[0]) == digest_file(files[1])


def test_white_space_around_a_jsonl_row_is_no_fault_and_a_second_value_is_one(bench, tmp_path):
    path = tmp_path / "train.jsonl"
    row = GOOD.strip()
    path.write_bytes(b"".join((b" ", row, b" \r\n", row, b"\r\n\n", row, row, b"\n", row)))

    with pytest.raises(BadRows, match=r"(?s)1 bad row.*train\.jsonl:4: not JSON: Extra data"):
        preprocessed(bench, {"train": str(path), "validation_fraction": 0.0})


def test_workers_and_the_models_size_are_no_part_of_the_datasets_fingerprint(tmp_path):
    as_jsonl(tmp_path / "train.jsonl", ROWS)
    given = settings({"train": str(tmp_path / "train.jsonl")})
    model = {"dtype": "bfloat16", "config": {"d_model": 8}}

    plain = preprocess.Config.from_json(given)
    other = preprocess.Config.from_json({**given, "num_workers": 7, "model": model})

    assert settings_of(plain) == settings_of(other)


def test_too_long_texts_are_cut_before_the_end_token_and_counted(bench, tmp_path):
    long = " ".join(f"word{i}" for i in range(100))
    as_jsonl(tmp_path / "train.jsonl", [*ROWS, (long, long)])

    dataset = preprocessed(
        bench, {"train": str(tmp_path / "train.jsonl"), "validation_fraction": 0.0}
    )

    cut = dataset.split("train")[len(ROWS)]
    assert len(cut["source_ids"]) == len(cut["target_ids"]) == 16
    assert cut["source_ids"][-1] == dataset.tokenizer.eos_id
    counts = dataset.summary.splits["train"]
    assert counts["cut_sources"] >= 1
    assert counts["longest_source"] == 16


def test_the_dataset_opens_with_datasets_and_its_tokenizer_with_transformers(bench, tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer

    as_jsonl(tmp_path / "train.jsonl", ROWS)
    dataset = preprocessed(bench, {"train": str(tmp_path / "train.jsonl")})

    rows = Dataset.from_file(str(dataset.path / "train-00000.arrow"))
    tokenizer = AutoTokenizer.from_pretrained(dataset.path / "tokenizer")

    assert rows.column_names == ["row_id", "source", "references", "source_ids", "target_ids"]
    assert tokenizer(rows[0]["source"])["input_ids"] == rows[0]["source_ids"]
    text = "it says </s> and <pad>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]).strip() == text


GOOD = json.dumps({"source": "a", "target": "b"}).encode() + b"\n"
BROKEN = {
    "truncated": (GOOD * 3 + GOOD[:12], 4, "not JSON.*truncated"),
    "nul": (GOOD + GOOD.replace(b"a", b"\0") + GOOD, 2, "NUL byte"),
    "escaped nul": (GOOD + GOOD.replace(b'"a"', b'"\\u0000"') + GOOD, 2, "NUL byte"),
    "not utf-8": (GOOD + GOOD.replace(b"a", b"\xff") + GOOD, 2, "not UTF-8"),
    "50 MB line": (GOOD + b'{"source": "' + b"a" * 52_428_800 + b'"}\n' + GOOD, 2, "too long"),
    "an array": (GOOD + b"[1]\n" + GOOD, 2, "not a JSON object"),
    "no field": (GOOD + b'{"source": "a"}\n' + GOOD, 2, "no field 'target'"),
    "a number": (GOOD + GOOD.replace(b'"a"', b"1") + GOOD, 2, "not text"),
    "empty text": (GOOD + GOOD.replace(b"a", b" ") + GOOD, 2, "is empty"),
    "half a surrogate": (GOOD + GOOD.replace(b'"a"', b'"\\ud800"') + GOOD, 2, "surrogate"),
    "depth": (GOOD + b"[" * 100_000 + b"\n" + GOOD, 2, "not JSON"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_jsonl_row_is_an_error_with_file_and_line(bench, tmp_path, fault):
    """Fault 24: the error names file and line, or the rows are skipped and counted where the
    pipeline allows it.
    """
    content, line, message = BROKEN[fault]
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)

    with pytest.raises(BadRows, match=rf"(?s)1 bad row.*train\.jsonl:{line}: .*{message}"):
        preprocessed(bench, {"train": str(path), "validation_fraction": 0.0})


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_jsonl_row_is_skipped_and_counted_where_the_pipeline_allows_it(
    bench, tmp_path, fault
):
    """Fault 24: the error names file and line, or the rows are skipped and counted where the
    pipeline allows it.
    """
    content, _, _ = BROKEN[fault]
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    data = {"train": str(path), "validation_fraction": 0.0, "on_bad_row": "skip"}

    dataset = preprocessed(bench, data)

    assert sum(dataset.summary.skipped_rows.values()) == 1
    assert dataset.summary.splits["train"]["rows"] == content.count(GOOD)


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(bench, tmp_path, ending):
    """Fault 24: the error names file and line, or the rows are skipped and counted where the
    pipeline allows it.
    """
    path = tmp_path / f"train{ending}"
    FORMATS[ending](path, ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    dataset = preprocessed(bench, {"train": str(path), "validation_fraction": 0.0})

    assert dataset.split("train")[0]["source"] == ROWS[0][0]


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_an_empty_file_is_an_error_that_names_it(bench, tmp_path, ending):
    """Fault 24: the error names file and line, or the rows are skipped and counted where the
    pipeline allows it.
    """
    path = tmp_path / f"train{ending}"
    path.write_bytes(b"")

    with pytest.raises(NoRows, match=rf"train{ending}: no usable row.*empty"):
        preprocessed(bench, {"train": str(path)})


def test_an_empty_test_file_is_an_error_too(bench, tmp_path):
    """Fault 24: the error names file and line, or the rows are skipped and counted where the
    pipeline allows it.
    """
    as_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "test.jsonl").write_bytes(b"")
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}

    with pytest.raises(NoRows, match=r"test\.jsonl: no usable row for split 'test'"):
        preprocessed(bench, files)


def test_the_end_of_a_source_is_kept_where_the_stage_says_so(bench, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"source": "one two three four five six", "target": "b"}\n')
    data = {"train": str(path), "validation_fraction": 0.0, "source_suffix": " seven"}
    shared = {"max_source_length": 4}

    texts = {}
    for side in ("right", "left"):
        made = preprocessed(bench, data, truncation_side=side, **shared)
        (row,) = made.split("train")
        texts[side] = made.tokenizer.decode_batch([row["source_ids"].tolist()])[0]

    assert texts["right"].startswith("o")
    assert not texts["left"].startswith("o")
    assert all(text.endswith(" seven") for text in texts.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "chat", "data": {"train": "a.jsonl"}}, "recipe 'chat' cuts no source texts"),
        ({"recipe": "preference", "data": {"train": "a.jsonl"}}, "recipe 'preference' cuts no"),
        (
            {"recipe": "language_modeling", "data": {"train": "a.jsonl", "text_key": "text"}},
            "plain texts have no source",
        ),
    ],
)
def test_truncation_side_is_refused_where_it_would_change_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        preprocess.Config.from_json(settings | {"truncation_side": "left"})


def test_all_bad_rows_are_counted_and_the_first_twenty_shown(bench, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + b"nonsense\n" * 30)

    with pytest.raises(BadRows, match="30 bad rows") as caught:
        preprocessed(bench, {"train": str(path)})

    message = str(caught.value)
    first_line = message.splitlines()[0]
    assert first_line.startswith("30 bad rows in the data (30 × not JSON), the first ")
    assert "train.jsonl:2: not JSON: Expecting value" in first_line
    assert message.count("train.jsonl:") == 20
    assert "train.jsonl:21:" in message
    assert "… and 10 more" in message
    assert "on_bad_row: skip" in message


CSV_FAULTS = {
    "too few fields": (b"source,target\na,b\na\na,b\n", 3, "wrong number of fields: 1"),
    "too many fields": (b"source,target\na,b\na,b,c\n", 3, "the header has 2: source, target"),
    "open quote": (b'source,target\na,b\n"a,b\na,b\n', 3, "never closed"),
    "text after quotes": (b'source,target\na,b\n"a" c,b\n', 3, "quoting: none"),
    "old Mac": (b"source,target\ra,b\r", 1, "convert the file"),
    "nul": (b"source,target\na,b\na\0,b\n", 3, "NUL byte"),
    "not utf-8": (b"source,target\na,b\n\xff,b\n", 3, "not UTF-8"),
    "overlong": (b"source,target\na,b\n" + b"a" * (MAX_LINE_BYTES + 9) + b",b\n", 3, "too long"),
    "no column": (b"source,answer\na,b\n", 2, "no field 'target': its fields are source, answer"),
}


@pytest.mark.parametrize("fault", CSV_FAULTS)
def test_a_broken_csv_row_is_an_error_with_file_and_line(bench, tmp_path, fault):
    """Fault 24: the error names file and line, or the rows are skipped and counted where the
    pipeline allows it.
    """
    content, line, message = CSV_FAULTS[fault]
    path = tmp_path / "train.csv"
    path.write_bytes(content)

    with pytest.raises(BadRows, match=rf"(?s)train\.csv:{line}: .*{message}"):
        preprocessed(bench, {"train": str(path)})


def test_a_quoted_csv_field_may_span_lines(bench, tmp_path):
    (tmp_path / "train.csv").write_text('source,target\n"a\nb",c\nd,e\n')

    dataset = preprocessed(
        bench, {"train": str(tmp_path / "train.csv"), "validation_fraction": 0.0}
    )

    rows = [(row["row_id"], row["source"]) for row in dataset.split("train")]
    assert rows == [("train.csv:2", "a\nb"), ("train.csv:4", "d")]


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_file_that_is_not_what_its_ending_says_is_an_error_that_names_it(bench, tmp_path, ending):
    (tmp_path / f"train{ending}").write_bytes(b"PAR1 nonsense")

    with pytest.raises(ValueError, match=rf"train{ending}: not an? \w+ file"):
        preprocessed(bench, {"train": str(tmp_path / f"train{ending}")})


def test_a_data_file_that_changed_since_the_plan_is_a_fingerprint_error(bench, tmp_path):
    """Engine case 32: the stage fails with an error."""
    path = tmp_path / "train.jsonl"
    as_jsonl(path, ROWS)
    planned = {"ingredients": {"data": {path.name: digest_file(path)}}}
    given = settings({"train": str(path)})

    bench.run(preprocess, given, provenance=planned)
    as_jsonl(path, ROWS[:-1])

    with pytest.raises(DataChanged, match=r"train\.jsonl: changed since this run was planned"):
        bench.run(preprocess, given, provenance=planned)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "names no training data"),
        ({"dataset": "x", "train": "/x.csv"}, "give one or the other"),
        ({"dataset": "no/such.csv"}, "there is no file or directory 'no/such.csv'"),
    ],
    ids=["none", "both", "missing"],
)
def test_data_without_exactly_one_source_is_a_config_error(data, message):
    with pytest.raises(ValueError, match=message):
        preprocess.Config.from_json({"data": data})


def test_rows_of_a_hub_dataset_are_its_columns_in_order():
    from datasets import Dataset

    from redco_flow.stages.data.hub_rows import hub_rows

    rows = hub_rows(Dataset.from_dict({"document": ["a", "b"], "id": [1, 2]}))

    assert [(row.line, row.fields) for row in rows] == [
        (1, {"document": "a", "id": 1}),
        (2, {"document": "b", "id": 2}),
    ]


def test_a_hub_dataset_is_identified_by_its_commit_and_subset():
    """Fault 49. A name that is at no commit, and so may change, has no identity."""
    from redco_flow.errors import UsageError
    from redco_flow.orchestrate.run.ingredients import hub_identities
    from redco_flow.stages.data.hub_references import hub_references

    def identities(**data):
        data = {"dataset": "EdinburghNLP/xsum", "tokenizer": {"train": {"vocab_size": 512}}, **data}
        return hub_identities(hub_references(preprocess.Config.from_json({"data": data})))

    commit = "0123456789abcdef" * 2 + "01234567"
    name = "hub:datasets/EdinburghNLP/xsum"
    assert identities(revision=commit) == {name: {"commit": commit}}
    assert identities(revision=commit, subset="a") == {name: {"commit": commit, "subset": "a"}}
    with pytest.raises(UsageError, match="is at no commit"):
        identities(revision="main")


def test_a_stage_without_any_tokenizer_or_with_two_is_told_how_to_get_one(tmp_path):
    train, tokenizer = str(tmp_path / "train.jsonl"), {"train": {"vocab_size": 280}}
    bare, own = (
        preprocess.Config.from_json({"data": {"train": train} | more})
        for more in ({}, {"tokenizer": tokenizer})
    )

    (none,) = preprocess.input_problems(bare, ())
    (two,) = preprocess.input_problems(own, ("tokenizer_of",))

    assert "there is no tokenizer: give data.tokenizer" in none[1]
    assert "leave one of the two out" in two[1]
    assert not list(preprocess.input_problems(bare, ("tokenizer_of",)))
    assert not list(preprocess.input_problems(own, ()))


def test_max_examples_limits_what_is_read_of_each_split(bench, tmp_path):
    as_jsonl(tmp_path / "train.jsonl", ROWS)
    as_jsonl(tmp_path / "test.jsonl", ROWS)
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}

    dataset = preprocessed(bench, {**files, "max_examples": 7, "validation_fraction": 0.0})

    counts = {split: count["rows"] for split, count in dataset.summary.splits.items()}
    assert counts == {"train": 7, "test": 7}


def test_plans_read_the_stage_without_any_heavy_library():
    import subprocess
    import sys

    heavy = "{'jax', 'datasets', 'transformers', 'tokenizers', 'pyarrow', 'numpy'}"
    code = (
        "import sys\n"
        "from redco_flow.stages.preprocess import config as preprocess\n"
        "from redco_flow.stages.train import config as train\n"
        "import redco_flow.stages.predict.config, redco_flow.stages.evaluate.config\n"
        "import redco_flow.stages.compare.config, redco_flow.stages.promote.config\n"
        "data = {'dataset': 'some/hub', 'tokenizer': {'train': {'vocab_size': 512}}}\n"
        "c = preprocess.Config.from_json({'data': data})\n"
        "preprocess.code_modules(c), preprocess.data_files(c), preprocess.data_identity(c)\n"
        "train.code_modules(train.Config(keep={'best': ['rouge2']}))\n"
        f"found = {heavy} & set(sys.modules); assert not found, found"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
