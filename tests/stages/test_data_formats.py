"""Files of every format are read as other programs write them: dialects, arrays, compression."""

import csv
import gzip
import io
import json
import logging
import re
import time

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_flow.engine.files import UnreadableFile
from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.raw_data import CsvDialect
from redco_flow.stages.data.compression import MAX_EXPANDED_BYTES
from redco_flow.stages.data.csv_rows import NO_DIALECT, Dialect
from redco_flow.stages.data.row_files import read_file
from redco_flow.stages.data.rows import BadRow, problem_of_field
from redco_flow.stages.data.source import open_sources, problem_of
from redco_flow.stages.preprocess.heads import head_problems

QUOTES = (
    'sentence\tlabel\n"Yes it is\t1\nno quote here\t0\nhe said so"\t1\nplain one\t0\n'
    '"all of it"\t1\nan "inner" one\t0\n'
)


def rows_of(path, content, dialect=NO_DIALECT):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_file(path, dialect))


def fields_of(rows):
    return [dict(row.fields) for row in rows]


def compressed(content, ending):
    if ending == ".gz":
        return gzip.compress(content)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def test_quotes_in_tsv_are_a_part_of_the_texts(tmp_path):
    """As in the files of GLUE and Tatoeba, which are split at tabs and nowhere else."""
    rows = rows_of(tmp_path / "train.tsv", QUOTES)

    expected = [line.split("\t") for line in QUOTES.splitlines()[1:]]
    assert [list(row.fields.values()) for row in rows] == expected
    assert len(rows) == 6


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5), st.sampled_from(",;|"))
@settings(deadline=None, max_examples=50)
def test_what_pythons_csv_writes_is_read(tmp_path_factory, pairs, delimiter):
    pairs = [tuple(text.replace("\0", "").replace("\r", "") for text in pair) for pair in pairs]
    try:
        [one.encode() for pair in pairs for one in pair]
    except UnicodeEncodeError:
        return
    table = io.StringIO()
    csv.writer(table, delimiter=delimiter).writerows([("a", "b"), *pairs])
    given_by_user = CsvDialect(delimiter=delimiter, quoting="minimal")

    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    rows = rows_of(path, table.getvalue(), Dialect.of(given_by_user))

    assert [tuple(row.fields.values()) for row in rows] == pairs


DIALECTS = {
    "semicolons": ("train.csv", "a;b\n1,5;x\n", {"delimiter": ";"}, [{"a": "1,5", "b": "x"}]),
    "no quoting": ("train.csv", 'a,b\n"x,y\n', {"quoting": "none"}, [{"a": '"x', "b": "y"}]),
    "tsv with quotes": (
        "train.tsv",
        'a\tb\n"x\ty"\t"2 ""inches"""\n',
        {"quoting": "minimal"},
        [{"a": "x\ty", "b": '2 "inches"'}],
    ),
    "no header": ("train.csv", "x,y\n", {"column_names": ["a", "b"]}, [{"a": "x", "b": "y"}]),
    "two equal columns": (
        "train.csv",
        "a,a\nx,y\n",
        {"column_names": ["a", "b"], "skip_rows": 1},
        [{"a": "x", "b": "y"}],
    ),
    "lines above the header": ("train.csv", "made by x\n\na,b\n1,2\n", {"skip_rows": 2}, None),
    "compressed": ("train.csv.gz", gzip.compress(b"a|b\n1|2\n"), {"delimiter": "|"}, None),
}


@pytest.mark.parametrize("case", DIALECTS)
def test_a_dialect_can_be_given(tmp_path, case):
    name, content, given_by_user, expected = DIALECTS[case]

    rows = rows_of(tmp_path / name, content, Dialect.of(CsvDialect(**given_by_user)))

    assert fields_of(rows) == (expected or [{"a": "1", "b": "2"}])


