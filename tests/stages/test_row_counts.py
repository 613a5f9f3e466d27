"""Rows that are skipped, truncated or dropped are counted where people look, up to a limit."""

import json
import logging
from types import SimpleNamespace

import pytest
from stage_kinds import preprocess

from redco_flow.runtime.context import FinishedStage, Shard
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.rows import BadRows
from redco_flow.tracking.row_counts import RowLosses
from redco_flow.tracking.workspace import Workspace

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CHATS = [
    [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5"},
    ],
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    ],
    [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}],
]
CHAT = {"recipe": "chat"}
TRAINED = {"train": {"vocab_size": 400}}


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def chat_data(bench, chats, **more):
    path = write(bench.root / "talks.jsonl", [{"messages": one} for one in chats])
    return {"train": path, "validation_fraction": 0.0, "tokenizer": TRAINED, **more}


def pair_data(bench, rows, **more):
    path = write(bench.root / "pairs.jsonl", rows)
    return {"train": path, "validation_fraction": 0.0, "tokenizer": TRAINED, **more}


def concluded(bench, artifact):
    """What the line of the completed stage says."""
    result = SimpleNamespace(outputs={"dataset": artifact.id})
    workspace = Workspace.open(bench.root / "workspace")
    return preprocess.conclude(None, FinishedStage(workspace, "pipeline", "run", result))


def test_skipped_rows_are_in_the_log_and_in_the_line_of_the_completed_stage(bench, caplog):
    data = chat_data(bench, CHATS, on_bad_row="skip")

    with caplog.at_level(logging.INFO):
        made = bench.run(preprocess, CHAT | {"data": data})["dataset"]

    assert concluded(bench, made) == "(2 of 3 rows skipped)"
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(" (")[0] for text in told if text.startswith("skipped")] == [
        "skipped: 1 of 3 rows: an empty message",
        "skipped: 1 of 3 rows: the chat template fails",
    ]
    assert all("data.on_bad_row: error" in text for text in told if text.startswith("skipped"))


def test_rows_that_another_shard_could_not_encode_are_counted(bench):
    data = chat_data(bench, CHATS, on_bad_row="skip")
    config = preprocess.Config.from_json(CHAT | {"data": data, "num_shards": 2})
    first, second = (bench.context("preprocess", work="shared") for _ in range(2))

    preprocess.run_shard(first, config, Shard(0, 2))
    outputs = preprocess.run_shard(second, config, Shard(1, 2))()

    losses = RowLosses.of(outputs.outputs["dataset"].metadata)
    assert losses.brief == "(2 of 3 rows skipped)"


PAIRS = [{"source": "a b c d e f g h", "target": "x"}, {"source": "a", "target": "x y z " * 9}]


def test_truncated_texts_are_counted_by_side_with_the_setting_that_cuts_them(bench):
    lengths = {"max_source_length": 4, "max_target_length": 8}

    made = bench.run(preprocess, {"data": pair_data(bench, PAIRS * 3)} | lengths)["dataset"]

    losses = RowLosses.of(made.metadata)
    assert losses.brief == "(3 sources truncated, 3 targets truncated)"
    assert [one.remedy for one in losses.groups] == [
        "raise max_source_length",
        "raise max_target_length",
    ]


def test_captions_that_the_recipe_cuts_are_counted(bench):
    image = [[0, 255], [255, 0]]
    rows = [{"image": image, "caption": text} for text in ("a b", "a b c d e f g h i j k l m")]
    settings = {"recipe": "image_to_text", "settings": {"max_length": 8, "image_size": 4}}

    made = bench.run(preprocess, settings | {"data": pair_data(bench, rows * 3)})["dataset"]

    assert concluded(bench, made) == "(3 targets truncated)"
    assert RowLosses.of(made.metadata).groups[0].remedy == "raise settings.max_length"


LONG = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2 " * 200}]


@pytest.mark.parametrize(
    ("on_too_long", "text"),
    [
        ("truncate", "(1 conversation truncated)"),
        ("drop", "(1 conversation dropped)"),
    ],
)
def test_long_conversations_are_counted(bench, on_too_long, text):
    settings = CHAT | {"max_length": 64, "on_too_long": on_too_long}

    made = bench.run(preprocess, settings | {"data": chat_data(bench, [CHATS[2], LONG])})

    assert concluded(bench, made["dataset"]) == text


def test_nothing_is_said_where_every_row_is_there_in_full(bench):
    made = bench.run(preprocess, CHAT | {"data": chat_data(bench, [CHATS[2]] * 4)})["dataset"]

    assert concluded(bench, made) == ""


GOOD, BAD = {"source": "a", "target": "b"}, {"source": "a"}
LIMITS = [
    ("1 %", 100, 1, None),
    ("1%", 99, 1, 0),
    ("2.5 %", 200, 6, 5),
    (0.1, 10, 1, None),
    (0.1, 19, 2, 1),
    (2, 5, 2, None),
    (2, 5, 3, 2),
    (0, 5, 1, 0),
    ("100 %", 3, 2, None),
]


@pytest.mark.parametrize(("limit", "num_rows", "num_bad", "allowed"), LIMITS)
def test_more_bad_rows_than_the_limit_are_an_error(bench, limit, num_rows, num_bad, allowed):
    rows = [*[GOOD] * (num_rows - num_bad), *[BAD] * num_bad]
    data = pair_data(bench, rows, on_bad_row={"skip": limit})
    if allowed is None:
        made = bench.run(preprocess, {"data": data})["dataset"]
        assert DatasetArtifact(made.path).summary.skipped_rows == {"no field 'target'": num_bad}
        return

    with pytest.raises(BadRows) as raised:
        bench.run(preprocess, {"data": data})

    text = str(raised.value)
    assert text.startswith(
        f"{num_bad} of {num_rows} rows are bad, and data.on_bad_row: {{skip: {limit}}} allows "
        f"{allowed} ({num_bad} × no field 'target'), the first {data['train']}:"
    )
    assert text.endswith("Fix them, or raise the limit.")


def test_the_limit_counts_rows_that_cannot_be_encoded_too(bench):
    data = chat_data(bench, CHATS, on_bad_row={"skip": 1})

    with pytest.raises(BadRows, match=r"2 of 3 rows are bad.*allows 1 \(1 × an empty message, 1 ×"):
        bench.run(preprocess, CHAT | {"data": data})
