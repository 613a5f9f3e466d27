"""What a curation left out stands on the page: how many rows for which reason, and examples."""

LIKE = {"like": "a.jsonl:1", "like_text": "So be it.", "similarity": 0.875}
METADATA = {
    "num_rows": {"train": 2000, "test": 9},
    "dropped": {"under 4 words": 10, "near-duplicate": 190},
    "examples": [
        {"reason": "near-duplicate", "row_id": "a.jsonl:3", "text": "So <b> it.", **LIKE},
        {"reason": "under 4 words", "row_id": "a.jsonl:7", "text": "Yes.", "like": ""}
        | {"like_text": "", "similarity": None},
    ],
}


def test_the_page_shows_what_was_left_out_and_why(builder, read_report):
    path = builder.write("curation.json", "{}").parent
    builder.complete("curate", {"curation": path}, metadata={"curation": METADATA})

    page = read_report(builder.close())

    text = "".join(page.texts)
    assert "1,800 of 2,000 training rows are kept" in text
    assert "near-duplicate: a.jsonl:3, 88% of the shingles of a.jsonl:1" in text
    assert "under 4 words: a.jsonl:7" in text
    assert page.html.index(">near-duplicate</th>") < page.html.index(">under 4 words</th>")
    assert "So &lt;b&gt; it." in page.html
    assert "9.5" in text


def test_a_page_of_another_run_says_nothing_of_it(builder, read_report):
    builder.preprocess()

    assert "Rows dropped by curation" not in read_report(builder.close()).html
