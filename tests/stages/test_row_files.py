"""Rows of JSON lines mean what Python's `json` says, whichever parser reads them."""

import json
import math

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redco_flow.engine.files import UnreadableFile
from redco_flow.stages.data.row_files import read_file
from redco_flow.stages.data.rows import BadRow, FileRow

DIFFERENT = {
    "a large integer": '{"a": "x", "b": 18446744073709551616}',
    "a large negative integer": '{"a": "x", "b": -9223372036854775809}',
    "an integer within": '{"a": "x", "b": 9223372036854775807}',
    "minus zero": '{"a": -0, "b": -0.0}',
    "infinity": '{"a": "x", "b": Infinity}',
    "a float beyond all floats": '{"a": "x", "b": 1e999}',
    "half a surrogate pair": '{"a": "\\ud800"}',
    "half a surrogate pair in a key": '{"\\ud800": "x"}',
    "duplicate keys": '{"a": "x", "b": 1, "a": "y"}',
    "duplicate keys of several types": '{"a": {}, "a": "y"}',
    "escaped nul": '{"a": "\\u0000"}',
    "nested": '{"a": {"b": [1, 2.5]}, "c": "x"}',
    "empty": "{}",
    "white space around": ' \t{"a" : "x"}  ',
    "deep": '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "constants": '{"a": true, "b": false, "c": null}',
}
WRONG = {
    "a control character": '{"a": "\x1f"}',
    "a second value": '{"a": "x"} {"a": "x"}',
    "a comma at the end": '{"a": "x",}',
    "single quotes": "{'a': 'x'}",
    "a leading zero": '{"a": 01}',
    "a comment": '{"a": "x"} // x',
    "a bare word": "nonsense",
}


def rows_of(folder, *lines):
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    return list(read_file(path))


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_row_is_what_json_reads(tmp_path, case):
    [row] = rows_of(tmp_path, DIFFERENT[case])

    expected = json.loads(DIFFERENT[case])
    assert row == FileRow(1, expected)
    assert list(map(type, row.fields.values())) == list(map(type, expected.values()))
    assert repr(row.fields) == repr(expected)


def test_a_number_that_is_none_is_read(tmp_path):
    [row] = rows_of(tmp_path, '{"a": "x", "b": NaN}')

    assert row.fields["a"] == "x"
    assert math.isnan(row.fields["b"])


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_row_is_said_in_the_words_of_json(tmp_path, case):
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads(WRONG[case] + "\n")

    good, bad = rows_of(tmp_path, '{"a": "x"}', WRONG[case])

    assert good == FileRow(1, {"a": "x"})
    assert bad == BadRow(f"{tmp_path / 'rows.jsonl'}:2", "not JSON", str(caught.value))


def test_a_number_of_too_many_digits_is_a_bad_row_and_the_next_one_is_read(tmp_path):
    bad, good = rows_of(tmp_path, '{"a": ' + "9" * 5000 + "}", '{"a": "x"}')

    assert isinstance(bad, BadRow)
    assert (bad.reason, good) == ("not JSON", FileRow(2, {"a": "x"}))
    assert "4300 digits" in bad.detail


def test_lines_of_white_space_are_no_rows_and_are_counted(tmp_path):
    rows = rows_of(tmp_path, "", "  \t", "\u00a0", '{"a": "x"}')

    assert rows == [FileRow(4, {"a": "x"})]


@given(
    st.dictionaries(
        st.text(max_size=4),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
        max_size=4,
    ),
    st.booleans(),
)
@example({"a": 2**64}, True)
def test_every_object_that_json_writes_is_read_as_it_was(tmp_path_factory, fields, is_ascii):
    folder = tmp_path_factory.mktemp("rows")
    line = json.dumps(fields, ensure_ascii=is_ascii)

    [row] = rows_of(folder, line)

    assert repr(row) == repr(FileRow(1, json.loads(line)))


def test_an_arrow_batch_that_points_out_of_its_memory_is_refused_by_the_files_name(tmp_path):
    """Fault 47: read as it stands, it ends the process."""
    path = tmp_path / "rows.arrow"
    table = pa.table({"text": ["one", "two", "three"]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    offsets = b"".join(place.to_bytes(4, "little") for place in (0, 3, 6, 11))
    far_away = offsets[:8] + (0x7FFFFFF0).to_bytes(4, "little") + offsets[12:]
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, far_away))

    with pytest.raises(UnreadableFile, match=r"rows\.arrow: not an Arrow file, or a damaged one"):
        list(read_file(path))


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_an_arrow_file_of_either_kind_is_read(tmp_path, kind):
    path = tmp_path / "rows.arrow"
    table = pa.table({"a": list(range(2500))})
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as out:
        out.write_table(table)

    rows = list(read_file(path))

    assert rows == [FileRow(number + 1, {"a": number}) for number in range(2500)]


def test_a_parquet_file_that_is_cut_short_is_refused_by_its_name(tmp_path):
    """Fault 47: the error names the file; the process never dies of a signal."""
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.table({"a": list(range(100))}), path)
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(UnreadableFile, match=r"rows\.parquet: not a Parquet file, or a damaged"):
        list(read_file(path))
