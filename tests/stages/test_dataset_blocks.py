"""A dataset in blocks: the same whichever process computes them, none twice, none damaged."""

import json
import os
import shutil
import threading

import pytest
from stage_kinds import preprocess

from redco_flow.launch.work_lock import acquire
from redco_flow.runtime.context import Shard, Stopped
from redco_flow.spec.load import settings_of
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.rows import BadRows
from redco_flow.stages.preprocess.pairs import BLOCK_ROWS

NUM_ROWS = 2 * BLOCK_ROWS + 1000
BAD_ROWS = (3, BLOCK_ROWS + 3, 2 * BLOCK_ROWS + 3)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of three blocks, with a bad one in each; every source stands there about nine times."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with path.open("w") as file:
        for index in range(NUM_ROWS):
            row = {"source": f"a {index % 4567}", "target": f"b {index % 10}"}
            file.write("{}\n" if index in BAD_ROWS else json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def config(rows):
    return config_of(rows)


@pytest.fixture(scope="module")
def whole(shared_bench, config):
    """The dataset of one process, and the context that it was made in."""
    context = shared_bench.context(work="whole")
    return published(shared_bench, preprocess.run(context, config)), context


def config_of(rows, **changes):
    data = {
        "train": str(rows),
        "validation_fraction": 0.02,
        "test_fraction": 0.01,
        "on_bad_row": "skip",
        "tokenizer": {"train": {"vocab_size": 270, "type": "bpe"}},
    }
    settings = {"data": data | changes, "max_source_length": 8, "max_target_length": 8}
    return preprocess.Config.from_json(settings)


def published(bench, outputs):
    return bench.publish(outputs)["dataset"]


def sharded(bench, config, order, work):
    """Run shards in an order; the one that ends last joins."""
    for index in order:
        context = bench.context("preprocess", work=work)
        join = preprocess.run_shard(context, config, Shard(index, len(order)))
    return published(bench, join())


def blocks_of(context):
    """File id by name of the encoded blocks that are there."""
    return {
        path.name: path.stat().st_ino for path in (context.work_dir / "dataset").glob("*.arrow")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "data"),
    [([2, 0, 1], {}), ([1, 0], {"group_by_source": True, "max_examples": BLOCK_ROWS + 500})],
)
def test_a_dataset_is_byte_identical_for_any_number_of_shards(bench, rows, whole, order, data):
    """Held-out splits, limits and skipped rows are those of the whole data, not of a shard."""
    config, (whole, _) = config_of(rows, **data), whole

    if data:
        whole = published(bench, preprocess.run(bench.context(), config))
    found = sharded(bench, config, order, "shards")

    assert whole.id == found.id
    summary = DatasetArtifact(whole.path).summary
    num_read = data.get("max_examples", NUM_ROWS - len(BAD_ROWS))
    num_bad = sum(row < num_read for row in BAD_ROWS)
    assert sum(summary.skipped_rows.values()) == num_bad
    if "group_by_source" not in data:
        assert sum(counts["references"] for counts in summary.splits.values()) == num_read


@pytest.mark.slow
def test_the_rows_of_all_blocks_are_read_in_the_order_of_the_data(whole):
    dataset = DatasetArtifact(whole[0].path)

    train = dataset.split("train", ["row_id"])
    lines = [int(row["row_id"].partition(":")[2]) for row in train]

    assert len(dataset.summary.files["train"]) == 3
    assert lines == sorted(lines)
    assert len(lines) == dataset.summary.splits["train"]["rows"]
    assert train[-1] == train[len(train) - 1]
    assert train.__getitems__([0, BLOCK_ROWS])[1] == train[BLOCK_ROWS]


def test_the_number_of_shards_is_no_part_of_the_fingerprint(rows):
    settings = config_of(rows).model_dump(mode="json")

    one, seven = (
        settings_of(preprocess.Config.from_json(settings | {"num_shards": number}))
        for number in (1, 7)
    )

    assert one == seven


