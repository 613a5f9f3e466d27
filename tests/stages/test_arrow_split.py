"""A split's file: the same bytes however its rows were cut into batches."""

import numpy as np
import pyarrow as pa
import pytest

from redco_flow.stages.artifacts.arrow_split import (
    BATCH_ROWS,
    IDS,
    TEXT,
    TEXTS,
    ArrowSplit,
    SplitWriter,
)
from redco_flow.text.tokenizer import FlatIds

COLUMNS = {"row_id": TEXT, "references": TEXTS, "ids": IDS}
NUM_ROWS = 2 * BATCH_ROWS + 345


def rows_of(start, stop):
    indices = range(start, stop)
    return {
        "row_id": [f"rows:{i} é" for i in indices],
        "references": [[f"text {i}"] * (i % 3) for i in indices],
        "ids": [list(range(i % 7)) for i in indices],
    }


def written(path, sizes, ids_of):
    start = 0
    with SplitWriter(path, COLUMNS) as writer:
        for size in sizes:
            rows = rows_of(start, start + size)
            writer.write({**rows, "ids": ids_of(rows["ids"])})
            start += size
        assert writer.num_rows == start == NUM_ROWS
    return path.read_bytes()


@pytest.mark.parametrize("ids_of", [list, FlatIds])
@pytest.mark.parametrize(
    "sizes",
    [
        [BATCH_ROWS, BATCH_ROWS, 345],
        [345, 2 * BATCH_ROWS],
        [1, 999, 0, 1344, 1],
        [5] * (NUM_ROWS // 5),
    ],
)
def test_a_file_has_the_same_bytes_however_its_rows_come(tmp_path, sizes, ids_of):
    schema_of = tmp_path / "schema.arrow"
    whole = written(schema_of, [NUM_ROWS], list)
    with pa.OSFile(str(schema_of), "rb") as source:
        schema = pa.ipc.open_stream(source).schema
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        for start in range(0, NUM_ROWS, BATCH_ROWS):
            rows = rows_of(start, min(start + BATCH_ROWS, NUM_ROWS))
            stream.write_batch(pa.RecordBatch.from_pydict(rows, schema=schema))

    found = written(tmp_path / "cut.arrow", sizes, ids_of)

    assert found == whole == sink.getvalue().to_pybytes()


def test_ids_and_their_lengths_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rows.arrow"
    written(path, [NUM_ROWS], list)

    split, expected = ArrowSplit([path]), rows_of(0, NUM_ROWS)["ids"]

    assert [row["ids"].tolist() for row in split[990:1010]] == expected[990:1010]
    assert split.lengths("ids").tolist() == [*map(len, expected)]
    assert np.concatenate(split.flat("ids")).tolist() == [one for ids in expected for one in ids]


def test_a_file_without_rows_can_be_read(tmp_path):
    with SplitWriter(tmp_path / "none.arrow", COLUMNS):
        pass

    assert len(ArrowSplit([tmp_path / "none.arrow"])) == 0


def test_columns_of_unequal_lengths_are_refused(tmp_path):
    with SplitWriter(tmp_path / "rows.arrow", COLUMNS) as writer:
        with pytest.raises(AssertionError, match="unequal lengths"):
            writer.write({**rows_of(0, 3), "ids": FlatIds([[1]])})


@pytest.mark.parametrize(
    ("column", "values"), [("row_id", ["a", None]), ("references", [["a"], ["b", None]])]
)
def test_a_value_that_is_not_a_text_is_refused_with_its_row_and_column(tmp_path, column, values):
    with SplitWriter(tmp_path / "rows.arrow", COLUMNS) as writer:
        writer.write(rows_of(0, 3))
        with pytest.raises(
            ValueError, match=f"row 4 of rows.arrow has None in the column '{column}'"
        ):
            writer.write({**rows_of(3, 5), column: values})
