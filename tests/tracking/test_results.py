import json
import os
from dataclasses import replace

import pytest

from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import (
    StageResult,
    find_damage,
    find_result,
    fingerprint,
    latest_result,
    list_results,
    publish_result,
    read_result,
)


def _result(workspace, tmp_path, *, learning_rate=1e-4, stage="train") -> StageResult:
    source = tmp_path / "weights"
    source.write_text(f"trained at {learning_rate}")
    artifact = ArtifactStore(workspace).publish("checkpoint", source)
    ingredients = {"kind": "train", "settings": {"learning_rate": learning_rate}}
    return StageResult(
        fingerprint=fingerprint(ingredients),
        pipeline="demo",
        stage=stage,
        kind="train",
        ingredients=ingredients,
        outputs={"checkpoint/last": artifact.id},
        metrics={"rouge2": 0.25},
        run="demo-abcdef",
        attempt=1,
        seconds=2.5,
    )


def test_a_published_result_is_found_by_its_fingerprint(workspace, tmp_path):
    published = publish_result(workspace, _result(workspace, tmp_path))

    assert find_result(workspace, published.fingerprint) == published
    assert published.sequence > 0
    assert list(list_results(workspace)) == [published]
    assert find_result(workspace, "0" * 64) is None


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_result_whose_artifact_was_deleted_or_truncated_is_not_reused(
    workspace, tmp_path, damage
):
    """Fault 40: the artifact is made again; no path to the deleted one is used."""
    result = publish_result(workspace, _result(workspace, tmp_path))
    artifact = ArtifactStore(workspace).get(result.outputs["checkpoint/last"])
    if damage == "delete":
        (artifact.path / "weights").unlink()
    else:
        os.truncate(artifact.path / "weights", 1)

    assert find_result(workspace, result.fingerprint) is None
    assert read_result(workspace, result.fingerprint) == result

    # Computed again to the same bytes, the artifact is whole and the result stands again.
    publish_result(workspace, _result(workspace, tmp_path))
    assert find_result(workspace, result.fingerprint) == result


def _flip_a_bit(path):
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_a_result_whose_artifact_has_a_flipped_bit_is_not_reused(workspace, tmp_path):
    """Faults 22 and 41: the flip is detected in any file; the flip is detected before a stage reads
    the artifact; it is made again, and nothing made from it is reused.
    """
    result = publish_result(workspace, _result(workspace, tmp_path))
    artifact = ArtifactStore(workspace).get(result.outputs["checkpoint/last"])

    _flip_a_bit(artifact.path / "weights")

    assert find_result(workspace, result.fingerprint) is None
    publish_result(workspace, _result(workspace, tmp_path))
    assert find_result(workspace, result.fingerprint) == result


@pytest.mark.parametrize("is_verified", [True, False])
def test_what_no_record_shows_to_be_made_from_whole_inputs_goes_with_a_damaged_one(
    workspace, tmp_path, is_verified
):
    """Fault 41: a result of a version that did not verify its inputs."""
    store = ArtifactStore(workspace)
    (tmp_path / "rows").write_text("one two")
    dataset = store.publish("dataset", tmp_path / "rows")
    result = _result(workspace, tmp_path)
    ingredients = result.ingredients | {"inputs": {"dataset": [dataset.id]}}
    result = replace(result, ingredients=ingredients, inputs_verified=is_verified)
    result = publish_result(workspace, result)
    assert find_result(workspace, result.fingerprint) == result

    _flip_a_bit(dataset.path / "rows")
    while_damaged = find_result(workspace, result.fingerprint)
    store.publish("dataset", tmp_path / "rows")
    once_mended = find_result(workspace, result.fingerprint)

    assert store.is_intact(dataset.id)
    assert while_damaged == once_mended == (result if is_verified else None)


