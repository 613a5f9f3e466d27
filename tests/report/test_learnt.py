"""The page shows the trained tokens of conversations: shares, warnings, marks."""

COUNTS = {
    "rows": 3,
    "target_tokens": 200,
    "learnt_tokens": 50,
    "cut_targets": 1,
    "dropped_rows": 2,
    "double_starts": 0,
    "missing_ends": 3,
}


def test_the_page_shows_what_is_learnt_and_what_is_likely_a_mistake(builder, read_report):
    pieces = [["<|user|>Why?", False], ["So <b>.", True]]
    metadata = {"dataset": {"splits": {"train": COUNTS}, "learnt": [pieces]}}
    builder.preprocess(metadata=metadata)

    page = read_report(builder.close())

    text = "".join(page.texts)
    assert "3 conversations, 200 tokens, of which 25.0% are learnt" in text
    assert "1 are cut at max_length" in text
    assert "2 are dropped: longer than max_length" in text
    assert "3 have an answer without the tokenizer's end token (EOS)" in text
    assert "BOS" not in text
    assert "&lt;|user|&gt;Why?<mark>So &lt;b&gt;.</mark>" in page.html


def test_a_page_of_other_data_says_nothing_of_it(builder, read_report):
    builder.preprocess()

    assert "Trained tokens" not in read_report(builder.close()).html
