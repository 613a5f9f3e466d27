"""Mistakes in data files, told by their first rows before anything starts."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline

GOOD = '{"source": "a b", "target": "b a"}\n'


@pytest.fixture
def problems(tmp_path):
    """Load a pipeline over files of the given contents; return what is wrong with it."""

    def problems_of(files, **data):
        lines = [f"  {key}: {value}" for key, value in data.items()]
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            if "/" not in name:
                lines.append(f"  {path.stem}: {path}")
        text = "name: heads\nmodel: {name_or_path: any/model}\ndata:\n" + "\n".join(lines)
        pipeline = tmp_path / "pipeline.yaml"
        pipeline.write_text(f"{text}\nstages:\n  preprocess: {{}}\n")
        try:
            load_pipeline(pipeline, looks_into_data=True)
        except ConfigError as error:
            return [str(problem).replace(f"{tmp_path}/", "") for problem in error.problems]
        return []

    return problems_of


def jsonl(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


CONVERSATION = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
FAULTS = {
    "a missing column": (
        "train.jsonl",
        jsonl(*[{"document": "a", "target": "b"}] * 3),
        "train.jsonl:1: no field 'source': its fields are document, target (so are 2 more of the "
        "first 3 rows)",
    ),
    "a missing column of a table": (
        "train.csv",
        b"source,summary\na,b\n",
        "train.csv:2: no field 'target': its fields are source, summary",
    ),
    "an empty file": ("train.jsonl", b"", "train.jsonl: no rows in it"),
    "only a header": ("train.csv", b"source,target\n", "train.csv: no rows in it"),
    "bad encoding": (
        "train.jsonl",
        GOOD.encode() + '{"source": "é", "target": "b"}\n'.encode("latin-1"),
        "train.jsonl:2: not UTF-8: byte 13 of the line; 1 of the first 2 rows is bad: fix them, or "
        "leave them out and count them with data.on_bad_row: skip",
    ),
    "a conversation instead of text": (
        "train.jsonl",
        jsonl({"source": CONVERSATION, "target": "b"}),
        "train.jsonl:1: field 'source' is not text: it is a conversation of 2 turns; write what a "
        "model is given and what it is to answer into fields of their own",
    ),
    "no JSON": (
        "train.jsonl",
        b"nonsense\n",
        "train.jsonl:1: not JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    "an unknown ending": (
        "train.xlsx",
        b"PK",
        "train.xlsx: unknown ending '.xlsx'; known: .arrow, .csv, .json, .jsonl, .ndjson, "
        ".parquet, .tsv; .csv, .tsv, .json, .jsonl, .ndjson also with .gz or .zst behind.",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), FAULTS.values(), ids=FAULTS)
def test_a_mistake_in_the_first_rows_is_told_with_its_file_row_and_column(
    problems, name, content, message
):
    """Fault 24: the error names file and line, or the rows are skipped and counted where the
    pipeline allows it.
    """
    assert problems({name: content}) == [f"pipeline.yaml:4:3: 'data.train': {message}"]


def test_mistakes_of_all_files_are_told_at_once(problems):
    found = problems({"train.csv": b"source\na\n", "test.jsonl": b"", "validation.jsonl": b"[1]\n"})

    assert [problem.partition("': ")[0] for problem in found] == [
        "pipeline.yaml:4:3: 'data.train",
        "pipeline.yaml:5:3: 'data.test",
        "pipeline.yaml:6:3: 'data.validation",
    ]


def test_good_data_are_no_problem_and_only_their_head_is_read(problems):
    content = GOOD.encode() * 100 + b"nonsense\n"

    assert problems({"train.jsonl": content}) == []


def test_bad_rows_that_are_to_be_skipped_are_no_problem(problems):
    assert problems({"train.jsonl": b"x\n" + GOOD.encode()}, on_bad_row="skip") == []


def test_a_column_that_no_row_has_is_a_problem_though_bad_rows_are_skipped(problems):
    found = problems({"train.jsonl": GOOD.encode() * 2}, on_bad_row="skip", source_key="text")

    assert found == [
        "pipeline.yaml:6:3: 'data.train': train.jsonl:1: no field 'text': its fields are source, "
        "target (so are 1 more of the first 2 rows)"
    ]


def test_one_empty_file_of_a_directory_is_no_problem(problems, tmp_path):
    files = {"rows/train-1.jsonl": GOOD.encode(), "rows/train-2.jsonl": b""}

    assert problems(files, dataset=tmp_path / "rows") == []
    files["rows/train-1.jsonl"] = b""
    assert problems(files, dataset=tmp_path / "rows") == [
        "pipeline.yaml:4:3: 'data.dataset': rows/train-1.jsonl, rows/train-2.jsonl: no rows in it"
    ]


def test_fractions_that_leave_no_row_to_train_on_are_a_problem_where_they_hold_rows_out(
    problems, tmp_path
):
    files = {"rows/train.jsonl": GOOD.encode()}

    (problem,) = problems(files, dataset=tmp_path / "rows", test_fraction=0.95)
    assert problem.startswith("pipeline.yaml:5:3: 'data.test_fraction': ")
    files["rows/validation.jsonl"] = GOOD.encode()
    assert problems(files, dataset=tmp_path / "rows", test_fraction=0.95) == []


def write_parquet(path, table):
    pyarrow.parquet.write_table(table, path)


def write_stream(path, table):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


@pytest.mark.parametrize(
    ("name", "write"), [("train.parquet", write_parquet), ("train.arrow", write_stream)]
)
def test_the_columns_of_a_table_are_held_against_its_schema(problems, tmp_path, name, write):
    write(tmp_path / name, pa.table({"source": [["a"]], "targets": ["b"]}))

    found = problems({name: None})

    assert found[0].startswith(
        f"pipeline.yaml:4:3: 'data.train': {name}: field 'source' is not text: it is list<"
    )
    assert found[1:] == [
        f"pipeline.yaml:4:3: 'data.train': {name}: no field 'target'; did you mean 'targets'? "
        "Its fields are source, targets"
    ]


@pytest.mark.parametrize("name", ["train.parquet", "train.arrow"])
def test_a_file_that_is_no_table_is_told_with_its_name(problems, name):
    (found,) = problems({name: b"nonsense" * 100})

    assert found.startswith(f"pipeline.yaml:4:3: 'data.train': {name}: ")


def test_looking_into_text_files_imports_neither_pyarrow_nor_jax(tmp_path):
    (tmp_path / "train.jsonl").write_text(GOOD)
    script = (
        "import sys\n"
        "from redco_flow.stages.preprocess.config import Config, data_problems\n"
        f"data = {{'train': {str(tmp_path / 'train.jsonl')!r}}}\n"
        "assert not list(data_problems(Config.from_json({'data': data})))\n"
        "assert not {'pyarrow', 'jax', 'datasets', 'numpy'} & set(sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
