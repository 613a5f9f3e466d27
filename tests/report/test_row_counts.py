"""The page has a table of the rows that were skipped, truncated or dropped, and what to do."""

METADATA = {
    "splits": {"train": {"rows": 223, "cut_sources": 12, "cut_targets": 0}},
    "skipped_rows": {"the chat template fails": 75, "an empty <answer>": 2},
    "rows_read": 300,
    "curated_rows": {},
}


def test_the_page_has_a_table_of_skipped_and_truncated_rows_by_reason(builder, read_report):
    builder.preprocess(metadata={"dataset": METADATA})

    page = read_report(builder.close())

    text = " ".join(" ".join(page.texts).split())
    assert "Rows skipped and truncated by stage preprocess" in text
    assert "300 rows were read." in text
    assert "skipped the chat template fails 75 25.0 fix them; data.on_bad_row: error" in text
    assert "skipped an empty <answer> 2 0.7" in text
    assert "truncated sources 12 4.0 raise max_source_length" in text


def test_a_dataset_of_an_earlier_version_has_a_table_without_shares(builder, read_report):
    old = {key: METADATA[key] for key in ("splits", "skipped_rows")}
    builder.preprocess(metadata={"dataset": old})

    text = " ".join(" ".join(read_report(builder.close()).texts).split())

    assert "skipped the chat template fails 75 fix them" in text
    assert "rows were read" not in text


def test_a_page_of_data_that_is_there_in_full_has_no_such_table(builder, read_report):
    builder.preprocess(metadata={"dataset": METADATA | {"skipped_rows": {}, "splits": {}}})

    assert "Rows skipped" not in read_report(builder.close()).html