def test_a_sign_of_another_dialect_is_reported_with_the_key(tmp_path, caplog):
    comma = QUOTES.replace("\t", ",")
    spanning, *_ = rows_of(tmp_path / "train.csv", comma)
    unclosed = rows_of(tmp_path / "open.csv", 'a,b\n"x,1\ny,2\n')[-1]
    with pytest.raises(UnreadableFile, match=r"equal\.csv:1: 2 columns are named 'a': rename them"):
        rows_of(tmp_path / "equal.csv", "a,b,a\n1,2,3\n")
    with caplog.at_level(logging.WARNING):
        quoted = rows_of(tmp_path / "quoted.tsv", 'a\tb\n"say ""x"""\t1\n"or ""y"""\t2\n')
    semicolons = rows_of(tmp_path / "semicolons.csv", "text;label\nx;1\na, b;1\n")
    reason, detail = problem_of_field(semicolons[0].fields, "text")

    assert isinstance(spanning, BadRow)
    assert str(spanning).startswith(f"{tmp_path}/train.csv:2: a quoted field spans rows: it cont")
    assert "data.csv: {quoting: none}" in spanning.detail
    assert "data.csv: {quoting: none}" in unclosed.detail
    assert fields_of(quoted)[0]["a"] == '"say ""x"""'
    assert [record.getMessage().count("{quoting: minimal}") for record in caplog.records] == [1]
    assert reason == "no field 'text'"
    assert (
        detail == "its fields are text;label (is ';' the delimiter? data.csv: {delimiter: \";\"})"
    )
    assert 'data.csv: {delimiter: ";"}' in semicolons[1].detail


def test_a_text_of_several_lines_in_csv_is_one_row(tmp_path):
    rows = rows_of(tmp_path / "train.csv", 'a,b\n"one\ntwo, or more\nthree",1\n')

    assert fields_of(rows) == [{"a": "one\ntwo, or more\nthree", "b": "1"}]


def load(folder, **data):
    """The settings of preprocessing, or the problems."""
    text = "".join(f"  {key}: {value}\n" for key, value in data.items())
    pipeline = folder / "pipeline.yaml"
    pipeline.write_text(
        f"name: x\nmodel: {{name_or_path: any/model}}\ndata:\n{text}stages: {{preprocess: {{}}}}\n"
    )
    try:
        loaded = load_pipeline(pipeline, looks_into_data=True)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return loaded.stages["preprocess"].settings["data"]


def test_the_dialect_and_the_splits_are_part_of_a_stages_settings(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("source;target\na;b\n")
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"source": "a", "target": "b"}\n')

    with_dialect = load(tmp_path, train=path, csv='{delimiter: ";"}')
    assert with_dialect["csv"]["delimiter"] == ";"
    assert not {"csv", "splits"} & load(tmp_path, train=lines).keys()
    wrong = {
        '{delimiter: ";;"}': "at most 1",
        "{quoting: maximal}": "'data.csv.quoting' must be",
        "{column_names: [a, a]}": "'column_names' has 'a' twice",
        "{sep: x}": "has no key 'sep'",
        "{skip_rows: -1}": "skip_rows",
    }
    for value, message in wrong.items():
        assert message in "".join(load(tmp_path, train=path, csv=value)), value
    assert "'data.csv' would change nothing" in load(tmp_path, train=lines, csv="{skip_rows: 1}")[0]
    mixture = f"{{a: {{dataset: {lines}, weight: 1}}}}"
    assert "'data.csv' would change" in load(tmp_path, mixture=mixture, csv="{skip_rows: 1}")[0]
    assert (
        "'data.splits' would change nothing" in load(tmp_path, train=lines, splits="{test: a}")[0]
    )


def test_splits_of_a_directory_are_chosen_by_name(tmp_path, caplog):
    folder = tmp_path / "rows"
    folder.mkdir()
    row = {"source": "a", "target": "b"}
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(row | {"target": split}) + "\n")

    def splits(**given):
        data = DataSection.from_json({"dataset": str(folder), **given})
        return {one.split: [r.fields["target"] for r in one.rows()] for one in open_sources(data)}

    assert splits() == {one: [one] for one in ("train", "validation", "test")}
    assert splits(splits={"test": "none"}) == {"train": ["train"], "validation": ["validation"]}
    swapped = splits(splits={"validation": "test", "test": "none"})
    assert swapped == {"train": ["train"], "validation": ["test"]}
    for hidden in ("-1", "-1.0", "null"):
        (folder / "test.jsonl").write_text(f'{{"source": "a", "target": {hidden}}}\n' * 3)
        with caplog.at_level(logging.WARNING):
            assert set(splits()) == {"train", "validation"}
        assert set(splits(text_key="source")) == {"train", "validation", "test"}
    with (folder / "test.jsonl").open("a") as file:
        file.write('{"source": "a", "target": 1}\n')
    assert set(splits()) == {"train", "validation", "test"}
    assert "split 'test' is left out: all its labels are -1" in caplog.text
    problem = load(tmp_path, dataset=folder, splits="{validation: dev}")
    assert "there is no split 'dev'; its splits are test, train, validation." in problem[0]
    assert "would be in both" in load(tmp_path, dataset=folder, splits="{test: train}")[0]
    assert "'dev' is none of train, val" in load(tmp_path, dataset=folder, splits="{dev: x}")[0]