@pytest.mark.slow
def test_a_shard_encodes_its_blocks_only_and_leaves_those_that_are_there(bench, config):
    context = bench.context(work="shared")

    preprocess.run_shard(context, config, Shard(1, 3))
    first = blocks_of(context)
    preprocess.run_shard(context, config, Shard(1, 3))
    again = blocks_of(context)
    preprocess.run(context, config)
    whole = blocks_of(context)

    assert set(first) == {f"{split}-00001.arrow" for split in ("train", "validation", "test")}
    assert again == first
    assert first.items() <= whole.items()
    assert "train-00002.arrow" in whole


@pytest.mark.slow
def test_what_was_encoded_before_a_stop_is_not_encoded_again(bench, config, whole):
    context = bench.context(work="stopped")
    report = context.report

    def stop_after_a_block(**said):
        context.stop.requested = (context.work_dir / "blocks" / "00000.json").exists()
        report(**said)

    context.report = stop_after_a_block
    with pytest.raises(Stopped):
        preprocess.run(context, config)
    left = blocks_of(context)

    resumed = bench.context(work="stopped")
    outputs = preprocess.run(resumed, config)

    assert "train-00000.arrow" in left
    assert left.items() <= blocks_of(resumed).items()
    assert published(bench, outputs).id == whole[0].id
    assert list((resumed.work_dir / "unfinished").iterdir()) == []


@pytest.mark.slow
def test_a_block_that_was_damaged_meanwhile_is_encoded_anew(bench, config, whole):
    whole, made = whole
    context = bench.context(work="damaged")
    shutil.copytree(made.work_dir, context.work_dir, dirs_exist_ok=True)
    path = context.work_dir / "dataset" / "train-00001.arrow"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(damaged)

    outputs = preprocess.run(bench.context(work="damaged"), config)

    assert outputs.outputs["dataset"].digests == {
        file["path"]: file["blake3"]
        for file in whole.manifest["files"]
        if file["path"].endswith(".arrow")
    }
    again = published(bench, outputs)
    assert again.id == whole.id
    assert bench.store.verify(again.id) == []


def test_joining_copies_no_row(whole):
    artifact, context = whole

    for name, file_id in blocks_of(context).items():
        assert (artifact.path / name).stat().st_ino == file_id


@pytest.mark.slow
def test_every_shard_tells_all_bad_rows_where_they_are_errors(bench, rows, whole):
    config = config_of(
        rows, on_bad_row="error", tokenizer={"name_or_path": str(whole[0].path / "tokenizer")}
    )

    for index in (0, 2):
        with pytest.raises(BadRows, match=r"(?s)3 bad rows.*rows\.jsonl:4:.*rows\.jsonl:20004:"):
            preprocess.run_shard(bench.context(), config, Shard(index, 3))


def test_one_process_trains_the_tokenizer_and_another_takes_over_if_it_dies(bench, config):
    context = bench.context(work="tokenizer")
    lock = acquire(context.work_dir / "tokenizer.lock", context.holder(), lambda _: None)
    waiting = threading.Event()
    report = context.report

    def notice(**said):
        if "waiting for the tokenizer of run run" in (said.get("phase") or ""):
            waiting.set()
        report(**said)

    context.report = notice
    outputs = []
    other = threading.Thread(target=lambda: outputs.append(preprocess.run(context, config)))
    other.start()
    assert waiting.wait(300)
    assert not (context.work_dir / "dataset" / "tokenizer").exists()

    lock.release()
    other.join(300)

    assert (context.work_dir / "dataset" / "tokenizer" / "tokenizer.json").exists()
    assert os.listdir(context.work_dir / "unfinished") == []
    assert len(outputs) == 1


@pytest.mark.parametrize("num_shards", [1, 2])
def test_blocks_without_a_usable_row_are_empty(bench, tmp_path, num_shards):
    rows = tmp_path / "rows.jsonl"
    good = [json.dumps({"source": f"a {index}", "target": "b"}) + "\n" for index in range(3000)]
    bad = "{}\n" * (2 * BLOCK_ROWS)
    rows.write_text("".join(good[:2000]) + bad + "".join(good[2000:]))

    artifact = sharded(bench, config_of(rows), range(num_shards), "sparse")

    summary = DatasetArtifact(artifact.path).summary
    assert sum(counts["rows"] for counts in summary.splits.values()) == len(good)
    assert sum(summary.skipped_rows.values()) == 2 * BLOCK_ROWS
