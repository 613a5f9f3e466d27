"""curate: rows that repeat others, meet an evaluation's or are poor are left out, and no others."""

import json

import pytest
from pydantic import ValidationError
from stage_kinds import curate, preprocess

from redco_flow.corpora import python_reference
from redco_flow.stages.artifacts.curation import WrongCuration
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.curate.run import NothingLeft
from redco_flow.stages.curate.text_filters import EvaluationTexts, KeptTexts, grams, words_of

LONG = "the night train to the coast leaves at ten and reaches the old harbour before the sun"
KEPT = [
    ("who", LONG),
    ("what", "a lamp that burns the whole night long beside an open window in the upper room"),
    ("where", "behind the mill there is a garden with plum trees and a bench of grey stone"),
]
TOKENIZER = {"train": {"vocab_size": 280, "type": "bpe"}}
LENGTHS = {"max_source_length": 8, "max_target_length": 64}


def write(folder, name, rows):
    path = folder / f"{name}.jsonl"
    lines = [{"source": source, "target": target} for source, target in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Three good rows among bad ones, and an evaluation split."""
    rows = [
        *KEPT,
        ("who", LONG.upper() + "!"),  # the first row's words
        ("who", LONG.replace("sun", "moon")),
        ("when", "she said we shall meet again beside the grey river when all the leaves are red"),
        ("how", "yes"),
        ("much", "7 8 9 10 11 12 13 14 15"),
        ("song", "la la la " * 9),
        ("tags", "#one #two #three #four and that is all that we can say of it"),
    ]
    evaluated = [
        ("poem", "at noon we shall meet again beside the grey river when all the leaves are red"),
        ("short", "no"),
    ]
    return {
        "train": write(tmp_path, "train", rows),
        "test": write(tmp_path, "test", evaluated),
        "validation_fraction": 0.0,
    }


RULES = {
    "min_words": 4,
    "min_letter_share": 0.6,
    "max_repeated_share": 0.5,
    "max_symbol_share": 0.2,
}


def dropped_of(curation):
    lines = (curation.path / "dropped.jsonl").read_text().splitlines()
    return {line["row_id"].rpartition(":")[2]: line for line in map(json.loads, lines)}


def test_each_bad_row_is_left_out_for_its_reason(bench, data):
    curation = bench.run(curate, {"data": data, **RULES})["curation"]

    dropped = dropped_of(curation)
    assert {number: line["reason"] for number, line in dropped.items()} == {
        "4": "duplicate",
        "5": "near-duplicate",
        "6": "in an evaluation split",
        "7": "under 4 words",
        "8": "too few words with letters",
        "9": "repeats itself",
        "10": "too many symbols",
    }
    assert dropped["4"]["like"] == dropped["5"]["like"] == "train.jsonl:1"
    assert dropped["4"]["similarity"] == 1
    assert dropped["6"]["like"] == "test.jsonl:1"
    assert 0.8 <= dropped["5"]["similarity"] < 1
    assert curation.manifest["metadata"]["num_rows"] == {"train": 10, "test": 2}
    shown = {one["reason"]: one for one in curation.manifest["metadata"]["examples"]}
    assert LONG in shown["near-duplicate"]["like_text"]


def test_the_dataset_has_the_others_under_their_own_ids(bench, data):
    curation = bench.run(curate, {"data": data, **RULES})["curation"]

    settings = {"data": {**data, "tokenizer": TOKENIZER}, **LENGTHS}
    made = bench.run(preprocess, settings, {"curation": [curation]})["dataset"]

    dataset = DatasetArtifact(made.path)
    train, test = (dataset.split(name) for name in ("train", "test"))
    rows = train.__getitems__(range(len(train)))
    assert [row["row_id"] for row in rows] == [f"train.jsonl:{n}" for n in (1, 2, 3)]
    assert len(test) == 2
    assert dataset.summary.skipped_rows["near-duplicate"] == 1
    assert sum(dataset.summary.skipped_rows.values()) == 7


def test_what_is_held_out_by_a_share_is_what_it_would_be_without(bench, data, tmp_path):
    """Of it nothing is dropped, though its texts repeat each other, too."""
    words = LONG.split()
    texts = [" ".join(words[n % 7 :] + words[: n % 7]) for n in range(200)]
    path = write(tmp_path, "many", [(f"{n % 14}", text) for n, text in enumerate(texts)])
    held_out = {"train": path, "validation_fraction": 0.3}
    settings = {"data": held_out, "near_duplicates": 1.0, "contamination_words": None}
    curation = bench.run(curate, settings)["curation"]
    settings = {"data": {**held_out, "tokenizer": TOKENIZER}, **LENGTHS}

    def rows_of(inputs):
        dataset = DatasetArtifact(bench.run(preprocess, settings, inputs)["dataset"].path)
        splits = {name: dataset.split(name) for name in ("train", "validation")}
        return {
            name: [row["row_id"] for row in rows.__getitems__(range(len(rows)))]
            for name, rows in splits.items()
        }

    whole, curated = rows_of({}), rows_of({"curation": [curation]})
    assert curated["validation"] == whole["validation"]
    assert 0 < len(curated["train"]) < len(whole["train"])


def test_conversations_and_plain_texts_are_compared_by_their_words(bench, tmp_path):
    said = [("Where is it?", LONG), ("where IS it", LONG), ("When?", KEPT[1][1])]
    # The same for all, it makes none a duplicate.
    system = {"role": "system", "content": " ".join(map(str, range(200)))}
    chats = [
        {"messages": [system, {"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in said
    ]
    texts = [{"text": LONG}, {"text": f"{LONG}."}, {"text": KEPT[1][1]}]
    for name, recipe, rows, keys in [
        ("chats", "chat", chats, {}),
        ("texts", "language_modeling", texts, {"text_key": "text"}),
    ]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"train": str(path), "validation_fraction": 0.0, **keys}

        curation = bench.run(curate, {"recipe": recipe, "data": data})["curation"]

        assert list(dropped_of(curation)) == ["2"]


def test_a_script_without_spaces_is_said_to_have_hardly_any_words(bench, tmp_path, caplog):
    texts = ["今天天气很好，我们去公园散步。", "火车十点出发"]
    path = write(tmp_path, "chinese", [("谁", text) for text in texts])

    bench.run(curate, {"data": {"train": path, "validation_fraction": 0.0}})

    assert "script without spaces" in caplog.text


def test_rows_of_other_data_are_refused(bench, data, tmp_path):
    curation = bench.run(curate, {"data": data})["curation"]
    other = {**data, "train": write(tmp_path, "other", KEPT), "tokenizer": TOKENIZER}

    with pytest.raises(WrongCuration, match="same `data`"):
        bench.run(preprocess, {"data": other, **LENGTHS}, {"curation": [curation]})


def test_moved_data_are_the_same_rows(bench, data, tmp_path):
    curation = bench.run(curate, {"data": data, **RULES})["curation"]
    (tmp_path / "elsewhere").mkdir()
    moved = {**data, "train": write(tmp_path / "elsewhere", "train", [])}
    (tmp_path / "train.jsonl").rename(tmp_path / "elsewhere" / "train.jsonl")

    settings = {"data": {**moved, "tokenizer": TOKENIZER}, **LENGTHS}
    made = bench.run(preprocess, settings, {"curation": [curation]})["dataset"]

    assert len(DatasetArtifact(made.path).split("train")) == 3


def test_limits_that_leave_nothing_are_told(bench, data):
    with pytest.raises(NothingLeft, match="10 under 500 words"):
        bench.run(curate, {"data": data, "min_words": 500})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "preference"}, "takes rows as they are"),
        ({"min_words": 9, "max_words": 8}, "min_words 9 is above max_words 8"),
        ({"near_duplicates": 1.5}, "less than or equal to 1"),
        ({"data": {"train": "a.jsonl", "columns": {"a": "b"}}}, "are of recipes of rows"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(settings, message):
    with pytest.raises(ValidationError, match=message):
        curate.Config.from_json({"data": {"train": "a.jsonl"}, **settings})


def test_another_tokenizer_is_no_reason_to_compare_again():
    one, other = (
        curate.Config.from_json({"data": {"train": "a.jsonl", "tokenizer": tokenizer}})
        for tokenizer in (None, TOKENIZER)
    )
    assert one == other


def test_a_short_row_is_in_an_evaluation_split_with_all_of_its_texts():
    """And not with its answer alone, or without a word, as a message that calls a tool."""
    evaluation = EvaluationTexts(13)
    for number, texts in enumerate([["Is it red?", "No."], ["book a table", ""], ["?"]], 1):
        evaluation.add(f"test.jsonl:{number}", texts)

    rows = [["is it RED", "no"], ["is it green", "no"], ["a train", ""], ["!"]]
    rows += [["Hi", "Hello!", "Is it red?", "No."], ["Is it red?", "No.", "Why?", "So."]]
    found = [evaluation.twin_of(list(map(words_of, row))) for row in rows]

    assert [twin and twin.row_id for twin in found] == [
        *("test.jsonl:1", None, None, None),
        *("test.jsonl:1", None),
    ]


def test_minhash_misses_next_to_no_pair_that_comparing_all_finds():
    """The standard library's own documentation, cut and changed a little."""
    rows = python_reference.rows(python_reference.files())
    paragraphs = [text for row in rows for text in row["text"].split("\n\n")]
    texts = [text for text in paragraphs if len(text.split()) > 20][:500]
    texts += [" ".join(text.split()[:-1]) for text in texts[::4]]
    sets = [set(grams(words_of(text), 5)) for text in texts]
    expected, kept = [], []
    for number, shingles in enumerate(sets):
        if any(len(shingles & sets[k]) / len(shingles | sets[k]) >= 0.8 for k in kept):
            expected.append(number)
        else:
            kept.append(number)

    index = KeptTexts(0.8, 5)
    found = [
        number
        for number, text in enumerate(texts)
        if index.twin_of(str(number), text, words_of(text))
    ]

    assert len(expected) > 60
    assert set(found) <= set(expected)
    assert len(found) >= 0.98 * len(expected)