def test_a_result_computed_again_to_other_bytes_replaces_the_broken_one(workspace, tmp_path):
    """Fault 40: the artifact is made again; no path to the deleted one is used."""
    broken = publish_result(workspace, _result(workspace, tmp_path))
    artifact = ArtifactStore(workspace).get(broken.outputs["checkpoint/last"])
    (artifact.path / "weights").unlink()
    other = _result(workspace, tmp_path, learning_rate=2.0)

    again = publish_result(workspace, replace(broken, outputs=other.outputs))

    assert again.sequence > broken.sequence
    assert find_result(workspace, broken.fingerprint) == again


def test_publishing_a_result_twice_keeps_the_first(workspace, tmp_path):
    """Fault 4: the next attempt registers the artifact, exactly once."""
    first = publish_result(workspace, _result(workspace, tmp_path))

    second = publish_result(workspace, replace(_result(workspace, tmp_path), run="demo-zzzzzz"))

    assert second == first
    assert len(list(list_results(workspace))) == 1


def test_the_latest_result_of_a_stage_is_by_sequence_number(workspace, tmp_path):
    """Fault 35: records are ordered by sequence number; a lease lasts as long as its holder."""
    old = replace(_result(workspace, tmp_path, learning_rate=1.0), created_at="2026-01-01T12:00")
    new = replace(_result(workspace, tmp_path, learning_rate=2.0), created_at="2026-01-01T11:00")
    other = _result(workspace, tmp_path, learning_rate=3.0, stage="other")
    for result in (old, new, other):
        publish_result(workspace, result)

    assert latest_result(workspace, "demo", "train").fingerprint == new.fingerprint
    assert latest_result(workspace, "demo", "nothing") is None


def test_the_latest_result_is_found_again_when_its_pointer_is_deleted(workspace, tmp_path):
    publish_result(workspace, _result(workspace, tmp_path, learning_rate=1.0))
    newest = publish_result(workspace, _result(workspace, tmp_path, learning_rate=2.0))
    (workspace.results / "latest" / "demo" / "train.json").unlink()

    assert latest_result(workspace, "demo", "train") == newest


def test_a_damaged_result_is_no_result(workspace, tmp_path):
    result = publish_result(workspace, _result(workspace, tmp_path))
    (workspace.results / f"{result.fingerprint}.json").write_text('{"fingerprint": ')

    assert find_result(workspace, result.fingerprint) is None
    assert latest_result(workspace, "demo", "train") is None


def test_directories_of_another_shape_are_a_damaged_record(workspace, tmp_path):
    result = publish_result(workspace, _result(workspace, tmp_path))
    path = workspace.results / f"{result.fingerprint}.json"
    record = json.loads(path.read_text())
    record["ingredients"]["directories"] = [["model", 1]]
    path.write_text(json.dumps(record))

    assert find_result(workspace, result.fingerprint) is None
    assert "directories" in str(find_damage(workspace, result.fingerprint))


def test_a_result_with_fields_of_a_later_version_is_read(workspace, tmp_path):
    result = publish_result(workspace, _result(workspace, tmp_path))
    path = workspace.results / f"{result.fingerprint}.json"
    path.write_text(path.read_text().replace("{", '{"later": 1,', 1))

    assert find_result(workspace, result.fingerprint) == result


def test_a_full_disk_names_the_result_and_publishes_none(on_small_disk):
    """Fault 20: the error names the disk, earlier checkpoints are intact, and a background save
    fails before "done".
    """
    output = on_small_disk("""
        import sys
        from pathlib import Path
        from redco_flow.tracking.results import StageResult, find_result, publish_result
        from redco_flow.tracking.workspace import Workspace
        workspace = Workspace.open(Path(sys.argv[1], "workspace"))
        text = "x" * (2 << 20)
        result = StageResult("f" * 64, "demo", "train", "train", {"settings": {"x": text}}, {})
        try:
            publish_result(workspace, result)
        except OSError as error:
            print(str(workspace.results / ("f" * 64 + ".json")) in str(error))
        print(find_result(workspace, "f" * 64) is None)
        print(not [path for path in workspace.results.iterdir() if path.name[0] == "."])
    """)

    assert output.split() == ["True"] * 3