OBJECTS = st.lists(
    st.dictionaries(
        st.text(max_size=3),
        st.integers() | st.text() | st.lists(st.none() | st.floats(allow_nan=False), max_size=3),
        max_size=3,
    ),
    max_size=6,
)


@given(OBJECTS, st.sampled_from([None, 1, "\t"]), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_an_array_has_the_rows_that_json_reads(tmp_path_factory, objects, indent, is_ascii, marked):
    text = json.dumps(objects, indent=indent, ensure_ascii=is_ascii)
    try:
        content = text.encode("utf-8-sig" if marked else "utf-8")
    except UnicodeEncodeError:
        return

    path = tmp_path_factory.mktemp("array") / "rows.json"
    rows = rows_of(path, content + b"\n")

    assert fields_of(rows) == json.loads(text)
    assert [row.line for row in rows] == list(range(1, len(objects) + 1))


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_many_pieces_is_read_in_whole_rows(tmp_path, indent):
    """Rows that are longer than what is read at once, and numbers and characters cut in two."""
    objects = [{"n": n, "é": "é中" * (n % 7 * 9000)} for n in range(60)]

    text = json.dumps(objects, indent=indent, ensure_ascii=False)
    rows = rows_of(tmp_path / "rows.json", text)

    assert fields_of(rows) == objects


def test_elements_that_are_no_objects_are_bad_rows_by_their_number(tmp_path):
    rows = rows_of(tmp_path / "rows.json", '[{"a": 1}, 12345, {"a": 2}]')

    assert [row.fields for row in (rows[0], rows[2])] == [{"a": 1}, {"a": 2}]
    assert str(rows[1]) == f"{tmp_path}/rows.json:2: not a JSON object: it is a int"


BROKEN_ARRAYS = {
    "cut in a row": ('[{"a": 1},\n {"a": 2', r"row 2 of its array \(line 2\)"),
    "cut behind a row": ('[\n{"a": 1}', r"row 1 of its array \(line 2\): the file ends before"),
    "a missing comma": (
        '[{"a": 1}\n{"a": 2}]',
        r"row 1 .*\(line 2\): '\]' should be here, not '{'",
    ),
    "a second array": ('[{"a": 1}]\n[{"a": 2}]', r"text after the end of the array"),
    "a comma at the end": ('[{"a": 1},]', r"row 2 .*Expecting value"),
    "too deep": ('[{"a": ' + "[" * 100_000, r"row 1 .*nested too deep"),
    "not UTF-8": (b'[{"a": "\xff"}]', r"not UTF-8"),
}


@pytest.mark.parametrize("case", BROKEN_ARRAYS)
def test_an_array_that_is_not_json_is_an_error_with_file_row_and_line(tmp_path, case):
    content, message = BROKEN_ARRAYS[case]

    with pytest.raises(UnreadableFile, match=rf"rows\.json: not JSON at .*{message}"):
        rows_of(tmp_path / "rows.json", content)


def test_one_object_over_several_lines_names_the_way_to_write_it(tmp_path):
    first, *_ = rows_of(tmp_path / "rows.json", json.dumps({"data": [{"a": 1}]}, indent=1))

    assert "rows are one object a line, or one array of objects; `jq -c" in first.detail


PLAIN = {
    "csv": b'a,b\n"x, y",1\n',
    "tsv": b"a\tb\nx\t1\n",
    "jsonl": b'{"a": "x"}\n{"a": "y"}\n',
    "ndjson": b'{"a": "x"}\n',
    "json": b'[{"a": "x"}, {"a": "y"}]',
}


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_compressed_file_has_the_rows_of_the_plain_one(tmp_path, kind, ending):
    content = compressed(PLAIN[kind], ending)
    expected = rows_of(tmp_path / f"rows.{kind}", PLAIN[kind])

    assert rows_of(tmp_path / f"rows.{kind}{ending}", content) == expected
    if kind == "jsonl":  # as `cat a.gz b.gz > c.gz` makes it
        twice = rows_of(tmp_path / f"rows.{kind}{ending}", content * 2)
        assert fields_of(twice) == fields_of(expected) * 2
    with pytest.raises(UnreadableFile, match=rf"rows\.{kind}{ending}: not a (gzip|zstd) file"):
        rows_of(tmp_path / f"rows.{kind}{ending}", content[:-3])


def test_patterns_directories_and_the_head_of_the_data_know_compressed_files(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    good = gzip.compress(b'{"source": "a", "target": "b"}\n')
    (folder / "train-1.jsonl.gz").write_bytes(good)
    (folder / "train-2.jsonl.gz").write_bytes(good)

    names = ["train-1.jsonl.gz", "train-2.jsonl.gz"]
    assert load(tmp_path, train=f"{folder}/*.jsonl.gz")["train"] == names
    data = DataSection.from_json({"dataset": str(folder)})
    assert [source.name for source in open_sources(data)] == names
    (folder / "train-2.jsonl.gz").write_bytes(gzip.compress(b'{"source": "a"}\n'))
    problem = load(tmp_path, train=f"{folder}/*.jsonl.gz")
    assert f"{folder}/train-2.jsonl.gz:1: no field 'target': its fields are source" in problem[0]


DISGUISED = {
    "gzip": ("rows.jsonl", gzip.compress(b"x"), "compressed with gzip, not text: add .gz"),
    "zstd": ("rows.csv", compressed(b"x", ".zst"), "compressed with Zstandard, not text: add .zst"),
    "UTF-16": (
        "rows.tsv",
        "a\tb\n".encode("utf-16"),
        "text in UTF-16, not text: convert it: iconv",
    ),
    "a spreadsheet": ("rows.csv", b"PK\x03\x04", "a zip archive or a spreadsheet"),
    "Parquet": ("rows.json", b"PAR1....PAR1", "a Parquet file, not text: name it .parquet"),
    "twice": ("rows.csv.gz", gzip.compress(gzip.compress(b"x")), "compressed with gzip"),
}


@pytest.mark.parametrize("case", DISGUISED)
def test_a_file_of_another_kind_than_its_name_is_refused_with_what_it_is(tmp_path, case):
    name, content, message = DISGUISED[case]

    with pytest.raises(UnreadableFile, match=rf"{name}: it is {message}"):
        rows_of(tmp_path / name, content)


def test_compressed_parquet_is_an_unknown_ending(tmp_path):
    with pytest.raises(ValueError, match=r"unknown ending '\.gz'; known: \.arrow, \.csv"):
        rows_of(tmp_path / "rows.parquet.gz", b"")


@pytest.mark.slow
def test_a_file_that_expands_without_end_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl.zst"
    line = b" " * (8 << 20) + b"\n"
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as stream:
        for _ in range(MAX_EXPANDED_BYTES // len(line) + 1):
            stream.write(line)
    assert path.stat().st_size < MAX_EXPANDED_BYTES // 1000

    with pytest.raises(UnreadableFile, match=r"rows\.jsonl\.zst: it expands to more than 1,073,7"):
        list(read_file(path))


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_text_that_a_dictionary_repeats_takes_little_memory(tmp_path, ending):
    """A file of some hundred bytes, one text of 1 MB, and 1 GB if all rows were decoded at once."""
    path = tmp_path / f"rows.{ending}"
    text = pa.array(["x" * (1 << 20)])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), text)
    table = pa.table({"text": column})
    if ending == "parquet":
        options = {"dictionary_pagesize_limit": 1 << 30, "store_schema": False}
        pyarrow.parquet.write_table(table, path, compression="zstd", **options)
        assert path.stat().st_size < 1000
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table)
    before = pa.total_allocated_bytes()

    rows = read_file(path)
    first = next(rows)

    assert len(first.fields["text"]) == 1 << 20
    assert pa.total_allocated_bytes() - before < 100 << 20
    rows.close()


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.gz"])
def test_blank_lines_without_end_are_refused_when_the_pipeline_is_planned(tmp_path, name):
    with gzip.open(tmp_path / name, "wb") as file:
        file.write(b"source,target\na,b\n" if "csv" in name else b"")
        for _ in range(100):
            file.write(b"\n" * 1_000_000)
    data = DataSection(train=str(tmp_path / name))

    start = time.monotonic()
    ((key, problem),) = head_problems(data, "text_to_text", {})

    assert (key, time.monotonic() - start < 20) == ("train", True)
    assert re.search(rf"{name}:\d+: more than 100,000 blank lines follow each other", problem)


@pytest.mark.parametrize("place", ["/", "//", "/usr/..", "~"])
def test_a_dataset_that_is_the_whole_file_system_or_home_is_refused(place):
    problem = problem_of(DataSection(dataset=place))

    assert problem is not None
    assert "name the directory that has the data files" in problem
