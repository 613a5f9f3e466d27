"""A call that was written before its inputs were made, once they are, and while they are not."""

from dataclasses import replace

import pytest
from tiny_stages.calls import make_call, new_attempt

from redco_flow.launch.call import (
    InputReference,
    UpstreamMissing,
    read_call,
    with_inputs,
    write_call,
)
from redco_flow.records import write_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import fingerprint
from redco_flow.tracking.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    return Workspace.open(tmp_path / "workspace")


@pytest.fixture
def dataset(workspace, tmp_path):
    file = tmp_path / "data.txt"
    file.write_text("data")
    return ArtifactStore(workspace).publish("dataset", file)


@pytest.fixture
def before(workspace):
    """The attempt that makes the dataset."""
    return new_attempt(workspace.root, run="tiny-abcd", number=1)


@pytest.fixture
def ahead(workspace, before):
    """A call that takes the dataset of an attempt that may not have ended."""
    call = make_call(workspace.root)
    reference = InputReference("", "", "dataset", "before", "dataset")
    return replace(
        call,
        inputs={"dataset": [reference]},
        fingerprint="",
        upstream={"before": str(before.path)},
    )


def publish(before, outputs):
    write_json(before.result_path, {"fingerprint": "f" * 64, "outputs": outputs})


def test_the_call_becomes_what_it_would_have_been_had_it_waited(workspace, dataset, before, ahead):
    publish(before, {"dataset": dataset.id})
    waited = make_call(workspace.root, inputs=[dataset])

    call = with_inputs(ahead)

    assert call == waited
    assert call.fingerprint == fingerprint(waited.ingredients)
    assert with_inputs(call) is call


def test_it_survives_being_written_and_read(dataset, before, ahead):
    publish(before, {"dataset": dataset.id})

    write_call(before, ahead)

    assert read_call(before.call_path) == ahead


def test_an_input_that_was_known_at_once_stays(dataset, before, ahead):
    known = InputReference(dataset.id, str(dataset.path), "dataset", "first", "dataset")
    both = replace(ahead, inputs={"dataset": [known, *ahead.inputs["dataset"]]})
    publish(before, {"dataset": dataset.id})

    call = with_inputs(both)

    assert [one.stage for one in call.inputs["dataset"]] == ["first", "before"]
    assert call.ingredients["inputs"] == {"dataset": [dataset.id, dataset.id]}


def test_a_stage_that_did_not_complete_is_named_with_its_attempt(before, ahead):
    with pytest.raises(UpstreamMissing, match=f"stage 'before' has no result in {before.path}"):
        with_inputs(ahead)


def test_an_output_that_was_not_made_is_named_with_those_that_were(before, ahead, dataset):
    publish(before, {"metrics": dataset.id})

    with pytest.raises(UpstreamMissing, match=r"output 'dataset'.*'before', which made only: metr"):
        with_inputs(ahead)


def test_an_artifact_that_was_deleted_is_named(before, ahead):
    publish(before, {"dataset": "0" * 64})

    with pytest.raises(UpstreamMissing, match=r"dataset 0{64}, made by stage 'before', is gone"):
        with_inputs(ahead)
